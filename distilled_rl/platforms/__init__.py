"""Device platforms that verl 0.9.1 does not ship."""
