"""The miniature's build as a process of its own."""

import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_the_workers_of_a_killed_build_end_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distilled_rl.miniature", "build", "--out", str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        build = psutil.Popen(command, stdout=log, stderr=log)
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while ": step" not in (tmp_path / "log").read_text():  # the workers train
            assert build.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        workers = [child for child in build.children() if any("spawn_main" in part for part in child.cmdline())]
        assert workers and all(alive(worker) for worker in workers)
    finally:
        build.kill()
        build.wait()
    _, still = psutil.wait_procs(workers, timeout=10)
    assert not [worker for worker in still if alive(worker)]
