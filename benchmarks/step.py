"""Steady step time of Distilled RL over GRPO: the same models, interleaved on one set of workers.

    python benchmarks/step.py --rounds 3 --steps 10

For each source of the teacher (a server, or colocated in the student's workers) it runs GRPO, Distilled RL with a teacher that
scores the needed rows, and with one that scores all, then the same again, as one sweep on the miniature. Leaves out the first
steps of each run, and prints the median step times with the phases that make them up, and their ratios to the GRPO of the same
sweep. A ratio is one of times measured minutes apart on one machine; the spread over the rounds is printed beside it.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from distilled_rl.processes import Watched, tail

PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
WARM_UP = 3
VARIANTS = {
    "grpo": "mode:grpo",
    "needed": "mode:distilled_rl,score:needed",
    "all": "mode:distilled_rl,score:all",
}


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
    source: Annotated[
        str, typer.Option(help="Where the teacher is: server, colocated, or both, one after the other.")
    ] = "both",
    teacher: Annotated[
        str, typer.Option(help="The miniature's teacher, or student: one of the student's size.")
    ] = "student",
    rounds: Annotated[int, typer.Option(help="How often each variant runs.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps of one run, warm-up included.", min=WARM_UP + 2)] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    miniature: Annotated[Path, typer.Option(help="Where the miniature is, or is to be built.")] = Path(
        "outputs/quickstart/miniature"
    ),
) -> None:
    """Measure and print."""
    if source not in ("server", "colocated", "both"):
        raise typer.BadParameter(f"--source is {source!r}: server, colocated, or both")
    sources = ("server", "colocated") if source == "both" else (source,)
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "distilled_rl.miniature", "build", "--out", str(miniature)]
        if Watched(build, Path(folder) / "build.log").wait(lambda: None):
            raise SystemExit(tail(Path(folder) / "build.log"))
        figures = {name: measure(name, teacher, rounds, steps, miniature, Path(folder) / name) for name in sources}
    if out is not None:
        settings = {"teacher": teacher, "rounds": rounds, "steps": steps}
        out.write_text(json.dumps(settings | figures, indent=1) + "\n", encoding="utf-8")


def measure(source: str, teacher: str, rounds: int, steps: int, miniature: Path, work: Path) -> dict[str, Any]:
    """Run one sweep, print its table, and return medians and ratios."""
    model = miniature.resolve() / "models" / ("student" if teacher == "student" else f"teacher-{teacher}")
    runs = [f"{{name:{name}-{i},{node},seed:{i + 1}}}" for i in range(rounds) for name, node in VARIANTS.items()]
    command = [
        *(sys.executable, "-m", "distilled_rl.cli", "train", "miniature_sweep"),
        *(f"teacher={'local' if source == 'server' else source}", f"teacher.model={model}"),
        *(f"dataset.dir={miniature.resolve()}", f"run.output={work}", f"sweep.runs=[{','.join(runs)}]"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]
    if Watched(command, work / "log.txt").wait(lambda: None):
        raise SystemExit(tail(work / "log.txt", 60))
    seconds = {name: [read_phases(work / f"{name}-{i}") for i in range(rounds)] for name in VARIANTS}
    medians = {
        name: {phase: statistics.median(t for run in per_run for t in run[phase]) for phase in PHASES}
        for name, per_run in seconds.items()
    }
    print(f"median seconds per step, {source} teacher {teacher}, {rounds} x {steps - WARM_UP} steps each, interleaved")
    print(f"{'phase':16}" + "".join(f"{name:>10}" for name in VARIANTS))
    for phase in PHASES:
        print(f"{phase:16}" + "".join(f"{medians[name][phase]:10.3f}" for name in VARIANTS))
    ratios = {}
    for name in ("needed", "all"):
        by_round = [
            statistics.median(ours["step"]) / statistics.median(grpo["step"])
            for ours, grpo in zip(seconds[name], seconds["grpo"], strict=True)
        ]
        ratios[name] = {"ratio": medians[name]["step"] / medians["grpo"]["step"], "by_round": by_round}
        print(
            f"distilled_rl, {name} rows, over grpo: {ratios[name]['ratio']:.2f} "
            f"(by round: {', '.join(f'{value:.2f}' for value in by_round)})"
        )
    return {"medians": medians} | ratios


if __name__ == "__main__":
    typer.run(main)
