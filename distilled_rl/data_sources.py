"""Problems and answers as they are published: Parquet or JSON-lines files, and data sets of the Hugging Face hub.

Columns that are understood: `problem` and `answer`; `question` and `answer` (GSM8K, the answer after `####`); verl's own
`prompt` and `reward_model` (DAPO on the hub, whose prompt is taken off the problem again).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
BATCH_ROWS = 10_000


class DataError(ValueError):
    """Input that cannot be used or output that cannot be written; the message says which and what to do."""


class Row(NamedTuple):
    """One problem of the source. `index`: its row there, from 0."""

    index: int
    problem: str
    answer: str


def read_rows(source: str, split: str = "train") -> list[Row]:
    """All rows of a `.parquet`, `.jsonl` or `.json` (lines) file, or of a data set on the hub (`owner/name`, its `split`).

    Raises DataError, before anything else is done, if the source is missing, empty, of another format or lacks columns.
    """
    texts: dict[str, str] = {}  # one object per text: the hub's DAPO repeats each problem a hundred times
    rows = []
    for index, record in enumerate(_records(source, split)):
        problem, answer = _problem_and_answer(record, f"row {index} of {source}")
        rows.append(Row(index, texts.setdefault(problem, problem), texts.setdefault(answer, answer)))
    if not rows:
        raise DataError(f"{source} has no rows")
    return rows


def _records(source: str, split: str) -> Iterator[dict[str, Any]]:
    path = Path(source)
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"{source} is empty")
        if path.suffix in (".jsonl", ".json"):
            return _json_records(path)
        return _parquet_records(path)
    is_hub_name = source.count("/") == 1 and not path.suffix and not source.startswith((".", "/"))
    if path.exists() or not is_hub_name:
        raise DataError(
            f"{source} is no file: a .parquet or .jsonl file, or the name of a data set on the hub, is expected"
        )
    return _hub_records(source, split)


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file ({error}); JSON lines end in .jsonl") from error
    columns = _wanted_columns(file.schema_arrow.names, str(path))
    for batch in file.iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.to_pylist()


def _json_records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"line {number} of {path} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"line {number} of {path} is not a JSON object")
            _wanted_columns(list(record), f"line {number} of {path}")
            yield record


def _hub_records(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        found = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name} is no file here, and the hub does not give it ({type(error).__name__}: {error})"
        ) from error
    assert isinstance(found, datasets.Dataset)
    columns = _wanted_columns(found.column_names, f"{name} on the hub")
    for batch in found.select_columns(columns).iter(BATCH_ROWS):
        assert isinstance(batch, dict)
        yield from (dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True))


def _wanted_columns(names: Sequence[str], where: str) -> list[str]:
    for wanted in (["problem", "answer"], ["question", "answer"], ["prompt", "reward_model"]):
        if set(wanted) <= set(names):
            return wanted
    raise DataError(
        f"{where} has the columns {', '.join(names) or '(none)'}: problem and answer, question and answer, or verl's "
        "prompt and reward_model are expected"
    )


def _problem_and_answer(record: dict[str, Any], where: str) -> tuple[str, str]:
    if "problem" in record or "question" in record:
        problem, answer = record.get("problem", record.get("question")), record["answer"]
    else:
        try:
            problem, answer = record["prompt"][-1]["content"], record["reward_model"]["ground_truth"]
        except (TypeError, KeyError, IndexError) as error:
            raise DataError(f"{where}: prompt or reward_model is not as verl has them") from error
    if not isinstance(problem, str):
        raise DataError(f"{where}: the problem is {type(problem).__name__}, text is expected")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise DataError(f"{where}: the answer is {type(answer).__name__}, text or a number is expected")
    if problem.startswith(DAPO_PREFIX) and problem.endswith(DAPO_SUFFIX):
        problem = problem.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
    return problem.strip(), str(answer).rpartition("####")[2].strip()
