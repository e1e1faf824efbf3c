"""Run a command so that it cannot outlive its caller, and watch what it costs."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tree(pid: int) -> list[psutil.Process]:
    """Return the process ``pid`` and all its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int) -> None:
    """Kill ``pid`` and every descendant, and wait for them to be gone."""
    victims = tree(pid)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=10)


def tree_pss(pid: int) -> int:
    """Return the proportional set size of a process tree in bytes: pages shared by N processes count 1/N each."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            total += getattr(process.memory_full_info(), "pss", 0)
    return total


SHARED_MEMORY = Path("/dev/shm")


def shared_memory_files() -> set[str]:
    """Return the names of this user's files in /dev/shm (empty where there is no such directory)."""
    if not SHARED_MEMORY.is_dir():
        return set()
    names = set()
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                names.add(path.name)
    return names


def remove_orphaned_shared_memory(before: set[str]) -> list[str]:
    """Remove shared-memory files that appeared since ``before`` and that no living process has mapped or open.

    A process that is killed (as Ray kills its actors at the end of a run) cannot unlink its semaphores and buffers.
    Returns the names removed.
    """
    new = shared_memory_files() - before
    if not new:
        return []
    used = {name for process in psutil.process_iter() for name in _shared_memory_in_use(process.pid)}
    removed = sorted(new - used)
    for name in removed:
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / name).unlink()
    return removed


def _shared_memory_in_use(pid: int) -> set[str]:
    """Return the names of the files in /dev/shm that a process has mapped or open; what is gone meanwhile is skipped."""
    folder, used = Path("/proc") / str(pid), set()
    with contextlib.suppress(OSError):
        lines = (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        used |= {Path(line.split()[5]).name for line in lines if " /dev/shm/" in line}
    with contextlib.suppress(OSError):
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("/dev/shm/"):
                    used.add(Path(target.split(" ")[0]).name)
    return used


class Watched:
    """A command in a process group of its own, its output in a file, its peak memory measured.

    ``peak_bytes``: largest proportional set size of the tree seen, in bytes, sampled every ``sample_seconds``.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        sample_seconds: float = 15.0,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.peak_bytes = 0
        self._shared_memory = shared_memory_files()
        self._stream = log.open("ab")
        self.process = subprocess.Popen(
            list(command),
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ) | dict(environment or {}),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, args=(sample_seconds,), daemon=True)
        self._sampler.start()

    def _sample(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            self.peak_bytes = max(self.peak_bytes, tree_pss(self.process.pid))

    def wait(self, poll: Callable[[], None], timeout: float | None = None, interval: float = 1.0) -> int:
        """Call ``poll`` every ``interval`` seconds until the command ends; return its exit status.

        After ``timeout`` seconds, or when the caller is interrupted, the whole tree is killed; the former raises
        ``TimeoutError``.
        """
        started = time.monotonic()
        try:
            while self.process.poll() is None:
                if timeout is not None and time.monotonic() - started > timeout:
                    raise TimeoutError(f"killed after {timeout:.0f} s: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
                poll()
                time.sleep(interval)
            poll()
            return self.process.returncode
        finally:
            self.close()

    def close(self) -> None:
        """Kill whatever is left of the tree, remove the shared memory it leaves behind, and close the log. Idempotent."""
        self._stop.set()
        kill_tree(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._sampler.join(timeout=10)
        remove_orphaned_shared_memory(self._shared_memory)
        self._stream.close()


def tail(path: Path, lines: int = 30) -> str:
    """Return the last ``lines`` lines of a text file, '' when there is none."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
