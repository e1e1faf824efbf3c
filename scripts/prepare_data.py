"""Turn training problems into the Parquet files that verl trains on, and report what is in them.

    python scripts/prepare_data.py train_dapo.parquet --out data/dapo --tokenizer MODEL --max-prompt-tokens 2048
    python scripts/prepare_data.py BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo --holdout 500       # from the hub
    python scripts/prepare_data.py gsm8k_train.jsonl --out data/gsm8k

Writes train.parquet, val.parquet (with --holdout) and report.json. The work is in distilled_rl/data.py.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distilled_rl import data
from distilled_rl.data_sources import DataError, read_rows


class Action(StrEnum):
    DROP = "drop"
    KEEP = "keep"


class PromptFormat(StrEnum):
    BOXED = "boxed"
    DAPO = "dapo"


def main(
    source: Annotated[str, typer.Argument(help="A .parquet or .jsonl file, or the name of a data set on the hub.")],
    out: Annotated[Path, typer.Option(help="Directory for train.parquet, val.parquet and report.json.")],
    tokenizer: Annotated[str | None, typer.Option(help="Directory of a tokenizer: measures the prompts.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Limit on a prompt; needs --tokenizer.")] = None,
    prompt_format: Annotated[PromptFormat, typer.Option(help="boxed, or DAPO's own prompt.")] = PromptFormat.BOXED,
    data_source: Annotated[str | None, typer.Option(help="Name in the metrics; default: the source's name.")] = None,
    split: Annotated[str, typer.Option(help="Split to read from the hub.")] = "train",
    limit: Annotated[int, typer.Option(min=0, help="Training problems at most; 0: all.")] = 0,
    holdout: Annotated[int, typer.Option(min=0, help="Problems to hold out for validation.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw for --limit and --holdout.")] = 1,
    duplicates: Annotated[Action, typer.Option(help="Further rows of a problem with the same answer.")] = Action.DROP,
    conflicts: Annotated[Action, typer.Option(help="All rows of a problem that has several answers.")] = Action.DROP,
    overlong: Annotated[Action, typer.Option(help="Prompts over --max-prompt-tokens.")] = Action.DROP,
) -> None:
    """Prepare SOURCE for training with verl."""
    try:
        options = data.Options(
            data_source=data_source or Path(source).stem,
            prompt_format=prompt_format.value,
            max_prompt_tokens=max_prompt_tokens,
            limit=limit,
            holdout=holdout,
            seed=seed,
            duplicates=duplicates.value,
            conflicts=conflicts.value,
            overlong=overlong.value,
        )
        data.check_output(out, holdout)
        if max_prompt_tokens is not None and tokenizer is None:
            raise DataError("--max-prompt-tokens needs --tokenizer")
        count_tokens = data.chat_token_counter(tokenizer) if tokenizer else None
        splits, report = data.prepare(read_rows(source, split), options, count_tokens)
        written = data.write(out, splits, {"source": source, "tokenizer": tokenizer, **report})
    except DataError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    for path in written:
        typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
