"""The report of a set of runs: `report.md`, learning curves as PNG, and all curves as CSV.

runs, broken = read_runs(find_runs(out / "runs"))
evaluations = read_evaluations(out / "eval")
summary = summarise(runs, evaluations, expected=EXPECTED)
write_report(out, summary, runs, broken=broken)
print_table(summary)
"""

from collections.abc import Sequence
from pathlib import Path

from distilled_rl.miniature.expected import Expected
from distilled_rl.report.curves import Drawn, draw_curves, learning_curve_csv
from distilled_rl.report.evaluations import (
    Evaluation,
    EvaluationError,
    read_evaluation,
    read_evaluations,
    write_evaluation,
)
from distilled_rl.report.files import write_atomic
from distilled_rl.report.summary import Summary, summarise
from distilled_rl.report.tables import difference_table, print_table, result_table
from distilled_rl.runs import Run

CURVES_FOLDER = "curves"


def write_report(
    out_dir: Path | str,
    runs: Sequence[Run],
    evaluations: Sequence[Evaluation],
    *,
    expected: Expected | None = None,
    summary: Summary | None = None,
    title: str = "Report",
    notes: Sequence[str] = (),
    broken: Sequence[str] = (),
) -> Path:
    """Write `report.md`, `curves/*.png` and `learning_curves.csv` into `out_dir` and return the path of `report.md`.

    Each file is replaced in one step. `summary`: `summarise` of these arguments, if at hand. `notes`: sentences to add.
    `broken`: a sentence for each run directory that could not be read, listed with the unfinished runs. ValueError as
    `summarise`.
    """
    out = Path(out_dir)
    summary = summary or summarise(runs, evaluations, expected)
    learning_curve_csv(out / "learning_curves.csv", runs)
    drawn = draw_curves(out / CURVES_FOLDER, runs)
    sections = [f"# {title}\n", *_results(summary), *_list("What these numbers do not say", summary.caveats)]
    sections += _list("In none of the averages", [*summary.left_out, *broken])
    sections += [*_list("Notes", notes), *_curves(drawn)]
    return write_atomic(out / "report.md", "\n".join(sections))


def _results(summary: Summary) -> list[str]:
    sections = [
        f"Student {summary.student}; {summary.setting}.\n",
        "## Results\n",
        result_table(summary).markdown(),
        "pass@1: share of right samples. CI: bootstrap over problems (BCa), or t-interval over RL seeds, as said. "
        "Seeds: those averaged; steps, rollouts, teacher tokens and minutes are per run.\n",
    ]
    expected = summary.expected
    if expected:
        sections.append(
            f"Simulator: {expected.source}, {expected.steps} steps; ± is a 95 % t-interval of the mean over its "
            "seeds, and one seed alone scatters about twice as widely. Verdict: inside, our value lies in that "
            "interval; near, only our interval reaches it; outside, neither. Its student and teachers come from "
            "another initialisation and its samples from another sampler: a near miss is no finding, a clear miss "
            "asks for its cause.\n"
        )
    differences = difference_table(summary)
    if differences.rows:
        sections += [
            f"## {differences.title}\n",
            differences.markdown(),
            "Over problems: bootstrap of the per-problem differences, p from the sign-flip permutation test. Over "
            "seeds: t-interval and paired t-test over the shared RL seeds, from three on.\n",
        ]
    return sections


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}\n", *(f"- {line}" for line in lines), ""] if lines else []


def _curves(drawn: Sequence[Drawn]) -> list[str]:
    sections = ["## Learning curves\n"]
    for figure in drawn:
        sections.append(f"### {figure.curve.title}\n")
        sections.append(f"![{figure.curve.title}]({CURVES_FOLDER}/{figure.path.name})\n")
        sections.append(f"{figure.caption}\n")
    sections.append("All logged numbers: `learning_curves.csv`." if drawn else "No run logged a step.")
    return [*sections, ""]


__all__ = [
    "Evaluation",
    "EvaluationError",
    "Summary",
    "draw_curves",
    "learning_curve_csv",
    "print_table",
    "read_evaluation",
    "read_evaluations",
    "summarise",
    "write_evaluation",
    "write_report",
]
