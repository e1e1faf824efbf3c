"""Killed with SIGKILL and started again, a run continues as if nothing had happened; a run equals the same one in a sweep."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from distilled_rl.launch import last_step
from distilled_rl.processes import Watched, tail
from tests.e2e.conftest import (
    FOUR_SETTINGS,
    LIMIT_SECONDS,
    MARK,
    SESSION,
    STUDENT_LR,
    Finished,
    run_command,
    train_command,
)

pytestmark = pytest.mark.e2e

# Metrics that say what was learned. Of the others, times and memory differ, and the last digits of the sampler's own
# log-probs (training/rollout_probs_diff_mean, about 3e-7): vLLM batches requests as they arrive. Nothing is learned from those.
PREFIXES = ("actor/", "critic/", "rho/", "teacher/", "response_length/", "training/flat_reward")
NOT_LEARNING = ("actor/perf/",)


def command(work: Path, miniature: Path) -> list[str]:
    """The `distilled_rl` run of the `four` sweep, on its own, saving every third step."""
    return train_command(
        "distilled_rl",
        [
            *("scale=cpu", "student=miniature", "teacher=miniature", "dataset=miniature", f"dataset.dir={miniature}"),
            *(f"run.output={work}/resume", "run.name=killed", "distilled_rl.reproducible=true", "seed=1"),
            *("data.train_batch_size=16", "data.filter_overlong_prompts=false", STUDENT_LR),
            *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.resume_mode=auto"),
            *[*FOUR_SETTINGS[:1], "trainer.total_training_steps=6", "trainer.save_freq=3", FOUR_SETTINGS[-1]],
        ],
    )


@pytest.fixture(scope="module")
def killed_and_resumed(work: Path, miniature: Path) -> Finished:
    directory = work / "resume" / "killed"
    log = work / "resume" / "first.log"
    watched = Watched(command(work, miniature), log, environment={MARK: SESSION})
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        # step 4 is done: one step past the checkpoint, which must not count twice
        while not (last_step(directory) == 3 and _logged(directory) >= 4):
            assert watched.process.poll() is None, tail(log, 60)
            assert time.monotonic() < deadline, tail(log, 60)
            time.sleep(0.1)
        os.kill(watched.process.pid, signal.SIGKILL)
    finally:
        watched.close()
    assert last_step(directory) == 3
    run_command(command(work, miniature), work / "resume" / "second.log")
    return Finished(directory)


def _logged(directory: Path) -> int:
    lines = [line for log in sorted(directory.glob("metrics-*.jsonl")) for line in log.read_text().splitlines()]
    return json.loads(lines[-1])["step"] if lines else 0


def test_metrics_equal_the_uninterrupted_run(killed_and_resumed: Finished, four: dict[str, Finished]) -> None:
    resumed, whole = killed_and_resumed.steps(), four["distilled_rl"].steps()
    assert len(resumed) == len(whole) == 6
    for step, (ours, reference) in enumerate(zip(resumed, whole, strict=True), 1):
        keys = [key for key in reference if key.startswith(PREFIXES) and not key.startswith(NOT_LEARNING)]
        assert len(keys) > 20
        different = {key: (ours[key], reference[key]) for key in keys if ours[key] != reference[key]}
        assert not different, f"step {step}: {different}"


def test_weights_equal_the_uninterrupted_run(killed_and_resumed: Finished, four: dict[str, Finished]) -> None:
    ours, whole = killed_and_resumed, four["distilled_rl"]
    one = ours.weights_at(6)
    two = whole.weights()
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_nothing_already_logged_is_lost(killed_and_resumed: Finished) -> None:
    logs = sorted(killed_and_resumed.directory.glob("metrics-*.jsonl"))
    assert len(logs) == 2
    first = [json.loads(line)["step"] for line in logs[0].read_text().splitlines()]
    assert first[:4] == [1, 2, 3, 4]
    second = [json.loads(line)["step"] for line in logs[1].read_text().splitlines()]
    assert second == [4, 5, 6]
