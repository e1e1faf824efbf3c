"""What a run's data files and model folders hold, read without verl, without weights and without the network.

Functions named ``*_problems`` yield one sentence per problem; the rules that say which configuration key it came from
are in :mod:`distilled_rl.checks.inputs`.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json
import pyarrow.parquet

from distilled_rl.config import ConfigError

HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")
WEIGHTS = ("*.safetensors", "*.bin")
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
            content = path.read_bytes()
            is_array = content[:64].lstrip().startswith(b"[")
            rows = pyarrow.Table.from_pylist(json.loads(content)) if is_array else pyarrow.json.read_json(path)
            return rows.num_rows, rows.schema
    except (pyarrow.ArrowException, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from error
    raise ConfigError(f"{path} has the ending {path.suffix!r}: verl reads .parquet, .json and .jsonl")


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


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises :class:`ConfigError` if it is broken."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error


def model_config(folder: Path) -> dict[str, Any]:
    """Return a model's ``config.json``, the part on its language model."""
    config = read_json(folder / "config.json")
    return config.get("text_config") or config


def head_dim(config: dict[str, Any]) -> int | None:
    """Return the size of one attention head, None when ``config.json`` does not tell."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(hidden) // int(heads) if hidden and heads else None


def tokenizer_problems(student: Path, teacher: Path, teacher_vocab_size: int | None) -> Iterator[str]:
    """Yield why the teacher cannot score the student's token ids, comparing two tokenizer folders.

    Every token of the student must have the same id for the teacher, inside the teacher's embedding, and both must end
    a text with the same token. The teacher may know more tokens, and padded embedding sizes may differ.
    Without a ``tokenizer.json`` on both sides nothing is compared.
    """
    if not all((folder / "tokenizer.json").is_file() for folder in (student, teacher)):
        return
    ours, theirs = _vocabulary(student), _vocabulary(teacher)
    different = sorted((token_id, token) for token, token_id in ours.items() if theirs.get(token) != token_id)
    if different:
        examples = ", ".join(f"{token!r}: {number} and {theirs.get(token)}" for number, token in different[:3])
        yield (
            f"{len(different)} of the student's {len(ours)} tokens have another id, or none, for the teacher "
            f"({examples}): its log-probs would belong to other tokens; use a teacher with the student's tokenizer"
        )
    elif teacher_vocab_size is not None and max(ours.values()) >= teacher_vocab_size:
        yield (
            f"the student's highest token id is {max(ours.values())}, the teacher's vocab_size {teacher_vocab_size}: "
            "it cannot score every token; use a teacher with the student's tokenizer"
        )
    ends = [_end_of_text(folder, vocabulary) for folder, vocabulary in ((student, ours), (teacher, theirs))]
    if None not in ends and ends[0] != ends[1]:
        yield (
            f"the student ends a text with token id {ends[0]}, the teacher with {ends[1]}: the teacher would teach it "
            "never to stop; set the same eos_token in both tokenizer_config.json, or use a teacher of the student's "
            "family"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id, special tokens included."""
    content = read_json(folder / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):  # a unigram model lists (token, score) pairs
        vocabulary = {token: index for index, (token, _score) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _end_of_text(folder: Path, vocabulary: dict[str, int]) -> int | None:
    """Return the id that ends a text: the tokenizer's eos_token, else the first eos_token_id of the model's files."""
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token in vocabulary:
        return vocabulary[token]
    for name in ("generation_config.json", "config.json"):
        end = read_json(folder / name).get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if isinstance(end, int):
            return end
    return None
