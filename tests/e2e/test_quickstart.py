"""The two launchers that a newcomer runs, end to end."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Finished, run_command

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def quickstart(work: Path, miniature: Path) -> Path:
    """`examples/quickstart.sh` on two steps of two modes; the miniature, cached by content, is at hand."""
    out = work / "quickstart"
    shutil.copytree(miniature, out / "miniature")
    run_command(command(out), work / "quickstart.log")
    return out


def command(out: Path) -> list[str]:
    return [
        "bash",
        str(ROOT / "examples" / "quickstart.sh"),
        "--steps",
        "2",
        "--modes",
        "grpo,distilled_rl",
        "--out",
        str(out),
    ]


def test_report_has_the_table_and_the_curves(quickstart: Path) -> None:
    text = (quickstart / "report.md").read_text(encoding="utf-8")
    for row in ("base model", "clean", "grpo", "distilled_rl"):
        assert row in text
    for evaluation in (quickstart / "eval").glob("*.json"):
        content = json.loads(evaluation.read_text())
        assert len(content["correct"]) == 1000 and content["samples"] == 4
    assert {path.stem for path in (quickstart / "eval").glob("*.json")} == {
        "base",
        "teacher-clean",
        "miniature-grpo-none-seed1",
        "miniature-distilled_rl-clean-seed1",
    }
    pictures = list((quickstart / "curves").glob("*.png"))
    assert len(pictures) >= 6 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert all(f"curves/{path.name}" in text for path in pictures)


def test_progress_was_visible(quickstart: Path, work: Path) -> None:
    log = (work / "quickstart.log").read_text(encoding="utf-8")
    assert "miniature-grpo-none-seed1" in log and "step   2/2" in log and "reward" in log
    assert "peak memory" in log


def test_second_call_reuses_everything(quickstart: Path, work: Path) -> None:
    def expensive() -> dict[Path, int]:
        """What building, training, and evaluating write."""
        patterns = ("*.safetensors", "cost.jsonl", "logs/train-*", "runs/*/metrics-*", "eval/*")
        return {path: path.stat().st_mtime_ns for pattern in patterns for path in quickstart.rglob(pattern)}

    before = expensive()
    assert len(before) > 10
    run_command(command(quickstart), work / "quickstart-again.log")
    assert expensive() == before


def test_every_mode_trains_on_real_problems(shared_data: Path, work: Path) -> None:
    overrides = [f"run.output={work}/dapo"]
    run_command(
        ["bash", str(ROOT / "examples" / "cpu_dapo.sh"), *overrides],
        work / "cpu_dapo.log",
        DISTILLED_RL_SHARED=str(shared_data.parent),
    )
    modes = {path.name.split("-")[1]: Finished(path).steps() for path in (work / "dapo").glob("tiny-*-seed1")}
    assert set(modes) == {"grpo", "opd", "opd_rl", "distilled_rl"}
    for mode, steps in modes.items():
        assert len(steps) == 2
        for metrics in steps:
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
            assert metrics["prompt_length/max"] <= 512 and metrics["response_length/max"] <= 128
            # random models earn nothing: only the teacher term has a gradient
            assert (metrics["actor/grad_norm"] > 0) == (mode in ("opd", "opd_rl")), mode
    report = json.loads((ROOT / "outputs" / "cpu_dapo" / "data" / "report.json").read_text())
    assert report["rows"] == 17917
