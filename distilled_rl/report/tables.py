"""The tables of a summary as cells of text, for Markdown and for the console."""

import math
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
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
        table = RichTable(title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for position, column in enumerate(self.columns):
            table.add_column(column, justify="right" if position else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def result_table(summary: Summary, compact: bool = False) -> Table:
    """Base model, teachers, modes; the expected figures only where the summary has some. `compact`: for a console."""
    columns = (
        "",
        "pass@1 [95 % CI]",
        "CI over",
        "greedy",
        "seeds",
        "steps",
        "rollouts",
        "teacher tokens",
        "minutes",
    )
    columns += ("simulator", "verdict")
    drop = {"CI over", "teacher tokens"} if compact else set()
    if not summary.expected:
        drop |= {"simulator", "verdict"}
    return _table("Results", columns, [_result_cells(row, compact) for row in summary.rows], drop)


def difference_table(summary: Summary) -> Table:
    """Paired differences of pass@1; columns that would be empty are left out."""
    columns = ("", "seeds", "difference [95 % CI]", "p", "[95 % CI over seeds]", "p over seeds", "simulator")
    drop = set() if any(row.over_seeds for row in summary.differences) else {"[95 % CI over seeds]", "p over seeds"}
    if not any(row.expected for row in summary.differences):
        drop.add("simulator")
    rows = [_difference_cells(row) for row in summary.differences]
    return _table("Differences of pass@1 on the same problems", columns, rows, drop)


def print_table(summary: Summary, console: Console | None = None) -> None:
    """Print both tables, what is in neither, and the caveats. The tables need about 100 columns."""
    if console is None:
        console = Console()
        if not console.is_terminal:  # a log file: Rich would assume 80 columns
            console = Console(width=100)
    console.print(f"student {summary.student}; {summary.setting}", highlight=False)
    for table in (result_table(summary, compact=True), difference_table(summary)):
        if table.rows:
            console.print(table.rich())
    for line in summary.left_out:
        console.print(f"not in the tables: {line}", markup=False, highlight=False)
    for line in summary.caveats:
        console.print(f"- {line}", markup=False, highlight=False)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], drop: set[str]) -> Table:
    kept = [position for position, column in enumerate(columns) if column not in drop]
    cells = [tuple(row[position] for position in kept) for row in (columns, *rows)]
    return Table(title, cells[0], tuple(cells[1:]))


def _result_cells(row: ResultRow, compact: bool) -> tuple[str, ...]:
    figure = row.expected
    simulator = NOTHING
    if figure is not None:
        spread = "" if figure.half_width is None else f" ± {figure.half_width:.3f}"
        simulator = f"{figure.pass_at_1:.3f}{spread}" + ("" if compact else f" (greedy {figure.greedy:.3f})")
    return (
        row.label,
        f"{row.pass_at_1.value:.3f} {_bounds(row.pass_at_1)}" if row.pass_at_1 else row.status,
        row.over or NOTHING,
        NOTHING if row.greedy is None else f"{row.greedy:.3f}",
        ", ".join(str(seed) for seed in row.seeds) or NOTHING,
        *(NOTHING if not count else f"{count:,}" for count in (row.steps, row.rollouts, row.teacher_tokens)),
        NOTHING if row.minutes is None else f"{row.minutes:.1f}",
        simulator,
        row.verdict or NOTHING,
    )


def _difference_cells(row: DifferenceRow) -> tuple[str, ...]:
    return (
        row.label,
        ", ".join(str(seed) for seed in row.seeds),
        f"{row.over_problems.value:+.3f} {_bounds(row.over_problems, '+')}",
        _p_value(row.over_problems.p_value),
        _bounds(row.over_seeds, "+") if row.over_seeds else NOTHING,
        _p_value(row.over_seeds.p_value) if row.over_seeds else NOTHING,
        f"{row.expected[0]:+.3f} ± {row.expected[1]:.3f}" if row.expected else NOTHING,
    )


def _bounds(interval: Interval, sign: str = "") -> str:
    return f"[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _p_value(p: float) -> str:
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
