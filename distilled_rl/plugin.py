"""verl side of the plugin (entry point group ``verl.plugins``: imported by ``import verl`` in every process).

verl's entry-point loader imports this module, calls nothing, and swallows errors at DEBUG level
(verl/__init__.py:71-75). So the module registers at import, logs a failure at ERROR before raising it, and
:func:`ensure_loaded` lets a launcher stop a run whose plugin did not load.

The registrations need heavy verl modules. Importing those here would slow down every process that imports verl, so each
one runs right after verl itself imports the module it belongs to.
"""

import logging
import os
import sys
from typing import Any

import wrapt

from distilled_rl.platforms import cpu

logger = logging.getLogger(__name__)

_loaded = False


def _register_trainer(_module: Any) -> None:
    # When that module is being imported itself, it brought verl here and registers in a moment.
    if "distilled_rl.trainer" not in sys.modules:
        import distilled_rl.trainer  # noqa: F401  (registers at import)


def _register_estimator(_module: Any) -> None:
    import distilled_rl.estimator  # noqa: F401  (registers at import)


def _register_distillation_loss(_module: Any) -> None:
    import distilled_rl.teacher.server  # noqa: F401  (registers at import)


def load() -> None:
    """Activate the platform and arrange the registrations. Idempotent; raises whatever goes wrong, after logging it."""
    global _loaded
    if _loaded:
        return
    try:
        if cpu.is_selected():
            cpu.activate()
        wrapt.register_post_import_hook(_register_estimator, "verl.trainer.ppo.core_algos")
        wrapt.register_post_import_hook(_register_distillation_loss, "verl.trainer.distillation.losses")
        wrapt.register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1.trainer_sync")
    except Exception:
        logger.error("the distilled_rl plugin failed to load; verl would run on without it", exc_info=True)
        raise
    _loaded = True


def ensure_loaded() -> None:
    """Raise ``RuntimeError`` unless the plugin is active here and verl will load it in the run's other processes, too.

    verl hides the exception of a failing plugin, so call this after ``import verl`` and before a run starts.
    """
    if not (_loaded and _is_enabled()):
        raise RuntimeError(
            "the distilled_rl plugin is not loaded in this process: see the ERROR line above for the cause, and check that "
            "VERL_USE_EXTERNAL_PLUGINS is unset, 'auto', or contains 'distilled_rl'"
        )


def _is_enabled() -> bool:
    """Whether verl's settings let it load this module (verl/__init__.py:44-70); Ray workers inherit them."""
    plugins = os.getenv("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    modules = os.getenv("VERL_USE_EXTERNAL_MODULES", "")
    return plugins == "auto" or "distilled_rl" in map(str.strip, plugins.split(",")) or __name__ in modules.split(",")


load()
