r"""Training problems in verl's schema: cleaned, measured, split and written.

    data_sources.read_rows -> prepare (conflicting answers, duplicates, overlong prompts, split) -> write

Two rows hold the same problem when their texts differ in spacing only, and answers agree when the grader spells them
alike. One row that is written:

    data_source, ability          text
    prompt                        [{"role": "user", "content": ...}]
    reward_model                  {"style": "rule", "ground_truth": text}
    extra_info                    {"index": row in the source, "split", "answer_format", "problem"}
"""

import functools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from distilled_rl.data_sources import DAPO_PREFIX, DAPO_SUFFIX, DataError, Row
from distilled_rl.grading import MINIATURE_PREFIX, canonical

TokenCounter = Callable[[list[str]], list[int]]


class PromptFormat(NamedTuple):
    """How a problem is put to the model, and where `distilled_rl.grading.extract` then looks for the answer."""

    before: str
    after: str
    answer_format: str


PROMPT_FORMATS = {
    "boxed": PromptFormat("", "\nPlease reason step by step, and put your final answer within \\boxed{}.", "boxed"),
    "dapo": PromptFormat(DAPO_PREFIX, DAPO_SUFFIX, "answer_line"),
}


@dataclass(frozen=True)
class Options:
    """What `prepare` does. A row that is not dropped is kept as it is.

    data_source:        name that verl groups its validation metrics by
    prompt_format:      a key of PROMPT_FORMATS
    max_prompt_tokens:  limit that `overlong` is about; needs a tokenizer
    limit:              training problems at most, drawn with `seed`; 0: all
    holdout:            problems that go to `val.parquet`, drawn with `seed` before the limit is applied
    duplicates, conflicts, overlong: `drop` or `keep`
    """

    data_source: str
    prompt_format: str = "boxed"
    max_prompt_tokens: int | None = None
    limit: int = 0
    holdout: int = 0
    seed: int = 1
    duplicates: str = "drop"
    conflicts: str = "drop"
    overlong: str = "drop"

    def __post_init__(self) -> None:
        if self.prompt_format not in PROMPT_FORMATS:
            raise DataError(
                f"unknown prompt format {self.prompt_format!r}: one of {', '.join(PROMPT_FORMATS)} is expected"
            )
        for name in ("duplicates", "conflicts", "overlong"):
            if getattr(self, name) not in ("drop", "keep"):
                raise DataError(f"{name} must be drop or keep, not {getattr(self, name)!r}")
        if self.data_source.startswith(MINIATURE_PREFIX):
            raise DataError(f"data_source {self.data_source!r} would be graded as the miniature: give it another name")
        if min(self.limit, self.holdout) < 0:
            raise DataError("limit and holdout must not be negative")


# ---- cleaning ----


def prepare(
    rows: list[Row], options: Options, count_tokens: TokenCounter | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Clean, measure and split. Returns ({"train": rows in verl's schema, "val": ...}, report).

    count_tokens: prompt texts -> tokens of each as the model gets them; without it lengths are not measured
    Raises DataError if the options ask for more problems than are left.
    """
    if options.max_prompt_tokens is not None and count_tokens is None:
        raise DataError("a limit on prompt tokens needs a tokenizer")
    report: dict[str, Any] = {
        "rows": len(rows),
        "distinct_problems": len({row.problem for row in rows}),
        "distinct_problems_ignoring_spacing": len({_key(row.problem) for row in rows}),
    }
    kept = [row for row in rows if row.problem and row.answer]
    report["empty"] = {"rows": len(rows) - len(kept), "action": "drop"}
    kept, report["conflicts"] = _without_conflicts(kept, options.conflicts)
    kept, report["duplicates"] = _without_duplicates(kept, options.duplicates)
    kept, report["prompt_tokens"] = _within_length(kept, options, count_tokens)
    train, val = _split(kept, options)
    report["written"] = {"train": len(train), "val": len(val)}
    report["options"] = dict(vars(options))
    splits = {"train": train, "val": val}
    return {name: [to_verl(row, name, options) for row in part] for name, part in splits.items()}, report


def _key(problem: str) -> str:
    return " ".join(problem.split())


@functools.cache
def _spelling(answer: str) -> str:
    return canonical(answer).text


def _without_conflicts(rows: list[Row], action: str) -> tuple[list[Row], dict[str, Any]]:
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(_key(row.problem), set()).add(_spelling(row.answer))
    conflicts = {key: sorted(found) for key, found in answers.items() if len(found) > 1}
    clean = [row for row in rows if _key(row.problem) not in conflicts]
    named = [{"problem": key[:120], "answers": found} for key, found in sorted(conflicts.items())]
    report = {"problems": len(conflicts), "rows": len(rows) - len(clean), "action": action, "which": named}
    return (clean if action == "drop" else rows), report


def _without_duplicates(rows: list[Row], action: str) -> tuple[list[Row], dict[str, Any]]:
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((_key(row.problem), _spelling(row.answer)), row)
    report = {"rows": len(rows) - len(first), "action": action}
    return (list(first.values()) if action == "drop" else rows), report


def _within_length(
    rows: list[Row], options: Options, count_tokens: TokenCounter | None
) -> tuple[list[Row], dict[str, Any] | None]:
    if count_tokens is None or not rows:
        return rows, None
    lengths = count_tokens([prompt_text(row.problem, options.prompt_format) for row in rows])
    ordered = sorted(lengths)
    limit = options.max_prompt_tokens
    report = {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
        "limit": limit,
        "over_the_limit": sum(length > limit for length in lengths) if limit is not None else None,
        "action": options.overlong,
    }
    if limit is None or options.overlong == "keep":
        return rows, report
    return [row for row, length in zip(rows, lengths, strict=True) if length <= limit], report


def _split(rows: list[Row], options: Options) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, both in the source's order. All rows of one problem go the same way."""
    keys = list(dict.fromkeys(_key(row.problem) for row in rows))
    if options.holdout + max(options.limit, 1) > len(keys):
        wanted = f"{options.holdout} held out and {options.limit or 'at least 1'} for training"
        raise DataError(f"{len(keys)} problems are left, {wanted} are asked for")
    random.Random(options.seed).shuffle(keys)
    held_out = set(keys[: options.holdout])
    chosen = set(keys[options.holdout :][: options.limit or None])
    return [row for row in rows if _key(row.problem) in chosen], [row for row in rows if _key(row.problem) in held_out]


def prompt_text(problem: str, prompt_format: str) -> str:
    """What the user message says."""
    form = PROMPT_FORMATS[prompt_format]
    return form.before + problem + form.after


def to_verl(row: Row, split: str, options: Options) -> dict[str, Any]:
    """One row in verl's schema."""
    return {
        "data_source": options.data_source,
        "prompt": [{"role": "user", "content": prompt_text(row.problem, options.prompt_format)}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": {
            "index": row.index,
            "split": split,
            "answer_format": PROMPT_FORMATS[options.prompt_format].answer_format,
            "problem": row.problem,
        },
    }


def chat_token_counter(tokenizer_path: str) -> TokenCounter:
    """Counts as verl does for `data.max_prompt_length`: the chat template around the user message, generation prompt included.

    Raises DataError if there is no tokenizer with a chat template.
    """
    from transformers import AutoTokenizer

    if not Path(tokenizer_path).is_dir():
        raise DataError(f"{tokenizer_path} is no directory: the directory of a tokenizer is expected")
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer in {tokenizer_path} has no chat template")

    def count(texts: list[str]) -> list[int]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        return [len(ids) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]]

    return count


# ---- writing ----


def check_output(directory: Path, holdout: int) -> None:
    """Make the directory and see that files can be put there. Raises DataError if not."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise DataError(f"cannot write to {directory}: {error.strerror}") from error
    if not holdout and (directory / "val.parquet").exists():
        raise DataError(
            f"{directory}/val.parquet is another preparation's: remove it, hold some problems out, or write elsewhere"
        )


def write(directory: Path, splits: dict[str, list[dict[str, Any]]], report: dict[str, Any]) -> list[Path]:
    """Write `<split>.parquet` for each split that has rows, and `report.json`; each file appears whole or not at all."""
    written = []
    for name, rows in splits.items():
        if rows:
            table = pa.Table.from_pylist(rows)
            written.append(_write_whole(directory / f"{name}.parquet", functools.partial(pq.write_table, table)))
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    return [*written, _write_whole(directory / "report.json", lambda path: path.write_text(text, encoding="utf-8"))]


def _write_whole(path: Path, write_to: Callable[[Path], Any]) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_to(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
