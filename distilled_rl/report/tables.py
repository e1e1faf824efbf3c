"""The tables of a summary as cells of text, for Markdown and for the console."""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from distilled_rl.report.summary import DifferenceRow, ResultRow, Summary
from distilled_rl.statistics import Interval

NOTHING = "—"


@dataclass(frozen=True)
class Table:
    """A heading, column names, and rows of cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, the first column to the left, the others to the right."""
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)

    def rich(self) -> RichTable:
        """The table for a Rich console."""
        table = RichTable(title=self.title, title_justify="left")
        for position, column in enumerate(self.columns):
            table.add_column(column, justify="right" if position else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def result_table(summary: Summary) -> Table:
    """base, teachers and modes; the expected figures only where the summary has some."""
    columns = (
        "",
        "pass@1 [95 % CI]",
        "CI over",
        "greedy",
        "seeds",
        "RL steps",
        "rollouts",
        "teacher tokens",
        "minutes",
    )
    if summary.expected:
        columns += ("simulator", "verdict")
    return Table("Results", columns, tuple(_result_cells(row, summary.expected is not None) for row in summary.rows))


def difference_table(summary: Summary) -> Table:
    """Paired differences of pass@1."""
    columns = ("", "seeds", "difference [95 % CI over problems]", "p", "[95 % CI over seeds]", "p over seeds")
    if summary.expected:
        columns += ("simulator",)
    rows = tuple(_difference_cells(row, summary.expected is not None) for row in summary.differences)
    return Table("Differences of pass@1 on the same problems", columns, rows)


def print_table(summary: Summary, console: Console | None = None) -> None:
    """Print both tables, what is in neither, and the caveats."""
    console = console or Console()
    console.print(f"student {summary.student}; pass@1 on {summary.setting}", highlight=False)
    for table in (result_table(summary), difference_table(summary)):
        if table.rows:
            console.print(table.rich())
    for line in summary.left_out:
        console.print(f"not in the tables: {line}", markup=False, highlight=False)
    for line in summary.caveats:
        console.print(f"- {line}", markup=False, highlight=False)


def _result_cells(row: ResultRow, expected: bool) -> tuple[str, ...]:
    cells = (
        row.label,
        f"{row.pass_at_1.value:.3f} {_bounds(row.pass_at_1)}" if row.pass_at_1 else row.status,
        row.over or NOTHING,
        NOTHING if row.greedy is None else f"{row.greedy:.3f}",
        ", ".join(str(seed) for seed in row.seeds) or NOTHING,
        *(NOTHING if not count else f"{count:,}" for count in (row.steps, row.rollouts, row.teacher_tokens)),
        NOTHING if row.minutes is None else f"{row.minutes:.1f}",
    )
    if not expected:
        return cells
    figure = row.expected
    if figure is None:
        return (*cells, NOTHING, NOTHING)
    spread = "" if figure.half_width is None else f" ± {figure.half_width:.3f}"
    return (*cells, f"{figure.pass_at_1:.3f}{spread} (greedy {figure.greedy:.3f})", row.verdict or NOTHING)


def _difference_cells(row: DifferenceRow, expected: bool) -> tuple[str, ...]:
    cells = (
        row.label,
        ", ".join(str(seed) for seed in row.seeds),
        f"{row.over_problems.value:+.3f} {_bounds(row.over_problems, '+')}",
        _p_value(row.over_problems.p_value),
        _bounds(row.over_seeds, "+") if row.over_seeds else NOTHING,
        _p_value(row.over_seeds.p_value) if row.over_seeds else NOTHING,
    )
    if not expected:
        return cells
    return (*cells, f"{row.expected[0]:+.3f} ± {row.expected[1]:.3f}" if row.expected else NOTHING)


def _bounds(interval: Interval, sign: str = "") -> str:
    return f"[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _p_value(p: float) -> str:
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
