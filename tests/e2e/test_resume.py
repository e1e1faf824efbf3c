"""Killed with SIGKILL and started again, a run continues as if nothing had happened; a run equals the same one in a sweep."""

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import FOUR_SETTINGS, STUDENT_LR, Finished, run_command, train_command

pytestmark = pytest.mark.e2e

# Metrics that say what was learned. Of the others, times and memory differ, and the last digits of the sampler's own
# log-probs (training/rollout_probs_diff_mean, about 3e-7): vLLM batches requests as they arrive. Nothing is learned from those.
PREFIXES = ("actor/", "critic/", "rho/", "teacher/", "response_length/", "training/flat_reward")
NOT_LEARNING = ("actor/perf/",)


@pytest.fixture(scope="module")
def resumed(work: Path, miniature: Path, four: dict[str, Finished]) -> Finished:
    """The `killed` run of the `four` sweep, continued on its own with `resume_mode=auto`."""
    killed = four["killed"]
    command = train_command(
        "distilled_rl",
        [
            *("scale=cpu", "student=miniature", "teacher=miniature", "dataset=miniature", f"dataset.dir={miniature}"),
            *(f"run.output={killed.directory.parent}", "run.name=killed", "distilled_rl.reproducible=true", "seed=1"),
            *("data.train_batch_size=16", "data.filter_overlong_prompts=false", STUDENT_LR),
            *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.resume_mode=auto", *FOUR_SETTINGS),
        ],
    )
    run_command(command, work / "resume.log")
    return killed


def test_metrics_equal_the_uninterrupted_run(resumed: Finished, four: dict[str, Finished]) -> None:
    continued, whole = resumed.steps(), four["distilled_rl"].steps()
    assert len(continued) == len(whole) == 6
    for step, (ours, reference) in enumerate(zip(continued, whole, strict=True), 1):
        keys = [key for key in reference if key.startswith(PREFIXES) and not key.startswith(NOT_LEARNING)]
        assert len(keys) > 20
        different = {key: (ours[key], reference[key]) for key in keys if ours[key] != reference[key]}
        assert not different, f"step {step}: {different}"


def test_weights_equal_the_uninterrupted_run(resumed: Finished, four: dict[str, Finished]) -> None:
    ours, whole = resumed.weights(), four["distilled_rl"].weights()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_nothing_already_logged_is_lost(resumed: Finished) -> None:
    logs = sorted(resumed.directory.glob("metrics-*.jsonl"))
    assert len(logs) == 2
    first = [json.loads(line)["step"] for line in logs[0].read_text().splitlines()]
    assert first[:4] == [1, 2, 3, 4]
    second = [json.loads(line)["step"] for line in logs[1].read_text().splitlines()]
    assert second == [4, 5, 6]
