"""What a run's data files and model folders hold, read without verl, without weights and without the network.

Functions named ``*_problems`` yield one sentence per problem; the rules that say which configuration key it came from
are in :mod:`distilled_rl.checks.inputs`.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json
import pyarrow.parquet

from distilled_rl.config import ConfigError
from distilled_rl.teacher.model_files import model_config

HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")
WEIGHTS = ("*.safetensors", "*.bin")
# What tells whether two models fit, without weights.
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def read_table(path: Path) -> tuple[int, pyarrow.Schema]:
    """Return the number of rows and the columns of a parquet, JSON-lines or JSON file, the formats of verl's dataset.

    Of a parquet file only the footer is read. Raises :class:`ConfigError` when the file is not there or cannot be read.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: python scripts/prepare_data.py BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo --holdout "
            "500 writes the DAPO files, python -m distilled_rl.miniature build --out outputs/miniature the miniature's; or "
            "set dataset.train and dataset.val"
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty (0 bytes): write it again")
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                return file.metadata.num_rows, file.schema_arrow
        if path.suffix in (".json", ".jsonl"):
            rows = _json_rows(path)
            return rows.num_rows, rows.schema
    except (pyarrow.ArrowException, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from error
    raise ConfigError(f"{path} has the ending {path.suffix!r}: verl reads .parquet, .json and .jsonl")


def _json_rows(path: Path) -> pyarrow.Table:
    content = path.read_bytes()
    is_array = content[:64].lstrip().startswith(b"[")
    return pyarrow.Table.from_pylist(json.loads(content)) if is_array else pyarrow.json.read_json(path)


def value_counts(path: Path, column: str) -> Counter[str]:
    """Return how often each value of a column occurs, as text, in a file that :func:`read_table` can read.

    Of a parquet file only that column is read.
    """
    is_parquet = path.suffix == ".parquet"
    rows = pyarrow.parquet.read_table(path, columns=[column]) if is_parquet else _json_rows(path)
    counts: Counter[str] = Counter()
    for entry in rows[column].value_counts().to_pylist():
        counts[str(entry["values"])] += entry["counts"]
    return counts


def column_problems(path: Path, schema: pyarrow.Schema, prompt_key: str, source_key: str) -> Iterator[str]:
    """Yield what the columns lack of verl's schema: prompt (messages), data source, ``reward_model.ground_truth``."""
    missing = [name for name in (prompt_key, source_key, "reward_model") if name not in schema.names]
    if missing:
        yield (
            f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(schema.names)}. Write verl's schema "
            "(see scripts/prepare_data.py), or name the column in data.prompt_key or data.reward_fn_key"
        )
    if prompt_key in schema.names and not pyarrow.types.is_nested(schema.field(prompt_key).type):
        yield (
            f"{path}: column {prompt_key} is {schema.field(prompt_key).type}, not a list of {{role, content}} messages"
        )
    if "reward_model" in schema.names:
        kind = schema.field("reward_model").type
        if not pyarrow.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
            yield f"{path}: column reward_model is {kind}, but the grader reads reward_model.ground_truth from it"


def hub_is_offline() -> bool:
    """Whether the environment forbids downloads from the Hugging Face hub."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().upper() in ("1", "ON", "YES", "TRUE") for value in values)


def model_folder(path: str) -> Path | None:
    """Return the folder of a model given by path or hub name; None for a hub name that is still to be downloaded.

    What exists is a path; so is what does not look like ``owner/name``, or has a parent folder that exists.
    Raises :class:`ConfigError` for a path to nothing, and offline for a name that is not in the hub's cache.
    """
    folder = Path(path).expanduser()
    if folder.exists():
        if not folder.is_dir():
            raise ConfigError(f"{path} is a file: give the folder that holds config.json, weights and tokenizer")
        return folder
    if not HUB_ID.fullmatch(path) or path.startswith(".") or (folder.parent != Path(".") and folder.parent.is_dir()):
        raise ConfigError(f"{path} does not exist: give the folder of a model, or a hub name such as Qwen/Qwen3-1.7B")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{path} does not exist, and it is no hub name either: {error}") from error
    if isinstance(cached, str):
        return Path(cached).parent
    if hub_is_offline():
        raise ConfigError(
            f"{path} is no folder here and not in the Hugging Face cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE "
            "forbids a download: unset it, fill the cache, or give the folder of the model"
        )
    return None


def small_files_are_there(path: str, folder: Path) -> bool:
    """Whether configuration and tokenizer of a model can be read, not left to a download: see :func:`model_folder`."""
    is_local = hub_is_offline() or Path(path).expanduser().is_dir()
    return is_local or all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))


def readable(path: str, tokenizer: str, weights: bool = True) -> tuple[Path, Path] | None:
    """Return the folders of a model and of its tokenizer if their small files can be read, None if they are still to be
    downloaded. ``weights``: whether the model is loaded from there.

    Raises :class:`ConfigError` for a path to nothing, and for a folder that lacks something.
    """
    folder, tokens = model_folder(path), model_folder(tokenizer)
    if folder is None or tokens is None:
        return None
    if not (small_files_are_there(path, folder) and small_files_are_there(tokenizer, tokens)):
        return None
    model_config(folder)  # is read, so that a broken one is an error
    if weights:
        for problem in folder_problems(folder, tokens):
            raise ConfigError(problem)
    return folder, tokens


def downloaded_model_folder(path: str) -> Path:
    """Return :func:`model_folder`, with the small files of a hub model downloaded where they are not in the cache.

    Raises :class:`ConfigError` where the hub does not give them.
    """
    folder = model_folder(path)
    if folder is not None and small_files_are_there(path, folder):
        return folder
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=SMALL_FILES))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ConfigError(
            f"{path} is no folder here, and the Hugging Face hub did not give its configuration and tokenizer "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): check the name and the connection, or "
            "give the folder of the model"
        ) from error


def folder_problems(folder: Path, tokenizer: Path) -> Iterator[str]:
    """Yield what a model folder lacks; ``tokenizer`` is the folder of its tokenizer, mostly the same."""
    if not (folder / "config.json").is_file():
        yield f"{folder} has no config.json: not a Hugging Face model folder"
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        yield f"{folder} has no weights ({' or '.join(WEIGHTS)}): the download or the export is not complete"
    if not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        yield (
            f"{tokenizer} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the one the model was trained "
            "with"
        )


def head_dim(config: dict[str, Any]) -> int | None:
    """Return the size of one attention head, None when ``config.json`` does not tell."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(hidden) // int(heads) if hidden and heads else None
