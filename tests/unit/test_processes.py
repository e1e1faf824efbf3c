"""Commands that cannot outlive their caller."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from distilled_rl.processes import Watched, remove_orphaned_shared_memory, shared_memory_files, tail, tree_pss

GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_exit_status_and_output(tmp_path: Path) -> None:
    polls = []
    watched = Watched([sys.executable, "-c", "print('hello'); raise SystemExit(3)"], tmp_path / "deep" / "log")
    assert watched.wait(lambda: polls.append(1), interval=0.05) == 3
    assert (tmp_path / "deep" / "log").read_text() == "hello\n"
    assert polls


def test_time_limit_kills_the_whole_tree(tmp_path: Path) -> None:
    # the grandchild is in a session of its own: killing the process group alone would miss it
    watched = Watched([sys.executable, "-c", GRANDCHILD], tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text().strip().isdigit())
    grandchild = int((tmp_path / "log").read_text())
    with pytest.raises(TimeoutError, match="killed after 0 s"):
        watched.wait(lambda: None, timeout=0.2, interval=0.05)
    wait_for(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE)
    assert not psutil.pid_exists(watched.process.pid)


def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from distilled_rl.processes import Watched
watched = Watched([sys.executable, "-c", "import time; time.sleep(60)"], Path({str(tmp_path / "log")!r}))
print(watched.process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_memory_of_the_tree_is_seen(tmp_path: Path) -> None:
    code = "import time; block = bytearray(64 * 2**20); print('ready', flush=True); time.sleep(60)"
    watched = Watched([sys.executable, "-c", code], tmp_path / "log", sample_seconds=0.1)
    try:
        wait_for(lambda: watched.peak_bytes > 64 * 2**20)
        assert tree_pss(watched.process.pid) < 1024 * 2**20
    finally:
        watched.close()
    assert tree_pss(watched.process.pid) == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
def test_only_orphaned_shared_memory_is_removed() -> None:
    before = shared_memory_files()
    orphan, held = Path("/dev/shm/distilled_rl_test_orphan"), Path("/dev/shm/distilled_rl_test_held")
    orphan.write_bytes(b"x")
    with held.open("wb"):
        assert remove_orphaned_shared_memory(before) == [orphan.name]
        assert held.exists() and not orphan.exists()
    assert held.name in remove_orphaned_shared_memory(before)


def test_tail(tmp_path: Path) -> None:
    assert tail(tmp_path / "none") == ""
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert tail(tmp_path / "log", 2) == "b\nc"
