"""Recipes: Hydra configurations composed on top of verl's own, and what is wrong with an override that does not fit."""

import dataclasses
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distilled_rl.config import ConfigError, DistilledRLConfig

_PACKAGE = Path(__file__).resolve().parent
# Inside the package in a wheel (setup.py puts them there), beside it in a checkout.
RECIPES = next(
    (path for path in (_PACKAGE / "_recipes", _PACKAGE.parent / "recipes") if path.is_dir()), _PACKAGE / "_recipes"
)
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def find_recipe(recipe: str) -> Path:
    """Return a recipe's file, given its name (``distilled_rl``) or path. Raises :class:`ConfigError` if there is none."""
    path = Path(recipe)
    candidates = [path] if path.suffix in (".yaml", ".yml") else []
    candidates.append(RECIPES / f"{recipe}.yaml")
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    known = sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem != "base")
    near = difflib.get_close_matches(recipe, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(f"no recipe {recipe!r}{hint}: give the path of a YAML file or one of {', '.join(known)}")


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
    """Compose a recipe with Hydra overrides (``key=value``, ``group=choice``).

    Raises :class:`ConfigError` on a bad override; for a key that does not exist it names the nearest one that does.
    """
    path = find_recipe(recipe)
    try:
        return _compose(path, overrides)
    except COMPOSE_ERRORS as error:
        problems = list(_override_problems(path, overrides)) or [_shorten(error)]
        raise ConfigError(f"recipe {path.name}: " + "; ".join(problems)) from error


def flatten(config: DictConfig) -> dict[str, Any]:
    """Return every key of a configuration, dotted, branches included, with its value before interpolation."""
    return dict(_walk(OmegaConf.to_container(config, resolve=False), ""))


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")


def _compose(path: Path, overrides: Sequence[str]) -> DictConfig:
    register_resolvers()
    search = [f"file://{verl_config_dir()}", f"file://{RECIPES}"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(path.parent), version_base=None):
        return hydra_compose(config_name=path.stem, overrides=[f"hydra.searchpath=[{','.join(search)}]", *overrides])


def _shorten(error: Exception) -> str:
    """Return an error's message on one line, without Hydra's listing of its search path."""
    return " ".join(str(error).split("Config search path:")[0].split())


def _override_problems(path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per override of a key that does not exist, with the nearest that does; else nothing."""
    try:
        parsed = [OverridesParser.create().parse_override(override) for override in overrides]
        bases = (RECIPES, path.parent, verl_config_dir())
        groups = {folder.name for base in bases for folder in base.iterdir() if folder.is_dir()}
        # The choices decide which keys exist.
        config = _compose(path, [str(item.input_line) for item in parsed if item.key_or_group in groups])
    except COMPOSE_ERRORS:
        return
    known = {*flatten(config), *groups, *(item.key_or_group for item in parsed if item.is_add())}
    for item in parsed:
        key = item.key_or_group
        if item.is_add() or key in known or key.split("@")[0] in groups or key.startswith("hydra."):
            continue
        added = "" if item.is_delete() else f" (a key that is really new is written +{item.input_line})"
        yield _unknown_option(item, config) or _unknown(key, known) + added


def _unknown(key: str, known: Iterable[str]) -> str:
    near = nearest(key, known)
    return f"unknown key {key}" + (f": did you mean {near}?" if near else "")


def _unknown_option(item: Override, config: DictConfig) -> str | None:
    """Return what is wrong with an override of a ``distilled_rl`` key, None for any other key."""
    node, _, option = item.key_or_group.partition(".")
    if node != "distilled_rl" or "." in option:
        return None
    from distilled_rl.methods import methods

    mode = str(OmegaConf.select(config, "distilled_rl.mode"))
    common = {field.name for field in dataclasses.fields(DistilledRLConfig)} - {"options"}
    options = {name: {field.name for field in dataclasses.fields(method.options)} for name, method in methods().items()}
    owners = [name for name, own in options.items() if option in own]
    if option in common or mode in owners:
        return f"{item.key_or_group} is valid, but the recipe does not set it: write +{item.input_line}"
    if owners:
        own = ", ".join(sorted(options.get(mode, ()))) or "none"
        return (
            f"{item.key_or_group} is an option of mode {' and '.join(sorted(owners))}, and the mode here is {mode} "
            f"(its own options: {own})"
        )
    known = sorted(f"distilled_rl.{name}" for name in common | options.get(mode, set()))
    return f"{_unknown(item.key_or_group, known)} (mode {mode} knows {', '.join(known)})"


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key most like ``key``: a misspelt sibling, the same ending, or a similar whole."""
    known = sorted(known)
    parent, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    if near := difflib.get_close_matches(leaf, siblings, n=1):
        return siblings[near[0]]
    if endings := [name for name in known if name.endswith(f".{key}")]:
        return min(endings, key=len)
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.75)), None)
