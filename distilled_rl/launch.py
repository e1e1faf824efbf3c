"""Start a run: environment, checks, then verl's own entry point."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distilled_rl.checks import check_run
from distilled_rl.config import SOCKET_BASE, ConfigError

# What a CPU run needs in the environment of every process, before torch, vLLM or verl are imported. Values already set win.
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # see distilled_rl/platforms/cpu.py
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs inside its server actor: one process less
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # Ray starts workers at nice 15; on a shared machine they would starve
}
QUIET_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
}


def prepare_environment(config: DictConfig) -> None:
    """Set the environment variables that the run's device needs. Must run before verl is imported.

    Raises ``RuntimeError`` when verl is already imported for another platform.
    """
    values = dict(QUIET_ENVIRONMENT)
    if config.trainer.device == "cpu":
        if "verl" in sys.modules and os.environ.get("VERL_PLATFORM") != "cpu":
            raise RuntimeError(
                "verl is already imported without VERL_PLATFORM=cpu: its platform can no longer be chosen"
            )
        values.update(CPU_ENVIRONMENT)
        # A run is a dozen processes: with as many threads as cores in each they wait for one another.
        values["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for name, value in values.items():
        os.environ.setdefault(name, value)
    # Ray's workers inherit it; a run in a cluster that is already there has a job id, and so sockets, of its own.
    if not os.environ.get("RAY_ADDRESS") and OmegaConf.select(config, "ray_kwargs.ray_init.address") is None:
        os.environ[SOCKET_BASE] = str(1000 * secrets.randbelow(2**31))
    # verl's "file" logger truncates its file (verl/utils/tracking.py:540), so every start of a run gets a file of its own.
    os.environ["VERL_FILE_LOGGER_PATH"] = str(next_log_file(config))


def run_directory(config: DictConfig) -> Path:
    """Return the absolute directory of a run."""
    return Path(config.run.dir).resolve()


def log_files(directory: Path) -> list[Path]:
    """Return the logs of a run directory, one per start of the run, oldest first; each holds one JSON line per step."""
    return sorted(directory.glob("metrics-*.jsonl"))


def next_log_file(config: DictConfig) -> Path:
    """Return the log file for a new start of the run."""
    directory = run_directory(config)
    return directory / f"metrics-{len(log_files(directory)):03d}.jsonl"


def last_step(directory: Path) -> int:
    """Return the step of the newest complete checkpoint of a run directory, 0 if there is none.

    verl writes ``latest_checkpointed_iteration.txt`` after everything else (verl/trainer/ppo/v1/trainer_base.py:1024).
    """
    tracker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return 0
    step = int(tracker.read_text(encoding="utf-8").strip())
    return step if (directory / "checkpoints" / f"global_step_{step}").is_dir() else 0


class LocalTaskRunner:
    """verl's ``TaskRunnerV1`` executed in the calling process: one Ray actor, and its imports, less.

    ``run_ppo`` (verl/trainer/main_ppo.py:106) calls ``task_runner_class.remote().run.remote(config)``; the undecorated
    class of a Ray actor class is ``__ray_metadata__.modified_class``.
    """

    class _Run:
        def remote(self, config: DictConfig) -> Any:
            import ray
            from verl.trainer.main_ppo import TaskRunnerV1

            TaskRunnerV1.__ray_metadata__.modified_class().run(config)  # type: ignore[attr-defined]
            return ray.put(None)

    run = _Run()

    @classmethod
    def remote(cls) -> "LocalTaskRunner":
        """Return a runner, as a Ray actor class would."""
        return cls()


# What ray.init says when its own agent takes longer than its fixed 15 s, as it can on a busy machine.
RAY_TOO_SLOW = "timed out during startup"


def with_patience(run: Callable[[], None], shut_down: Callable[[], None], tries: int = 3) -> None:
    """Call ``run``; when Ray was too slow to start, shut down what is there of it and call again, ``tries`` times in all."""
    for left in reversed(range(tries)):
        try:
            return run()
        except Exception as error:
            if RAY_TOO_SLOW not in str(error) or not left:
                raise
            print(f"Ray did not start in time ({left} more tries): {error}", file=sys.stderr, flush=True)
            shut_down()


def train(config: DictConfig) -> Path:
    """Train one run to its end and return its directory.

    Raises :class:`ConfigError`, before anything is started or written, for a configuration that cannot work.
    """
    for warning in check_run(config):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    prepare_environment(config)
    directory = run_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "config.yaml", resolve=True)

    import ray
    import verl  # noqa: F401  (loads the plugin)

    from distilled_rl import plugin

    plugin.ensure_loaded()
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    started = time.monotonic()
    runner = LocalTaskRunner if config.trainer.device == "cpu" else TaskRunnerV1
    with_patience(lambda: run_ppo(config, task_runner_class=runner), ray.shutdown)
    print(f"{config.run.name}: finished in {time.monotonic() - started:.0f} s; logs in {directory}", flush=True)
    return directory


__all__ = ["ConfigError", "LocalTaskRunner", "last_step", "log_files", "prepare_environment", "run_directory", "train"]
