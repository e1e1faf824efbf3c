"""Learning curves: one figure per metric, and everything as a tidy CSV."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from distilled_rl.report.files import write_atomic
from distilled_rl.report.groups import Group, group_runs, mode_colours
from distilled_rl.runs import STEP_SECONDS, Run

SMOOTHING = 5  # steps in the centred running mean
_HELD_OUT = re.compile(r"val-core/.+/(acc|reward)/mean@\d+")


def _column(metric: str) -> Callable[[Run], pd.Series]:
    return lambda run: run.column(metric)


def _held_out(run: Run) -> pd.Series:
    names = [name for name in run.metrics if _HELD_OUT.fullmatch(str(name))]
    return run.metrics[names].mean(axis=1).dropna()


def _clip_fraction(run: Run) -> pd.Series:
    return run.column("rho/clip_fraction_high") + run.column("rho/clip_fraction_low")


@dataclass(frozen=True)
class Curve:
    """One figure: its file `<key>.png`, title, y label with unit, metric as logged, and how to read it from a run."""

    key: str
    title: str
    label: str
    metric: str
    read: Callable[[Run], pd.Series]
    smooth: bool = False
    log: bool = False


CURVES = (
    Curve(
        "reward",
        "Training reward",
        "mean reward of a step (0 to 1)",
        "critic/score/mean",
        _column("critic/score/mean"),
        True,
    ),
    Curve("held_out", "Held-out accuracy", "share of answers right", "val-core/<data source>/acc/mean@<n>", _held_out),
    Curve(
        "response_length", "Response length", "tokens", "response_length/mean", _column("response_length/mean"), True
    ),
    Curve("entropy", "Entropy of the student", "nats per token", "actor/entropy", _column("actor/entropy"), True),
    Curve(
        "teacher_kl", "KL(student || teacher)", "nats per token (k1)", "teacher/kl_k1", _column("teacher/kl_k1"), True
    ),
    Curve("rho_w_std", "Spread of the weight w", "standard deviation", "rho/w_std", _column("rho/w_std"), True),
    Curve(
        "rho_clip_fraction",
        "Tokens whose ratio rho is clipped",
        "share of tokens",
        "rho/clip_fraction_high + rho/clip_fraction_low",
        _clip_fraction,
        True,
    ),
    Curve(
        "rho_ess_fraction",
        "Effective sample size of the weights",
        "share of the tokens",
        "rho/ess_fraction",
        _column("rho/ess_fraction"),
        True,
    ),
    Curve("grad_norm", "Gradient norm before clipping", "norm", "actor/grad_norm", _column("actor/grad_norm"), True),
    Curve("step_seconds", "Time per step", "seconds (log scale)", STEP_SECONDS, _column(STEP_SECONDS), log=True),
)


@dataclass(frozen=True)
class Drawn:
    """A figure on disk and what to say below it."""

    curve: Curve
    path: Path
    caption: str


def learning_curve_csv(path: Path | str, runs: Sequence[Run]) -> Path:
    """Write every logged number as one line `run, mode, seed, step, metric, value` and return the path."""
    parts = []
    for run in runs:
        part = run.metrics.melt(ignore_index=False, var_name="metric").dropna().reset_index()
        part.insert(0, "run", run.name)
        part.insert(1, "mode", run.mode)
        part.insert(2, "seed", run.seed)
        parts.append(part)
    columns = ["run", "mode", "seed", "step", "metric", "value"]
    frame = pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)
    return write_atomic(Path(path), frame.to_csv(index=False))


def draw_curves(folder: Path | str, runs: Sequence[Run]) -> list[Drawn]:
    """Draw every metric that a run logged into `folder/<key>.png`; figures of an earlier call that no longer apply go.

    A mode keeps its colour. Several teachers get a panel each, with the modes that have no teacher in every panel.
    """
    groups = group_runs(runs)
    drawn = []
    for curve in CURVES:
        path = Path(folder) / f"{curve.key}.png"
        shown = [group for group in groups if any(len(curve.read(run)) for run in group.runs)]
        if not shown:
            path.unlink(missing_ok=True)
            continue
        write_atomic(path, _draw(curve, shown))
        drawn.append(Drawn(curve, path, _caption(curve, shown, [group for group in groups if group not in shown])))
    return drawn


def _caption(curve: Curve, shown: list[Group], absent: list[Group]) -> str:
    parts = [f"`{curve.metric}`."]
    finished = [sum(run.finished for run in group.runs) for group in shown]
    what = f"the centred running mean over {SMOOTHING} steps" if curve.smooth else "the logged value"
    if 1 in finished:
        parts.append(f"One seed: {what}{', on the light raw values' if curve.smooth else ''}.")
    if any(count > 1 for count in finished):
        parts.append(f"Several seeds: mean, smallest and largest over the seeds of {what}.")
    if any(not run.finished for group in shown for run in group.runs):
        parts.append("Dotted: runs that are not finished.")
    if absent:
        parts.append(f"Not logged by, so not drawn for: {'; '.join(group.label for group in absent)}.")
    return " ".join(parts)


def _draw(curve: Curve, groups: list[Group]) -> bytes:
    """PNG, 800 pixels wide."""
    colours = mode_colours([group.mode for group in groups])
    teachers = sorted({group.teacher for group in groups if group.teacher}) or [""]
    across = min(2, len(teachers))
    down = -(-len(teachers) // across)
    figure = Figure(figsize=(8, 4.8 if len(teachers) == 1 else 0.6 + 3 * down), dpi=100, layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    legend = {}
    for position, (panel, teacher) in enumerate(zip(panels, teachers, strict=False)):
        for group in groups:
            if group.teacher in (None, teacher):
                _draw_group(panel, curve, group, colours[group.mode])
        _dress(panel, curve, curve.title if len(teachers) == 1 else f"teacher {teacher}")
        panel.set_ylabel("" if position % across else curve.label)
        lines, labels = panel.get_legend_handles_labels()
        legend |= dict(zip(labels, lines, strict=True))
    for panel in panels[len(teachers) :]:
        panel.remove()
    if len(teachers) > 1:
        figure.suptitle(curve.title, fontsize=13)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(4, len(legend)), frameon=False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _draw_group(panel: Axes, curve: Curve, group: Group, colour: str) -> None:
    """One line for the finished runs, with a band from smallest to largest seed; a dotted line for each other run."""
    marker = {"marker": "o", "markersize": 4} if curve.read is _held_out else {}
    raw = [series for run in group.runs if run.finished and len(series := curve.read(run))]
    lines = [_smooth(series) if curve.smooth else series for series in raw]
    if len(lines) == 1:
        if curve.smooth:
            panel.plot(raw[0].index, raw[0], color=colour, alpha=0.25, linewidth=1)
        panel.plot(lines[0].index, lines[0], color=colour, linewidth=2, label=group.panel_label, **marker)
    elif lines:
        seeds = pd.concat(lines, axis=1)
        mean = seeds.mean(axis=1)
        panel.fill_between(mean.index, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.13, linewidth=0)
        panel.plot(
            mean.index, mean, color=colour, linewidth=2, label=f"{group.panel_label} ({len(lines)} seeds)", **marker
        )
    for run in group.runs:
        series = curve.read(run)
        if not run.finished and len(series):
            series = _smooth(series) if curve.smooth else series
            label = f"{group.panel_label}, seed {run.seed} (unfinished)"
            panel.plot(series.index, series, color=colour, linewidth=1.5, linestyle=":", label=label, **marker)


def _smooth(series: pd.Series) -> pd.Series:
    return pd.Series(series.rolling(SMOOTHING, center=True, min_periods=1).mean())


def _dress(panel: Axes, curve: Curve, title: str) -> None:
    panel.set_title(title, fontsize=12)
    panel.set_xlabel("training step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.tick_params(labelbottom=True)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if curve.log:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
