"""What the small files of a model folder say, without weights: sizes, tokens, how a text ends, the chat template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distilled_rl.config import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises :class:`ConfigError` if it is broken."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} holds a {type(content).__name__}, not an object: it is not the file that it should be"
        )
    return content


def model_config(folder: Path) -> dict[str, Any]:
    """Return a model's ``config.json``, the part on its language model; empty if there is no file."""
    config = read_json(folder / "config.json")
    return config.get("text_config") or config


@dataclass(frozen=True)
class ModelFiles:
    """One model.

    ``vocabulary``: token -> id of the tokenizer's vocabulary and of the tokens added to it; ``added``: the latter, most of
    them special. ``roles``: ``bos_token``, ``eos_token``, ``pad_token``, ``unk_token`` -> token, where there is one.
    ``ends``: the ids that it writes at the end of a text, mostly one; ``stops``: these and every other id that its files
    let a generation stop at. ``template``: its chat template, from ``template_file``; None where it has none.
    """

    config: Mapping[str, Any]
    config_file: Path
    vocabulary: Mapping[str, int]
    added: frozenset[str]
    roles: Mapping[str, str]
    ends: tuple[int, ...]
    stops: frozenset[int]
    template: str | None
    template_file: Path

    def token(self, token_id: int) -> str | None:
        """Return the token with that id, the added one where two share it; None where there is none."""
        tokens = [token for token, number in self.vocabulary.items() if number == token_id]
        return next((token for token in tokens if token in self.added), tokens[0] if tokens else None)

    def number(self, key: str) -> int | None:
        """Return a whole number of ``config.json``, None where it is absent. Raises :class:`ConfigError` for others."""
        value = self.config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{self.config_file}: {key} is {value!r}, not a whole number")
        return value


def read_model(folder: Path, tokenizer: Path | None = None) -> ModelFiles:
    """Read a model folder; ``tokenizer`` is the folder of its tokenizer where that is another.

    Raises :class:`ConfigError` with the name of a file that is broken, or of ``config.json`` or ``tokenizer.json``
    where it is missing; the other files are optional.
    """
    tokenizer = tokenizer or folder
    for file, what in ((folder / "config.json", "a model"), (tokenizer / "tokenizer.json", "a fast tokenizer")):
        if not file.is_file():
            raise ConfigError(f"{file} does not exist: give the folder of {what} as save_pretrained writes it")
    config = model_config(folder)
    vocabulary, added = _vocabulary(tokenizer / "tokenizer.json")
    tokenizer_config = read_json(tokenizer / "tokenizer_config.json")
    roles = _roles(read_json(tokenizer / "special_tokens_map.json")) | _roles(tokenizer_config)
    end = vocabulary.get(roles.get("eos_token", ""))
    by_tokenizer = () if end is None else (end,)
    by_generation = _ids(folder / "generation_config.json", read_json(folder / "generation_config.json"))
    by_config = _ids(folder / "config.json", config)
    # A tokenizer and a generation config that disagree: a generation stops at either.
    if by_tokenizer and (not by_generation or by_tokenizer[0] in by_generation):
        ends = by_tokenizer
    else:
        ends = by_tokenizer + by_generation[:1] or by_config[:1]
    template_file, template = _template(tokenizer, tokenizer_config)
    return ModelFiles(
        config=config,
        config_file=folder / "config.json",
        vocabulary=vocabulary,
        added=added,
        roles=roles,
        ends=ends,
        stops=frozenset(by_tokenizer + by_generation + by_config),
        template=template,
        template_file=template_file,
    )


def _vocabulary(file: Path) -> tuple[dict[str, int], frozenset[str]]:
    """Return token -> id with the added tokens, and the added tokens alone."""
    content = read_json(file)
    try:
        vocabulary = content["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # a unigram model lists (token, score) pairs
            vocabulary = {token: index for index, (token, _score) in enumerate(vocabulary)}
        added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or []}
        highest = max((vocabulary | added).values())
        if not isinstance(highest, int):
            raise TypeError(f"an id is {highest!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} holds no vocabulary of tokens and ids ({type(error).__name__}: {error}): save the tokenizer anew"
        ) from error
    return vocabulary | added, frozenset(added)


def _roles(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens with a role; one is written as text, or as an object with its ``content``."""
    roles = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = content.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    return roles


def _ids(file: Path, content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return ``eos_token_id``, one id or a list, as a tuple."""
    value = content.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise ConfigError(f"{file}: eos_token_id is {value!r}, neither a token id nor a list of them")
    return ids


def _template(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[Path, str | None]:
    """Return the chat template and its file; ``chat_template.jinja`` goes first, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file, file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    file, template = folder / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if isinstance(template, list):  # named templates; without a name, transformers takes the one called default
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(
            f"{file}: chat_template is a {type(template).__name__}, neither text nor a list of named texts"
        )
    return file, template
