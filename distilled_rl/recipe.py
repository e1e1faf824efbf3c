"""Recipes: Hydra configurations composed on top of verl's own, and what is wrong with an override that does not fit."""

import copy
import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distilled_rl.config import ConfigError, DistilledRLConfig
from distilled_rl.teacher.specs import SEVERAL

_PACKAGE = Path(__file__).resolve().parent
# Inside the package in a wheel (setup.py puts them there), beside it in a checkout.
RECIPES = next(
    (path for path in (_PACKAGE / "_recipes", _PACKAGE.parent / "recipes") if path.is_dir()), _PACKAGE / "_recipes"
)
# Where each of several teachers has its node.
BY_KEY = "teacher.by_key"
OPEN_NODES = (f"{BY_KEY}.", f"{BY_KEY}=", "teacher.eos_map=")
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

    Entries of ``teacher.by_key`` and ``teacher.eos_map`` are added without the ``+`` of a new key.

    Raises :class:`ConfigError` on a bad override; for a key that does not exist it names the nearest one that does.
    """
    path = find_recipe(recipe)
    overrides = [f"++{override}" if override.startswith(OPEN_NODES) else override for override in overrides]
    try:
        config = _compose(path, overrides)
        derive_teacher_pool(config)
        return config
    except COMPOSE_ERRORS as error:
        problems = list(_override_problems(path, overrides)) or [_shorten(error)]
        raise ConfigError(f"recipe {path.name}: " + "; ".join(problems)) from error


def derive_teacher_pool(config: DictConfig) -> None:
    """Have verl serve those of several teachers that are served: for each a copy of ``distillation.teacher_models.teacher_model``,
    and a pool of as many GPUs as they take together, which the recipes leave out of the trainer's.

    An entry of ``teacher.by_key`` gives ``n_gpus`` (of each node of the pool; ``tensor_parallel`` by default) and
    ``tensor_parallel`` (1 by default). On a CPU machine Ray is told of as many GPUs as trainer and pool take.

    Does nothing for one teacher. Entries that are no nodes are left to the checks. Raises :class:`ConfigError` for numbers
    that cannot be.
    """
    entries = OmegaConf.select(config, BY_KEY)
    if OmegaConf.select(config, "teacher.source") != SEVERAL or not isinstance(entries, DictConfig):
        return
    nodes = {str(key): entries[key] for key in entries if isinstance(entries[key], DictConfig)}
    served = {key: node for key, node in nodes.items() if (node.get("source") or "server") == "server"}
    with open_dict(config):
        config.teacher.enabled = bool(served)
        config.teacher.nnodes = (config.teacher.nnodes or 1) if served else 0
        models = config.distillation.teacher_models
        template = copy.deepcopy(models.teacher_model)
        total = 0
        for name, (key, node) in zip(_node_names(served), served.items(), strict=True):
            split = _whole(f"{BY_KEY}.{key}.tensor_parallel", node.get("tensor_parallel"), 1)
            gpus = _whole(f"{BY_KEY}.{key}.n_gpus", node.get("n_gpus"), split)
            if gpus * config.teacher.nnodes % split:
                raise ConfigError(
                    f"{BY_KEY}.{key}.n_gpus is {gpus}, which does not split into servers of tensor_parallel={split}: make it a "
                    "multiple"
                )
            # verl gives the only served teacher the whole pool, and knows it by this name only
            # (verl/workers/config/distillation.py:290); beside others it drops the name.
            model = models.teacher_model if len(served) == 1 else copy.deepcopy(template)
            model.key = key
            model.model_path = node.get("model")
            model.num_replicas = gpus * config.teacher.nnodes // split
            model.inference.tensor_model_parallel_size = split
            models["teacher_model" if len(served) == 1 else name] = model
            total += gpus
        config.teacher.n_gpus = total
        config.distillation.teacher_key = OmegaConf.select(config, "teacher.key")
        ray = OmegaConf.select(config, "ray_kwargs.ray_init")
        if config.trainer.device == "cpu" and ray is not None and ray.get("num_gpus") is not None:
            needed = config.trainer.n_gpus_per_node * config.trainer.nnodes + total * config.teacher.nnodes
            ray.num_gpus = max(ray.num_gpus, needed)


def _node_names(keys: Iterable[str]) -> list[str]:
    """Return names for configuration nodes, without dots, none of them ``teacher_model`` or there twice."""
    names: list[str] = []
    for key in keys:
        name = re.sub(r"\W", "_", key)
        while name in (*names, "teacher_model"):
            name += "_"
        names.append(name)
    return names


def _whole(key: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}: must be a whole number >= 1")
    return value


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
    of_groups = _teacher_keys(path)
    added_keys = {item.key_or_group for item in parsed if item.is_add() or item.is_force_add()}
    known = {*flatten(config), *groups, *added_keys}
    for item in parsed:
        key = item.key_or_group
        if key in known or key.split("@")[0] in groups or key.startswith("hydra."):
            continue
        added = "" if item.is_delete() else f" (a key that is really new is written +{item.input_line})"
        yield (
            _unknown_option(item, config) or _of_another_teacher(key, known, of_groups) or _unknown(key, known) + added
        )


def _teacher_keys(path: Path) -> dict[str, list[str]]:
    """Return the keys of a ``teacher`` node, each with the names of the groups that have it."""
    groups: dict[str, list[str]] = {}
    for file in sorted({file for base in (RECIPES, path.parent) for file in (base / "teacher").glob("*.yaml")}):
        for key in OmegaConf.load(file):
            groups.setdefault(f"teacher.{key}", []).append(file.stem)
    return groups


def _of_another_teacher(key: str, known: Iterable[str], groups: Mapping[str, list[str]]) -> str | None:
    """Return which ``teacher`` group an unknown key belongs to, None where none has one like it, or the present one does."""
    if not key.startswith("teacher."):
        return None
    near = nearest(key, {*known, *groups})
    if near is None or near not in groups or near in known:
        return None
    choices = " or ".join(f"teacher={name}" for name in groups[near])
    if near == key:
        return f"{key} belongs to {choices}: add that to the command"
    return f"unknown key {key}: did you mean {near}, which belongs to {choices}?"


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
