"""From runs and evaluations to the numbers of the report's tables. No text layout here: see `tables`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distilled_rl.miniature.expected import Expected, Figure
from distilled_rl.report.caveats import caveats
from distilled_rl.report.evaluations import Evaluation
from distilled_rl.report.groups import Group, group_runs
from distilled_rl.runs import Run
from distilled_rl.statistics import (
    Difference,
    Interval,
    mean_with_ci,
    paired_difference,
    paired_seed_difference,
    seed_interval,
)

MIN_SEEDS = 3  # fewer give no interval over seeds worth its name


@dataclass(frozen=True)
class ResultRow:
    """One row of the results: the base model, a teacher, or a mode with its seeds.

    `over`: what `pass_at_1`'s interval is over. `seeds`: the RL seeds that the row averages. steps, rollouts,
    teacher_tokens and minutes are per run, means over those seeds; None without a run. `status`: why there is no
    number, else empty. `verdict`: "inside", "near", "outside", or empty where nothing is expected.
    """

    label: str
    pass_at_1: Interval | None = None
    over: str = ""
    greedy: float | None = None
    problems: int | None = None
    samples: int | None = None
    seeds: tuple[int, ...] = ()
    steps: int | None = None
    rollouts: int | None = None
    teacher_tokens: int | None = None
    minutes: float | None = None
    status: str = ""
    expected: Figure | None = None
    verdict: str = ""


@dataclass(frozen=True)
class DifferenceRow:
    """pass@1 of one row minus another's on the same problems; `over_seeds` from three shared seeds on."""

    label: str
    seeds: tuple[int, ...]
    over_problems: Difference
    over_seeds: Difference | None
    expected: tuple[float, float] | None


@dataclass(frozen=True)
class Summary:
    """What the report says in numbers, and in `left_out` and `caveats` what it does not."""

    student: str
    setting: str
    rows: tuple[ResultRow, ...]
    differences: tuple[DifferenceRow, ...]
    left_out: tuple[str, ...]
    caveats: tuple[str, ...]
    expected: Expected | None


@dataclass(frozen=True)
class _Evaluated:
    """A group with the evaluations, by seed, of its finished runs at their last step."""

    group: Group
    by_seed: dict[int, Evaluation]


def summarise(runs: Sequence[Run], evaluations: Sequence[Evaluation], expected: Expected | None = None) -> Summary:
    """Match evaluations to runs by mode, teacher, seed and last step, and compute the tables.

    An unfinished run, a run without an evaluation, and an evaluation without a run, of another step, or on other
    problems are in no average; `left_out` names each. `expected` is compared with groups that trained its number of
    steps. ValueError: two base evaluations, two evaluations of one model, and as `group_runs`.
    """
    groups = group_runs(runs)
    usable, left_out = _comparable(evaluations)
    base = next((e for e in usable if e.role == "base"), None)
    teachers = sorted((e for e in usable if e.role == "teacher"), key=lambda e: e.teacher or "")
    evaluated, unmatched = _match(groups, [e for e in usable if e.role == "trained"])
    if expected is not None and all(group.total_steps != expected.steps for group in groups):
        expected = None
    rows = [_single_row("base model", base, expected and expected.base)] if base else []
    rows += [
        _single_row(f"teacher {e.teacher}", e, expected and expected.teachers.get(str(e.teacher))) for e in teachers
    ]
    rows += [_group_row(item, expected) for item in evaluated]
    return Summary(
        student=runs[0].student if runs else "",
        setting=_setting(usable),
        rows=tuple(rows),
        differences=tuple(_differences(evaluated, base, expected)),
        left_out=tuple(left_out + unmatched),
        caveats=tuple(caveats(groups, [item.by_seed for item in evaluated], usable)),
        expected=expected,
    )


def _comparable(evaluations: Sequence[Evaluation]) -> tuple[list[Evaluation], list[str]]:
    """Those on the problems and at the temperature of the base model (else the first), and a line on each other."""
    seen: dict[tuple, str] = {}
    for e in evaluations:
        key = ("base",) if e.role == "base" else (e.role, e.mode, e.teacher, e.seed, e.step)
        if key in seen:
            raise ValueError(f"evaluations {seen[key]} and {e.name} are of the same model")
        seen[key] = e.name
    if not evaluations:
        return [], []
    reference = next((e for e in evaluations if e.role == "base"), evaluations[0])
    usable = [e for e in evaluations if _problems(e) == _problems(reference)]
    left_out = [
        f"evaluation {e.name}: pass@1 {e.pass_at_1:.3f} on other problems or at another temperature than "
        f"{reference.name} ({e.problems} problems at {e.temperature:g}, against {reference.problems} at "
        f"{reference.temperature:g})"
        for e in evaluations
        if e not in usable
    ]
    return usable, left_out


def _problems(e: Evaluation) -> tuple[str, int, float]:
    return e.problem_set, e.problems, e.temperature


def _match(groups: list[Group], trained: list[Evaluation]) -> tuple[list[_Evaluated], list[str]]:
    lines, evaluated, matched = [], [], set()
    for group in groups:
        by_seed = {}
        for run in group.runs:
            own = [e for e in trained if (e.mode, e.teacher, e.seed) == (run.mode, run.teacher, run.seed)]
            last = next((e for e in own if e.step == run.steps), None)
            if last:
                matched.add(last.name)
            if run.finished and last:
                by_seed[run.seed] = last
            elif last:
                lines.append(f"run {run.name}: {run.status}; pass@1 {last.pass_at_1:.3f} there")
            else:
                lines.append(f"run {run.name}: {run.status}; not evaluated there")
        evaluated.append(_Evaluated(group, by_seed))
    lines += [
        f"evaluation {e.name}: pass@1 {e.pass_at_1:.3f} at step {e.step}, which is no run's last step"
        for e in trained
        if e.name not in matched
    ]
    return evaluated, lines


def _single_row(label: str, e: Evaluation, expected: Figure | None) -> ResultRow:
    interval = mean_with_ci(e.scores)
    return ResultRow(
        label=label,
        pass_at_1=interval,
        over=_over("problems", interval),
        greedy=e.greedy_accuracy,
        problems=e.problems,
        samples=e.samples,
        expected=expected,
    )


def _group_row(item: _Evaluated, expected: Expected | None) -> ResultRow:
    group, evaluations = item.group, list(item.by_seed.values())
    runs = [run for run in group.runs if run.seed in item.by_seed]
    figure = None
    if expected is not None and group.total_steps == expected.steps:
        figure = expected.results.get((group.teacher, group.mode))
    if not evaluations:
        finished = [run for run in group.runs if run.finished]
        status = "not evaluated" if finished else "unfinished"
        return ResultRow(group.label, status=status, expected=figure, **_cost(finished or list(group.runs)))
    scores = np.array([e.scores for e in evaluations])
    if len(evaluations) >= MIN_SEEDS:
        interval, over = seed_interval(scores.mean(axis=1)), "seeds"
    else:
        interval = mean_with_ci(scores.mean(axis=0))
        over = _over("problems" if len(evaluations) == 1 else "problems, seeds pooled", interval)
    greedy = [e.greedy_accuracy for e in evaluations if e.greedy_accuracy is not None]
    return ResultRow(
        label=group.label,
        pass_at_1=interval,
        over=over,
        greedy=sum(greedy) / len(greedy) if len(greedy) == len(evaluations) else None,
        problems=evaluations[0].problems,
        samples=evaluations[0].samples if len({e.samples for e in evaluations}) == 1 else None,
        seeds=tuple(item.by_seed),
        expected=figure,
        verdict=_verdict(interval, figure),
        **_cost(runs),
    )


def _over(what: str, interval: Interval) -> str:
    return f"{what} (all alike)" if interval.method == "exact" else what


def _cost(runs: list[Run]) -> dict:
    return {
        "steps": round(sum(run.steps for run in runs) / len(runs)),
        "rollouts": round(sum(run.rollouts for run in runs) / len(runs)),
        "teacher_tokens": round(sum(run.teacher_tokens for run in runs) / len(runs)),
        "minutes": sum(run.minutes for run in runs) / len(runs),
    }


def _verdict(interval: Interval, figure: Figure | None) -> str:
    """ "inside": our value lies in the expected interval. "near": only our interval reaches it. "outside": neither."""
    if figure is None or figure.half_width is None:
        return ""
    low, high = figure.pass_at_1 - figure.half_width, figure.pass_at_1 + figure.half_width
    if low <= interval.value <= high:
        return "inside"
    return "near" if interval.overlaps(low, high) else "outside"


def _differences(
    evaluated: list[_Evaluated], base: Evaluation | None, expected: Expected | None
) -> list[DifferenceRow]:
    rows = []
    for item in evaluated:
        group = item.group
        for other in evaluated:
            shared = tuple(seed for seed in item.by_seed if seed in other.by_seed)
            if group.mode == "grpo" or other.group.mode != "grpo" or not shared:
                continue
            if other.group.total_steps != group.total_steps:
                continue
            figure = None
            if expected is not None and group.total_steps == expected.steps:
                figure = expected.differences.get((group.teacher, group.mode))
            label = f"{group.label} minus {other.group.label}"
            rows.append(_difference(label, item.by_seed, other.by_seed, shared, figure))
        if base and item.by_seed:
            seeds = tuple(item.by_seed)
            rows.append(
                _difference(f"{group.label} minus base model", item.by_seed, dict.fromkeys(seeds, base), seeds, None)
            )
    return rows


def _difference(
    label: str,
    left: dict[int, Evaluation],
    right: dict[int, Evaluation],
    seeds: tuple[int, ...],
    expected: tuple[float, float] | None,
) -> DifferenceRow:
    a, b = (np.array([side[seed].scores for seed in seeds]) for side in (left, right))
    over_seeds = paired_seed_difference(a.mean(axis=1), b.mean(axis=1)) if len(seeds) >= MIN_SEEDS else None
    return DifferenceRow(label, seeds, paired_difference(a.mean(axis=0), b.mean(axis=0)), over_seeds, expected)


def _setting(evaluations: list[Evaluation]) -> str:
    if not evaluations:
        return "no evaluation"
    samples = sorted({e.samples for e in evaluations})
    each = " or ".join(str(n) for n in samples)
    plural = "" if samples == [1] else "s"
    first = evaluations[0]
    return f"pass@1 on {first.problems} problems x {each} sample{plural} at temperature {first.temperature:g}"
