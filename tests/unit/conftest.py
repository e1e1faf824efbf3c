"""A run that passes every check; a test breaks one thing of it."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from distilled_rl.recipe import compose
from tests.unit.valid_run import Assets, rows, write_model, write_parquet


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    root = tmp_path_factory.mktemp("assets")
    write_model(root / "student")
    write_model(root / "teacher", hidden_size=96)
    write_parquet(root / "train.parquet", rows(64))
    write_parquet(root / "val.parquet", rows(8))
    return Assets(root)


@pytest.fixture(scope="session")
def _valid(assets: Assets) -> Callable[[str], bytes]:
    """A function that composes a mode's valid run once; pickled, as that is the cheapest way to copy one."""
    return functools.cache(lambda mode: pickle.dumps(compose(mode, assets.overrides(mode))))


@pytest.fixture
def make_run(_valid: Callable[[str], bytes]) -> Callable[..., DictConfig]:
    """A function ``(mode, {key: value, ...})`` that returns a valid run's configuration with those values changed."""

    def make(mode: str = "distilled_rl", changes: dict[str, Any] | None = None) -> DictConfig:
        config = pickle.loads(_valid(mode))
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        return config

    return make
