"""Steady step time of Distilled RL over GRPO: the same models, interleaved on one set of workers.

    python benchmarks/step.py --rounds 3 --steps 10

Runs grpo, distilled_rl, grpo, distilled_rl, ... as one sweep on the miniature, leaves out the first steps of each run, and
prints the ratio of the median step times with the phases that make it up. The ratio is one of times measured minutes apart on
one machine; the spread over the rounds is printed beside it.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from distilled_rl.processes import Watched, tail

PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
WARM_UP = 3


def read_phases(directory: Path) -> dict[str, list[float]]:
    """Return seconds of each phase for every step after the warm-up of one run."""
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for log in sorted(directory.glob("metrics-*.jsonl")):
        for line in log.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["step"] > WARM_UP:
                for phase in PHASES:
                    phases[phase].append(entry["data"][f"timing_s/{phase}"])
    return phases


def main(
    rounds: Annotated[int, typer.Option(help="How often each mode runs.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps of one run, warm-up included.", min=WARM_UP + 2)] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    miniature: Annotated[Path, typer.Option(help="Where the miniature is, or is to be built.")] = Path(
        "outputs/quickstart/miniature"
    ),
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build = [sys.executable, "-m", "distilled_rl.miniature", "build", "--out", str(miniature)]
        if Watched(build, work / "build.log").wait(lambda: None):
            raise SystemExit(tail(work / "build.log"))
        runs = [
            f"{{name:{mode}-{i},mode:{mode},seed:{i + 1}}}" for i in range(rounds) for mode in ("grpo", "distilled_rl")
        ]
        command = [
            *(sys.executable, "-m", "distilled_rl.cli", "train", "miniature_sweep"),
            *(f"dataset.dir={miniature.resolve()}", f"run.output={work}", f"sweep.runs=[{','.join(runs)}]"),
            *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1"),
        ]
        if Watched(command, work / "log.txt").wait(lambda: None):
            raise SystemExit(tail(work / "log.txt", 60))
        seconds = {
            mode: [read_phases(work / f"{mode}-{i}") for i in range(rounds)] for mode in ("grpo", "distilled_rl")
        }
    medians = {
        mode: {phase: statistics.median(t for run in per_run for t in run[phase]) for phase in PHASES}
        for mode, per_run in seconds.items()
    }
    ratios = [
        statistics.median(distilled["step"]) / statistics.median(grpo["step"])
        for distilled, grpo in zip(seconds["distilled_rl"], seconds["grpo"], strict=True)
    ]
    print(f"median seconds per step, {rounds} x {steps - WARM_UP} steps each, interleaved")
    print(f"{'phase':16}{'grpo':>10}{'distilled_rl':>14}{'difference':>12}")
    for phase in PHASES:
        grpo, distilled = medians["grpo"][phase], medians["distilled_rl"][phase]
        print(f"{phase:16}{grpo:10.3f}{distilled:14.3f}{distilled - grpo:12.3f}")
    ratio = medians["distilled_rl"]["step"] / medians["grpo"]["step"]
    print(f"ratio {ratio:.2f} (by round: {', '.join(f'{value:.2f}' for value in ratios)})")
    if out is not None:
        out.write_text(json.dumps({"medians": medians, "ratio": ratio, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
