"""Grading processes: started when needed, kept between calls, killed when one answer takes too long.

The limit counts the child's processor time, so that a busy machine does not turn honest answers into time-outs; the
kernel enforces it (see `worker`). On the wall clock an answer may take WALL_FACTOR times that; then the parent kills
the child.

`sys.executable` runs the child, so no process with threads is forked. A child does not outlive its parent: the parent's
end closes the child's stdin. (Not PR_SET_PDEATHSIG: that fires when the *thread* that started the child ends, and
verl calls from a pool of threads.)
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_SECONDS = 5.0
WALL_FACTOR = 4
DEFAULT_WORKERS = 1  # children per process: verl already has `reward.num_workers` processes
START_SECONDS = 120.0  # importing sympy in a child, on a busy machine
CACHED_REQUESTS = 4096  # rollouts of one problem repeat their answers
VERDICTS = ("any", "mathruler", "math_verify")
WORKERS_ENV = "DISTILLED_RL_GRADER_WORKERS"

_WORKER = Path(__file__).with_name("worker.py")

Pairs = tuple[tuple[str, str], ...]


class GraderError(RuntimeError):
    """A grading process cannot be started; the message says what is missing."""


class Verdicts(NamedTuple):
    """What was found for one answer. At most one of `timeout` and `crash` is set, and then no library has spoken.

    timeout: killed for the time it took
    crash:   the child died of it, twice, or it needed more memory than a child may have
    """

    mathruler: bool = False
    math_verify: bool = False
    timeout: bool = False
    crash: bool = False

    def says(self, verdict: str) -> bool:
        """Whether the answer is right by `any`, `mathruler` or `math_verify`; ValueError for another name."""
        if verdict not in VERDICTS:
            raise ValueError(f"unknown verdict {verdict!r}: one of {', '.join(VERDICTS)} is expected")
        return self.mathruler or self.math_verify if verdict == "any" else bool(getattr(self, verdict))


class _Child:
    """One grading process and the two pipes to it. Used by one thread at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(_WORKER)]  # -P: this directory must not shadow other modules
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        self._received = b""
        try:
            hello = self._read_line(START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self.kill()
            cause = f"{type(error).__name__}, exit code {self.process.returncode}"
            raise GraderError(f"the grading process did not start: {cause}") from error
        if not hello["ready"]:
            self.kill()
            raise GraderError(f"grading needs math-verify and mathruler, which setup.py names: {hello['error']}")

    def ask(self, pairs: Pairs, seconds: float) -> dict[str, Any]:
        """Raises TimeoutError if the answer took too long, EOFError or BrokenPipeError if the child is dead or dies."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write((json.dumps({"pairs": pairs, "seconds": seconds}) + "\n").encode("ascii"))
        try:
            return self._read_line(WALL_FACTOR * seconds)
        except EOFError:
            if self.process.wait() == -signal.SIGPROF:
                raise TimeoutError from None
            raise

    def _read_line(self, seconds: float) -> dict[str, Any]:
        stdout = self.process.stdout
        assert stdout is not None
        poller = select.poll()  # not select(): a Ray worker may hold more than 1024 descriptors
        poller.register(stdout, select.POLLIN | select.POLLHUP)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poller.poll(remaining * 1000):
                raise TimeoutError
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


_graders: "weakref.WeakSet[Grader]" = weakref.WeakSet()


class Grader:
    """At most `workers` grading processes. Thread-safe; a forked copy starts its own. Close it after use."""

    def __init__(self, workers: int = DEFAULT_WORKERS) -> None:
        if workers < 1:
            raise ValueError(f"a grader needs at least one worker, not {workers}")
        self.workers = workers
        self._cached = functools.lru_cache(maxsize=CACHED_REQUESTS)(self._ask)
        self._reset()
        _graders.add(self)

    def _reset(self) -> None:
        self._slots = threading.BoundedSemaphore(self.workers)
        self._idle: deque[_Child] = deque()
        self._children: set[_Child] = set()
        self._closed = False

    def judge(self, pairs: list[tuple[str, str]], seconds: float = DEFAULT_SECONDS) -> Verdicts:
        """Both libraries' verdicts on (answer, gold) pairs of canonical texts: right when every pair is.

        Time-outs and crashes are not remembered, other verdicts are. Raises GraderError if no child can be started.
        """
        try:
            return self._cached(tuple(pairs), seconds)
        except TimeoutError:
            return Verdicts(timeout=True)
        except (EOFError, BrokenPipeError):
            return Verdicts(crash=True)

    def _ask(self, pairs: Pairs, seconds: float) -> Verdicts:
        with self._slots:
            try:
                child = self._idle.pop()
            except IndexError:
                child = self._start()
            try:
                return self._ask_child(child, pairs, seconds)
            except (EOFError, BrokenPipeError):  # killed from outside, or by this answer: a second child tells
                return self._ask_child(self._start(), pairs, seconds)

    def _start(self) -> _Child:
        if self._closed:
            raise GraderError("this grader is closed")
        child = _Child()
        self._children.add(child)
        return child

    def _ask_child(self, child: _Child, pairs: Pairs, seconds: float) -> Verdicts:
        try:
            reply = child.ask(pairs, seconds)
            if "exhausted" in reply:
                raise EOFError(reply["exhausted"])
        except BaseException:  # an interrupt too: a late reply must not be read as the next answer's
            self._children.discard(child)
            child.kill()
            raise
        self._idle.append(child)
        return Verdicts(bool(reply["mathruler"]), bool(reply["math_verify"]))

    def child_pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.process.pid for child in list(self._children)]

    def close(self) -> None:
        """Kill all children. A call that is in progress or follows raises GraderError."""
        self._closed = True
        for child in list(self._children):
            child.kill()
        self._idle.clear()
        self._children.clear()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """In a forked copy of the process: let go of the parent's children without ending them."""
        for child in self._children:
            child.close_pipes()
        self._reset()


_shared: Grader | None = None
_shared_lock = threading.Lock()


def shared_grader() -> Grader:
    """The grader of this process, with at most DISTILLED_RL_GRADER_WORKERS children (default 1)."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Grader(int(os.environ.get(WORKERS_ENV) or DEFAULT_WORKERS))
        return _shared


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for grader in list(_graders):
        grader.after_fork()


def _close_all() -> None:
    for grader in list(_graders):
        grader.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
