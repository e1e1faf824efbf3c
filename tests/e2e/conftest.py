"""Real verl runs on the CPU, as few as possible: each fixture is one start of Ray, verl, and vLLM that many tests read.

Every start is a process tree with a hard time limit; whatever is left of it is killed.
"""

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from distilled_rl.launch import last_step
from distilled_rl.processes import Watched, remove_orphaned_shared_memory, shared_memory_files, tail

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 900.0
# Ray's workers end by themselves when their cluster is gone; not in the same instant.
GRACE_SECONDS = 60.0
# Every process of a run inherits this variable: what is left behind is found by it.
MARK, SESSION = "DISTILLED_RL_TEST_SESSION", uuid.uuid4().hex
STUDENT_LR = "actor_rollout_ref.actor.optim.lr=1e-3"


@dataclass(frozen=True)
class Finished:
    """A run directory that a real run left behind."""

    directory: Path

    def steps(self) -> list[dict]:
        """Return the metrics of steps 1, 2, …, later starts of the run overriding earlier ones."""
        lines: dict[int, dict] = {}
        for log in sorted(self.directory.glob("metrics-*.jsonl")):
            for line in log.read_text(encoding="utf-8").split("\n")[:-1]:  # a line without its end is being written
                entry = json.loads(line)
                lines.setdefault(entry["step"], {}).update(entry["data"])
        return [lines[step] for step in sorted(lines) if step > 0]

    def weights(self) -> dict:
        """Return the student's weights after the last step, as Hugging Face names them."""
        from safetensors.torch import load_file

        return load_file(self.model() / "model.safetensors")

    def model(self) -> Path:
        """Return the folder of the Hugging Face checkpoint after the last step."""
        return self.directory / "checkpoints" / f"global_step_{last_step(self.directory)}" / "actor" / "huggingface"


def run_command(command: Sequence[str], log: Path, limit: float = LIMIT_SECONDS, **environment: str) -> None:
    """Run to a successful end within ``limit`` seconds, or fail with the end of the log."""
    watched = Watched(command, log, environment={MARK: SESSION, **environment})
    status = watched.wait(lambda: None, timeout=limit)
    assert status == 0, f"exit status {status}; the end of the log:\n{tail(log, 60)}"


def train_command(recipe: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "distilled_rl.cli", "train", recipe, *overrides]


@pytest.fixture(scope="session")
def miniature() -> Path:
    """Build the miniature's student and clean teacher, or re-use the ones of an earlier session (cached by content)."""
    out = ROOT / "outputs" / "test-miniature"
    command = [sys.executable, "-m", "distilled_rl.miniature", "build", "--out", str(out)]
    run_command(command, ROOT / "outputs" / "test-miniature.log")
    return out


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


def sweep_command(out: Path, miniature: Path, runs: Sequence[str], overrides: Sequence[str]) -> list[str]:
    return train_command(
        "miniature_sweep",
        [
            f"dataset.dir={miniature}",
            f"run.output={out}",
            f"sweep.runs=[{','.join(runs)}]",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            STUDENT_LR,
            *overrides,
        ],
    )


@pytest.fixture(scope="session")
def twin(work: Path, miniature: Path) -> dict[str, Finished]:
    """Three steps with the student's own first weights as the teacher, and three that must equal GRPO."""
    runs = [
        "{name:grpo,mode:grpo,seed:1}",
        "{name:eps1,mode:distilled_rl,seed:1,eps_rho:1.0}",
        "{name:lambda0,mode:opd_rl,seed:1,teacher_coef:0.0}",
        "{name:twin,mode:distilled_rl,seed:1}",
    ]
    overrides = [
        *("teacher=local", "teacher.name=twin", f"teacher.model={miniature}/models/student"),
        *("trainer.total_training_steps=3", "trainer.save_freq=3"),
    ]
    out = work / "twin"
    run_command(sweep_command(out, miniature, runs, overrides), out / "log.txt")
    return {name: Finished(out / name) for name in ("grpo", "eps1", "lambda0", "twin")}


FOUR_SETTINGS = [
    *("teacher.name=clean", "trainer.total_training_steps=6", "trainer.save_freq=3"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
]


@pytest.fixture(scope="session")
def four(work: Path, miniature: Path) -> dict[str, Finished]:
    """Six steps of each mode with the clean teacher, one mini-batch a step, the first step's tensors dumped.

    Then ``killed``: the Distilled RL run once more, ended by SIGKILL after its fourth step, one past its checkpoint.
    """
    modes = {"grpo": "", "opd": "", "opd_rl": ",teacher_coef:0.3", "distilled_rl": ""}
    runs = [
        f"{{name:{mode},mode:{mode},seed:1{more},dump_dir:{work}/dumps/{mode},dump_steps:[1]}}"
        for mode, more in modes.items()
    ]
    out = work / "four"
    killed = Finished(out / "killed")
    command = sweep_command(out, miniature, [*runs, "{name:killed,mode:distilled_rl,seed:1}"], FOUR_SETTINGS)
    watched = Watched(command, out / "log.txt", environment={MARK: SESSION})
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while len(killed.steps()) < 4:
            assert watched.process.poll() is None, tail(watched.log, 60)
            assert time.monotonic() < deadline, tail(watched.log, 60)
            time.sleep(0.1)
        os.kill(watched.process.pid, signal.SIGKILL)
    finally:
        watched.close()
    assert last_step(killed.directory) == 3
    return {name: Finished(out / name) for name in (*modes, "killed")}


@pytest.fixture(autouse=True, scope="session")
def leave_nothing_behind() -> Iterator[None]:
    """Check that no process and no orphaned shared-memory file of the tests' runs is left when they end."""
    before = shared_memory_files()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _left_over()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"processes left behind: {left}"
    assert not remove_orphaned_shared_memory(before)


def _left_over() -> list[str]:
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == SESSION and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of verl counts as the time of the first test that asks for it; the starts have their own limit."""
    for item in items:
        if "e2e" in item.keywords:
            item.add_marker(pytest.mark.timeout(2 * LIMIT_SECONDS + 300))
