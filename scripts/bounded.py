"""Run a command under a hard time limit, and leave nothing of it behind: no process and no file in /dev/shm.

Usage: python scripts/bounded.py SECONDS COMMAND [ARGUMENT ...]

The exit status is the command's; 124 when it overran; 1 when it succeeded but left processes running. Every descendant
counts, also one that made a session of its own, as Ray's daemons and vLLM's engines do: orphans are adopted by this process
(PR_SET_CHILD_SUBREAPER, so Linux only). What is killed or removed is named on the standard error.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")
GRACE = 10.0  # seconds in which what is still running may end by itself, and again after SIGTERM
OVERRUN = 124


def parents() -> dict[int, int]:
    """Return the parent of every live process."""
    result = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # pid (name) state ppid ...; the name may hold spaces and parentheses
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    result[int(entry.name)] = int(parent)
    return result


def descendants() -> list[int]:
    """Return every live process below this one."""
    table = parents()
    found, layer = [], {os.getpid()}
    while layer:
        layer = {pid for pid, parent in table.items() if parent in layer}
        found += layer
    return found


def reap() -> None:
    """Collect the exit status of every adopted process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def wait_for(process: int, seconds: float) -> int | None:
    """Wait for a child and return its exit status, None if it overran; adopted processes are reaped all along."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == process:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            time.sleep(0.05)
    return None


def name_of(pid: int) -> str:
    """Return the command line of a process, shortened."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode(errors="replace").strip()[:100]
    return "?"


def end_all(grace: float) -> list[str]:
    """End every descendant: let it end by itself, then SIGTERM, then SIGKILL. Returns what had to be told to."""
    told: dict[int, str] = {}
    for signal_number, patience in ((None, grace), (signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        if signal_number is not None:
            for pid in descendants():
                told[pid] = f"process {pid}: {name_of(pid)}"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
        deadline = time.monotonic() + patience
        while descendants() and time.monotonic() < deadline:
            reap()
            time.sleep(0.1)
        reap()
    return list(told.values())


def shared_files() -> set[Path]:
    """Return this user's files in /dev/shm."""
    with contextlib.suppress(OSError):
        return {path for path in SHARED_MEMORY.iterdir() if path.is_file() and path.stat().st_uid == os.getuid()}
    return set()


def files_in_use() -> set[str]:
    """Return the paths under /dev/shm that any live process has mapped or open."""
    used: set[str] = set()
    for pid in parents():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if str(SHARED_MEMORY) in line:
                    used.add(line[line.index(str(SHARED_MEMORY)) :])
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(os.readlink(descriptor))
    return used


def remove_files(before: set[Path]) -> list[str]:
    """Remove the files in /dev/shm that are new and that nobody uses; returns what they were."""
    new = shared_files() - before
    if not new:
        return []
    used = files_in_use()
    removed = []
    for path in sorted(new):
        if str(path) not in used:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(f"file {path}")
    return removed


def main() -> int:
    """Run the command of the command line; returns the exit status."""
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    before = shared_files()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    interrupted: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    process = subprocess.Popen(command).pid
    grace = 0.0
    try:
        status = wait_for(process, seconds)
        if status is None:
            print(f"bounded: the command did not end within {seconds:g} s and is killed", file=sys.stderr)
            status = OVERRUN
        else:
            grace = GRACE
    except KeyboardInterrupt:
        status = 128 + (interrupted or [signal.SIGINT])[0]
    processes = end_all(grace)
    files = remove_files(before)
    for line in processes + files:
        print(f"bounded: left behind, now removed: {line}", file=sys.stderr)
    if status < 0:
        status = 128 - status
    return status or int(bool(processes))


if __name__ == "__main__":
    sys.exit(main())
