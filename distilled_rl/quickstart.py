"""The quickstart: build the miniature, train the modes through verl, evaluate, report. Every part is re-used when finished."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from distilled_rl.config import ConfigError, SweepRun, sweep_runs
from distilled_rl.launch import last_step, log_files
from distilled_rl.processes import Watched, tail
from distilled_rl.recipe import compose

MODES = ("grpo", "opd", "opd_rl", "distilled_rl")
# The factor of the teacher term in OPD+RL that the simulator's table uses.
TEACHER_COEF = {"opd_rl": 0.3}
SAMPLES = 4
# A start of the sweep that trains nothing for this long is killed. Seconds.
STALL_SECONDS = 900.0
ATTEMPTS = 2


@dataclass(frozen=True)
class Plan:
    """What to run: directory, modes, RL seeds, the miniature's teacher, and RL steps."""

    out: Path
    modes: tuple[str, ...] = MODES
    seeds: tuple[int, ...] = (1,)
    teacher: str = "clean"
    steps: int = 20
    overrides: tuple[str, ...] = ()

    def compose(self) -> DictConfig:
        """Return the sweep's configuration. Raises :class:`ConfigError`."""
        runs = [self._entry(mode, seed) for seed in self.seeds for mode in self.modes]
        return compose("miniature_sweep", [*self._overrides(), f"sweep.runs=[{','.join(runs)}]", *self.overrides])

    def command(self) -> list[str]:
        """Return the command that trains the sweep."""
        runs = [self._entry(mode, seed) for seed in self.seeds for mode in self.modes]
        return [
            *(sys.executable, "-m", "distilled_rl.cli", "train", "miniature_sweep"),
            *self._overrides(),
            f"sweep.runs=[{','.join(runs)}]",
            *self.overrides,
        ]

    def _entry(self, mode: str, seed: int) -> str:
        coefficient = f",teacher_coef:{TEACHER_COEF[mode]}" if mode in TEACHER_COEF else ""
        return f"{{mode:{mode},seed:{seed}{coefficient}}}"

    def _overrides(self) -> list[str]:
        teacher = f"teacher.name={self.teacher}"
        if all(mode == "grpo" for mode in self.modes):
            teacher = "teacher=none"
        return [
            teacher,
            f"dataset.dir={self.out / 'miniature'}",
            f"run.output={self.out / 'runs'}",
            f"trainer.total_training_steps={self.steps}",
        ]


def train(plan: Plan, say: Callable[[str], None]) -> None:
    """Train the plan's runs in a child process, showing their progress; a crash is retried once from the checkpoints.

    Raises ``RuntimeError`` with the end of the log when it fails again.
    """
    config = plan.compose()
    runs = sweep_runs(config)
    for attempt in range(1, ATTEMPTS + 1):
        if all(last_step(run.directory) >= plan.steps for run in runs):
            return
        log = plan.out / "logs" / f"train-{plan.teacher}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        say(f"starting Ray, verl, and vLLM (about two minutes); full log: {log}")
        watched = Watched(plan.command(), log)
        progress = Progress(runs, plan.steps, say)
        started = time.monotonic()
        try:
            status = watched.wait(progress.poll, timeout=None)
        except (KeyboardInterrupt, TimeoutError):
            watched.close()
            raise
        say(
            f"training process ended after {(time.monotonic() - started) / 60:.1f} min, peak memory "
            f"{watched.peak_bytes / 2**30:.1f} GiB (PSS of the process tree)"
        )
        record = plan.out / "cost.jsonl"
        with record.open("a", encoding="utf-8") as stream:
            stream.write(
                json.dumps(
                    {
                        "teacher": plan.teacher,
                        "modes": plan.modes,
                        "seeds": plan.seeds,
                        "steps": plan.steps,
                        "seconds": round(time.monotonic() - started, 1),
                        "peak_pss_bytes": watched.peak_bytes,
                        "exit_status": status,
                    }
                )
                + "\n"
            )
        if status == 0:
            return
        if status == 2:
            raise ConfigError(f"the run was refused:\n{tail(log)}")
        say(f"attempt {attempt} ended with status {status}; the end of {log}:\n{tail(log, 15)}")
    raise RuntimeError(
        f"training failed {ATTEMPTS} times; see {log}. Call again to continue from the last checkpoints."
    )


class Progress:
    """Reads the runs' logs and says one line for each few steps."""

    def __init__(self, runs: Iterable[SweepRun], steps: int, say: Callable[[str], None], every: int = 5) -> None:
        self.runs, self.steps, self.say, self.every = list(runs), steps, say, every
        self._said: dict[str, int] = {}
        self._last = time.monotonic()

    def poll(self) -> None:
        """Say what is new. Raises ``TimeoutError`` when no step ended for ``STALL_SECONDS``."""
        for run in self.runs:
            line = _last_line(run.directory)
            if line is None:
                continue
            step = int(line["step"])
            if step == self._said.get(run.name, -1):
                continue
            self._last = time.monotonic()
            new_run = run.name not in self._said
            if new_run or step % self.every == 0 or step >= self.steps:
                self.say(describe(run.name, step, self.steps, line["data"]))
            self._said[run.name] = step
        if time.monotonic() - self._last > STALL_SECONDS:
            raise TimeoutError(f"no training step ended for {STALL_SECONDS:.0f} s")


def describe(name: str, step: int, steps: int, data: dict[str, float]) -> str:
    """Return one readable line about a step."""
    parts = [f"{name:34} step {step:3d}/{steps}"]
    held_out = [value for key, value in data.items() if key.startswith("val-core/") and "/acc/mean@" in key]
    for label, value, form in (
        ("reward", data.get("critic/score/mean"), ".3f"),
        ("held-out", held_out[0] if held_out else None, ".3f"),
        ("length", data.get("response_length/mean"), ".1f"),
        ("entropy", data.get("actor/entropy"), ".3f"),
        ("KL to teacher", data.get("teacher/kl_k1"), ".3f"),
        ("s/step", data.get("timing_s/step"), ".1f"),
    ):
        if value is not None:
            parts.append(f"{label} {value:{form}}")
    return "  ".join(parts)


def _last_line(directory: Path) -> dict | None:
    """Return the last whole line of the newest log of a run directory, or ``None``."""
    for path in reversed(log_files(directory)):
        for line in reversed(path.read_text(encoding="utf-8").splitlines()):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue  # the line being written right now
    return None


def build_miniature(out: Path, teachers: Sequence[str], say: Callable[[str], None]) -> None:
    """Build the miniature in a child process (its memory is gone before training starts). Raises ``RuntimeError``."""
    folder = out / "miniature"
    command = [
        sys.executable,
        "-m",
        "distilled_rl.miniature",
        "build",
        "--out",
        str(folder),
        "--teachers",
        ",".join(teachers),
    ]
    log = out / "logs" / "miniature.log"
    seen = len(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else 0

    def poll() -> None:
        nonlocal seen
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[seen:]:
            say(line)
        seen = len(lines)

    status = Watched(command, log).wait(poll)
    if status != 0:
        raise RuntimeError(f"building the miniature failed with status {status}; the end of {log}:\n{tail(log)}")


def evaluate(plan: Plan, say: Callable[[str], None]) -> None:
    """Evaluate base, teacher, and every finished run on the held-out problems; evaluations of the same model are kept."""
    from transformers.utils import logging

    from distilled_rl.miniature.evaluation import evaluate as evaluate_model
    from distilled_rl.report import read_evaluation, write_evaluation

    logging.disable_progress_bar()
    models = plan.out / "miniature" / "models"
    wanted: list[tuple[str, str, Path, dict]] = [("base", "base", models / "student", {})]
    if any(mode != "grpo" for mode in plan.modes):
        teacher = models / f"teacher-{plan.teacher}"
        wanted.append((f"teacher-{plan.teacher}", "teacher", teacher, {"teacher": plan.teacher}))
    for run in sweep_runs(plan.compose()):
        step = last_step(run.directory)
        if step < plan.steps:
            continue
        settings = run.settings
        identity = {"mode": settings.mode, "seed": settings.seed, "step": step}
        identity["teacher"] = plan.teacher if settings.needs_teacher else None
        folder = run.directory / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        wanted.append((run.name, "trained", folder, identity))
    for name, role, folder, identity in wanted:
        path = plan.out / "eval" / f"{name}.json"
        newest = (folder / "model.safetensors").stat().st_mtime
        if path.is_file() and path.stat().st_mtime > newest:
            kept = read_evaluation(path)
            if kept.model == str(folder) and kept.step == identity.get("step"):
                continue
        result = evaluate_model(name, role, folder, identity)
        write_evaluation(result, plan.out / "eval")
        say(f"{name:34} pass@1 {result.pass_at_1:.3f}  greedy {result.greedy_accuracy:.3f}")


def report(out: Path, notes: Sequence[str] = ()) -> Path:
    """Write the report over everything in ``out`` and print its table."""
    from distilled_rl.miniature.expected import EXPECTED
    from distilled_rl.report import print_table, read_evaluations, summarise, write_report
    from distilled_rl.runs import find_runs, read_runs

    runs, broken = read_runs(find_runs(out / "runs"))
    evaluations = read_evaluations(out / "eval")
    summary = summarise(runs, evaluations, expected=EXPECTED)
    path = write_report(
        out,
        runs,
        evaluations,
        expected=EXPECTED,
        summary=summary,
        title="The miniature",
        notes=[*notes, *costs(out)],
        broken=broken,
    )
    print_table(summary)
    return path


def costs(out: Path) -> list[str]:
    """Return a sentence for each start of training: minutes and peak memory."""
    path = out / "cost.jsonl"
    if not path.is_file():
        return []
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        f"training process ({entry['teacher']} teacher; {', '.join(entry['modes'])}; {len(entry['seeds'])} seed(s), "
        f"{entry['steps']} steps): {entry['seconds'] / 60:.1f} min, peak {entry['peak_pss_bytes'] / 2**30:.1f} GiB (PSS of the "
        f"process tree), exit status {entry['exit_status']}"
        for entry in entries
    ]


def run(plans: Sequence[Plan], say: Callable[[str], None]) -> Path:
    """Build, train, evaluate, and report; every finished part is re-used. Returns the report's path.

    Raises :class:`ConfigError` for a plan that cannot work, before anything is built.
    """
    started = time.monotonic()
    out = plans[0].out
    for plan in plans:
        plan.compose()
    build_miniature(out, sorted({plan.teacher for plan in plans}), say)
    for plan in plans:
        train(plan, say)
        evaluate(plan, say)
    path = report(out)
    say(f"{path}  (this call: {(time.monotonic() - started) / 60:.1f} min)")
    return path


__all__ = ["MODES", "Plan", "Progress", "build_miniature", "costs", "describe", "evaluate", "report", "run", "train"]
