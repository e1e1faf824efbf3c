"""Fixtures for tests that import verl."""

import os

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    """Import verl on the CPU platform with the plugin loaded."""
    import verl  # noqa: F401

    from distilled_rl import plugin

    plugin.ensure_loaded()
