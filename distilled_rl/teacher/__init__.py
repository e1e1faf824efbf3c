"""Where teacher log-probabilities come from."""
