"""The training methods: one module each, found by name.

A module in this package is one method. It defines a frozen dataclass of options and registers one function::

    @register("my_method", options=MyOptions, needs_teacher=True)
    def my_method(batch: TeacherBatch, options: MyOptions) -> tuple[torch.Tensor, dict[str, float]]:
        ...

It needs no other code: the recipe names it (``distilled_rl.mode: my_method``), its options become the allowed keys under
``distilled_rl``, and the trainer feeds it the aligned fields.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TeacherBatch:
    """What a method sees of one training batch: nested jagged tensors [B, j], one row per response.

    ``teacher_log_probs`` and ``old_log_probs``: float32 log-probabilities of the sampled tokens, in nats.
    ``advantages``: float32 advantages from verl's estimator. ``mask``: bool, True on the tokens that train.
    """

    teacher_log_probs: "torch.Tensor"
    old_log_probs: "torch.Tensor"
    advantages: "torch.Tensor"
    mask: "torch.Tensor"


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True)
class Method:
    """A registered method: its name, what it does to the advantages, and its options.

    ``needs_teacher``: whether it asks a teacher. ``uses_reward``: whether the given advantages reach its result, so that a
    group of one response, which has none, teaches it nothing. ``scores(advantages, options)``: bool like the advantages
    (float32, any shape), the tokens at which the teacher's log-prob can change the result.
    """

    name: str
    apply: Callable[[TeacherBatch, Any], "tuple[torch.Tensor, dict[str, float]]"]
    options: type
    needs_teacher: bool
    uses_reward: bool
    scores: "Callable[[torch.Tensor, Any], torch.Tensor]"


def every_token(advantages: "torch.Tensor", _options: Any) -> "torch.Tensor":
    """Return True everywhere: the method uses the teacher's log-prob of every token."""
    import torch

    return torch.ones_like(advantages, dtype=torch.bool)


_METHODS: dict[str, Method] = {}


def register(
    name: str,
    *,
    options: type = NoOptions,
    needs_teacher: bool = True,
    uses_reward: bool = True,
    scores: "Callable[[torch.Tensor, Any], torch.Tensor]" = every_token,
) -> Callable[[Callable], Callable]:
    """Register a function ``(TeacherBatch, options) -> (advantages, metrics)`` under ``name``.

    The returned advantages are nested like the given ones. The rest of the arguments: see :class:`Method`.
    Raises ``ValueError`` when the name is taken.
    """

    def decorator(function: Callable) -> Callable:
        known = _METHODS.get(name)
        if known is not None and known.apply.__module__ != function.__module__:
            raise ValueError(f"method {name!r} is already registered by {known.apply.__module__}")
        _METHODS[name] = Method(name, function, options, needs_teacher, uses_reward, scores)
        return function

    return decorator


def get_method(name: str) -> Method:
    """Return the method called ``name``; raises ``ValueError`` that lists the known ones."""
    known = methods()
    if name not in known:
        raise ValueError(f"unknown mode {name!r}: distilled_rl.mode must be one of {', '.join(sorted(known))}")
    return known[name]


def methods() -> dict[str, Method]:
    """Return every method of this package by name, importing its modules on the first call."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_METHODS)
