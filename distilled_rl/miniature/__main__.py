"""Command line: `python -m distilled_rl.miniature build --out DIR --teachers clean,weak`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build and evaluate the miniature experiment.", no_args_is_help=True, add_completion=False)


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Option(help="Folder to build into; finished parts in it are kept.")],
    teachers: Annotated[str, typer.Option(help="Teachers, separated by commas, or `all`.")] = "clean",
    force: Annotated[bool, typer.Option(help="Build every part anew.")] = False,
    workers: Annotated[int, typer.Option(help="Models to train side by side, one core each.", min=1)] = 2,
) -> None:
    """Build data, tokenizer, student and teachers."""
    from distilled_rl.miniature.build import build
    from distilled_rl.miniature.recipes import TEACHERS

    names = list(TEACHERS) if teachers == "all" else [name.strip() for name in teachers.split(",") if name.strip()]
    unknown = sorted(set(names) - set(TEACHERS))
    if unknown:
        raise typer.BadParameter(f"unknown teachers {unknown}: choose among {', '.join(TEACHERS)} or all")
    build(out, teachers=names, force=force, workers=workers)


@app.command("evaluate")
def evaluate_command(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder in Hugging Face format.", exists=True)],
    samples: Annotated[int, typer.Option(help="Samples per problem at temperature 1.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Measure a checkpoint on the 1000 held-out problems."""
    from transformers.utils import logging

    from distilled_rl.miniature.generate import evaluate
    from distilled_rl.miniature.task import held_out_problems

    logging.disable_progress_bar()
    typer.echo(str(evaluate(model, held_out_problems(), samples=samples, seed=seed)))


if __name__ == "__main__":
    app()
