"""Recipes: Hydra configurations composed on top of verl's own."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distilled_rl.config import ConfigError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def find_recipe(recipe: str) -> Path:
    """Return the file of a recipe given by name (``distilled_rl``) or by path. Raises :class:`ConfigError` if there is none."""
    path = Path(recipe)
    candidates = [path] if path.suffix in (".yaml", ".yml") else []
    candidates.append(RECIPES / f"{recipe}.yaml")
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem != "base"))
    raise ConfigError(f"no recipe {recipe!r}: give the path of a YAML file or one of {known}")


def verl_config_dir() -> Path:
    """Return verl's configuration directory without importing verl (which would fix the platform)."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed in this environment: run scripts/setup.sh")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def register_resolvers() -> None:
    """Register the resolvers that the recipes use: ``basename`` of a path and ``diff`` of two integers."""
    OmegaConf.register_new_resolver("basename", lambda path: Path(str(path)).name, replace=True)
    OmegaConf.register_new_resolver("diff", lambda left, right: int(left) - int(right), replace=True)


def compose(recipe: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a recipe with Hydra overrides (``key=value``, ``group=choice``). Raises :class:`ConfigError` on a bad override."""
    register_resolvers()
    path = find_recipe(recipe)
    search = [f"file://{verl_config_dir()}", f"file://{RECIPES}"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base=None):
            config = hydra_compose(
                config_name=path.stem, overrides=[f"hydra.searchpath=[{','.join(search)}]", *overrides]
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {path.name}: {error}") from error
    return config
