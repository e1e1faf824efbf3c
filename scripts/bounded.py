"""Run a command under a hard time limit, and leave nothing of it behind: no process and no file in /dev/shm.

Usage: python scripts/bounded.py SECONDS COMMAND [ARGUMENT ...]

The exit status is the command's; 124 when it overran; 1 when it succeeded but left processes running. Every descendant
counts, also one in a session of its own whose parent has died, as Ray's daemons can be: this process adopts orphans
(PR_SET_CHILD_SUBREAPER, so Linux only). What had to be killed or removed is named on the standard error.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from types import FrameType

import psutil

from distilled_rl.processes import remove_orphaned_shared_memory, shared_memory_files

PR_SET_CHILD_SUBREAPER = 36
GRACE = 10.0  # seconds in which what is still running may end by itself, and again after SIGTERM and after SIGKILL
OVERRUN = 124


def reap() -> dict[int, int]:
    """Collect the children, adopted ones included, that have ended: process id to exit status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            ended[process] = os.waitstatus_to_exitcode(status)
    return ended


def wait_for(process: int, seconds: float) -> int | None:
    """Wait for a child and return its exit status, None if it overran; adopted processes are reaped all along."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = reap()
        if process in ended:
            return ended[process]
        time.sleep(0.05)
    return None


def end_all(grace: float) -> list[str]:
    """End every descendant: ``grace`` seconds to end by itself, then SIGTERM, then SIGKILL. Returns what had to be told."""
    told: dict[int, str] = {}
    for signal_number, patience in ((None, grace), (signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        if signal_number is not None:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    told[process.pid] = f"process {process.pid}: {' '.join(process.cmdline())[:100]}"
                    process.send_signal(signal_number)
        deadline = time.monotonic() + patience
        reap()
        while psutil.Process().children() and time.monotonic() < deadline:
            time.sleep(0.1)
            reap()
    return list(told.values())


def main() -> int:
    """Run the command of the command line and return the exit status."""
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    before = shared_memory_files()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    interrupted = [signal.SIGINT]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interrupted.append(signal.Signals(number))
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    process = os.posix_spawnp(command[0], command, os.environ)
    grace = 0.0
    try:
        status = wait_for(process, seconds)
        if status is None:
            print(f"bounded: the command did not end within {seconds:g} s and is killed", file=sys.stderr)
            status = OVERRUN
        else:
            grace = GRACE
    except KeyboardInterrupt:
        status = 128 + interrupted[-1]
    left = end_all(grace)
    for line in [*left, *(f"/dev/shm/{name}" for name in remove_orphaned_shared_memory(before))]:
        print(f"bounded: was left over and is removed: {line}", file=sys.stderr)
    if status < 0:
        status = 128 - status
    return status or int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
