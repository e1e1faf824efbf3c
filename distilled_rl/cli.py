"""The command line ``distilled-rl``: compose a recipe, check it, say what will run, run it.

A command is a function with ``@app.command()``; a :class:`ConfigError` that leaves it is printed in red, and the exit
code is 2. Heavy modules are imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from distilled_rl.config import ConfigError, DistilledRLConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from distilled_rl.teacher.specs import TeacherSpec

NEVER_BINDS = 1000.0  # a dual clip at this ratio or above is none


class ConfigErrorsInRed(TyperGroup):
    """Commands whose configuration errors are for the user, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            say(str(error), style="red", stderr=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=ConfigErrorsInRed,
    help="Train LLMs with Distilled RL, GRPO and on-policy distillation on verl.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[str, typer.Argument(help="A recipe's name, such as distilled_rl, or the path of its YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Hydra overrides: key=value, +new.key=value, ~key, group=choice (scale=cpu).")
]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before training, like `check`.")] = False,
) -> None:
    """Check a recipe, print what will run, and train it."""
    config = _checked(recipe, overrides, warn=dry_run)
    if not dry_run:
        from distilled_rl import launch

        launch.train(config)


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe with its data and models, and print what would run. Nothing is started."""
    _checked(recipe, overrides, warn=True)


@app.command("check-teacher")
def check_teacher(
    student: Annotated[str, typer.Argument(help="The student: a folder, or a name on the Hugging Face hub.")],
    teacher: Annotated[str, typer.Argument(help="The teacher, likewise.")],
    allow: Annotated[
        str, typer.Option(help="Accepted by name, separated by commas: eos, special_tokens, template.")
    ] = "",
    eos_map: Annotated[str, typer.Option(help="End-of-text ids STUDENT:TEACHER, separated by commas.")] = "",
    prompt: Annotated[str, typer.Option(help="Whose prompt the teacher reads: student or own.")] = "student",
    max_prompt: Annotated[int | None, typer.Option(help="Longest prompt, in tokens.", min=1)] = None,
    max_response: Annotated[int | None, typer.Option(help="Longest response, in tokens.", min=1)] = None,
) -> None:
    """Say whether a teacher can score a student's responses. Only small files are read; exit code 2 if it cannot."""
    if (max_prompt is None) != (max_response is None):
        raise ConfigError("--max-prompt and --max-response: give both, or none")
    from distilled_rl.checks.files import downloaded_model_folder
    from distilled_rl.teacher.compatibility import compare

    report = compare(
        downloaded_model_folder(student),
        downloaded_model_folder(teacher),
        prompt_length=max_prompt,
        response_length=max_response,
        allow=_names(allow),
        eos_map=dict(map(_id_pair, _names(eos_map))),
        prompt=prompt,
    )
    table = Table("topic", "verdict", show_lines=True)
    for column in ("found", "what to do"):
        table.add_column(column, overflow="fold")
    for line in report.lines:
        style = {"same": "green", "harmless": "green", "allowed": "yellow", "refuse": "red"}[line.verdict]
        table.add_row(line.topic, Text(line.verdict, style=style), Text(line.found), Text(line.advice))
    Console().print(table)
    if report.refused:
        say(f"refused: {', '.join(line.topic for line in report.refused)}", style="red", stderr=True)
        raise typer.Exit(2)
    say("this teacher can score this student's responses")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _id_pair(text: str) -> tuple[int, int]:
    try:
        student, teacher = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"--eos-map: {text!r} is no pair of token ids such as 151643:151645") from None
    return student, teacher


Modes = Annotated[str, typer.Option(help="Modes, separated by commas.")]
Seeds = Annotated[int, typer.Option(help="RL seeds per mode: 1, 2, ...", min=1)]
Steps = Annotated[int, typer.Option(help="RL steps per run.", min=1)]


@app.command()
def quickstart(
    modes: Modes = "grpo,opd,opd_rl,distilled_rl",
    steps: Steps = 20,
    seeds: Seeds = 1,
    teacher: Annotated[str, typer.Option(help="clean, weak, shared, peer, or format.")] = "clean",
    out: Annotated[Path, typer.Option(help="Directory; finished parts in it are re-used.")] = Path(
        "outputs/quickstart"
    ),
) -> None:
    """Build the miniature, train the modes on it through verl, evaluate, report."""
    _miniature(modes, steps, seeds, [teacher], out)


@app.command("miniature-table")
def miniature_table(
    modes: Modes = "grpo,opd,opd_rl,distilled_rl",
    steps: Steps = 60,
    seeds: Seeds = 5,
    teachers: Annotated[str, typer.Option(help="Teachers, separated by commas, or all.")] = "all",
    out: Annotated[Path, typer.Option(help="Directory; finished parts in it are re-used.")] = Path(
        "outputs/miniature_table"
    ),
) -> None:
    """Train modes x teachers x seeds on the miniature; call again to continue."""
    from distilled_rl.miniature.recipes import TEACHERS

    _miniature(modes, steps, seeds, list(TEACHERS) if teachers == "all" else teachers.split(","), out)


def _miniature(modes: str, steps: int, seeds: int, teachers: list[str], out: Path) -> None:
    from distilled_rl import quickstart as job
    from distilled_rl.methods import get_method
    from distilled_rl.miniature.recipes import TEACHERS

    names = tuple(name.strip() for name in modes.split(",") if name.strip())
    unknown = [name for name in teachers if name not in TEACHERS]
    if unknown or not names:
        raise ConfigError(
            f"--teacher(s) {', '.join(unknown)}: must be of {', '.join(TEACHERS)}" if unknown else "--modes is empty"
        )
    for name in names:
        try:
            get_method(name)
        except ValueError as error:
            raise ConfigError(f"--modes: {error}") from None
    shared = {"out": out.resolve(), "seeds": tuple(range(1, seeds + 1)), "steps": steps}
    asked = tuple(name for name in names if get_method(name).needs_teacher)
    plans = [job.Plan(modes=asked, teacher=teacher, **shared) for teacher in teachers if asked]
    if "grpo" in names:
        # GRPO has no teacher: it runs once, on the workers of the first teacher's sweep when there is one.
        plans[:1] = [job.Plan(modes=names, teacher=teachers[0], **shared)]
    job.run(plans, lambda line: say(line, style=""))


def _checked(recipe: str, overrides: list[str] | None, warn: bool) -> DictConfig:
    """Compose, check and describe a run; print its warnings if asked (training prints them itself)."""
    from distilled_rl.checks import check_run
    from distilled_rl.recipe import compose

    config = compose(recipe, overrides or [])
    warnings = check_run(config)
    for label, text in describe(config):
        say(f"{label:<12}{text}")
    for warning in warnings if warn else ():
        say(f"warning: {warning}", style="yellow", stderr=True)
    return config


def describe(config: DictConfig) -> list[tuple[str, str]]:
    """Return the run in plain words, a label and a sentence each. The configuration has passed the checks."""
    from distilled_rl.checks.values import runs, trainer_gpus
    from distilled_rl.teacher.specs import teacher_specs

    actor, rollout, trainer, data = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.trainer,
        config.data,
    )
    specs = [spec for spec in teacher_specs(config) if spec.source != "server" or config.distillation.enabled]
    teacher_gpus = config.distillation.n_gpus_per_node * config.distillation.nnodes
    pool = f", {teacher_gpus} for the teacher" if config.distillation.enabled else ""
    updates = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    batch = f"{data.train_batch_size} prompts x {rollout.n} responses at temperature {rollout.temperature:g}"
    steps = trainer.total_training_steps or f"{trainer.total_epochs} epochs"
    dual_clip = "no dual clip" if actor.clip_ratio_c >= NEVER_BINDS else f"dual clip {actor.clip_ratio_c:g}"
    return [
        *(("mode", _mode(settings)) for settings in runs(config)),
        ("student", config.actor_rollout_ref.model.path),
        *([("teacher", _teacher(spec)) for spec in specs] or [("teacher", "none")]),
        ("data", f"{_rows(config, 'train')}; validation {_rows(config, 'val')}"),
        ("lengths", f"prompts up to {data.max_prompt_length} tokens, responses up to {data.max_response_length}"),
        ("batch", f"{batch}; {updates} update(s) of {actor.ppo_mini_batch_size} prompts"),
        ("optimiser", f"{actor.optim.optimizer}, learning rate {actor.optim.lr:g}, {actor.optim.lr_scheduler_type}"),
        ("steps", f"{steps}; validation every {trainer.test_freq}, checkpoint every {trainer.save_freq}"),
        ("loss", f"{actor.loss_agg_mode}, clip {actor.clip_ratio_low:g}/{actor.clip_ratio_high:g}, {dual_clip}"),
        (
            "device",
            f"{trainer.device}: {trainer_gpus(config)} to train{pool}",
        ),
        ("output", config.run.dir),
    ]


def _teacher(spec: TeacherSpec) -> str:
    what = {
        "server": f"{spec.model}",
        "url": f"{spec.model} at {spec.url}" if spec.model else f"{spec.url}",
        "colocated": f"{spec.model}, {spec.dtype}, beside the student",
        "temperature": f"the student at temperature {spec.temperature}",
    }[spec.source]
    ends = ", ".join(f"{student} as {teacher}" for student, teacher in spec.eos_map.items())
    return "".join(
        [
            f"{spec.key}: " if spec.key is not None else "",
            what,
            ", reads its own prompt" if spec.prompt == "own" else "",
            f", scores end of text {ends}" if ends else "",
        ]
    )


def _rows(config: DictConfig, split: str) -> str:
    from distilled_rl.checks.inputs import data_rows
    from distilled_rl.checks.values import data_files

    rows = data_rows(config, split)
    return f"{'?' if rows is None else rows} rows of {', '.join(data_files(config, f'data.{split}_files'))}"


def _mode(settings: DistilledRLConfig) -> str:
    options = ", ".join(f"{name}={value}" for name, value in vars(settings.options).items())
    return f"{settings.mode}{f' ({options})' if options else ''}, seed {settings.seed}"


def say(text: str, style: str = "", stderr: bool = False) -> None:
    """Print a line, whole, without reading markup into it."""
    Console(stderr=stderr).print(Text(text, style=style), soft_wrap=True)


def main() -> None:
    """Entry point of the console script ``distilled-rl``."""
    app()


if __name__ == "__main__":
    main()
