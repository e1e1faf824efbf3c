"""Small untrained models of the Qwen3 architecture around a real tokenizer, for runs on a CPU that show every step.

    python -m distilled_rl.tiny_models --tokenizer DIR --out outputs/tiny/student --size student --seed 1
    python -m distilled_rl.tiny_models --tokenizer DIR --out outputs/tiny/teacher --size teacher --seed 2

They know nothing: a teacher is one in name, larger and started from another seed. The same tokenizer, size, vocabulary and
seed give the same bytes; a directory that holds them already is left as it is.
"""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import Qwen3Config

QWEN3_VOCABULARY = 151_936  # rows of Qwen3's embedding: 151,669 tokens, padded
RECORD = "built_from.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# For a tokenizer without a chat template: ChatML, which Qwen's template reduces to without system message and tools.
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class TinyModelError(ValueError):
    """A model that cannot be built; the message says why."""


@dataclass(frozen=True)
class Shape:
    """Width and depth. Heads are 32 wide, for vLLM's CPU attention has no kernel for narrower ones."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int


class Size(StrEnum):
    STUDENT = "student"
    TEACHER = "teacher"


SHAPES = {
    Size.STUDENT: Shape(hidden=64, layers=2, heads=2, kv_heads=1),
    Size.TEACHER: Shape(hidden=128, layers=3, heads=4, kv_heads=2),
}


def build(tokenizer_dir: Path, out: Path, size: Size, seed: int, vocab_size: int = QWEN3_VOCABULARY) -> bool:
    """Write a model in Hugging Face format (float32 safetensors, generation config, tokenizer) to the directory `out`.

    Returns whether it was built; False: `out` holds this very model already. `out` appears whole or not at all.
    Raises TinyModelError if there is no usable tokenizer, the vocabulary is too small, or `out` holds something else.
    """
    tokenizer = _load_tokenizer(tokenizer_dir, vocab_size)
    record = {
        "size": size.value,
        "shape": vars(SHAPES[size]),
        "seed": seed,
        "vocab_size": vocab_size,
        "tokenizer": {
            name: _digest(tokenizer_dir / name) for name in TOKENIZER_FILES if (tokenizer_dir / name).is_file()
        },
    }
    if out.exists():
        if _read_record(out) == record:
            return False
        raise TinyModelError(f"{out} is there already and holds something else: remove it or give another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _save_model(partial, _config(SHAPES[size], tokenizer, vocab_size), seed)
        for name in record["tokenizer"]:
            shutil.copyfile(tokenizer_dir / name, partial / name)
        if not tokenizer.chat_template:
            (partial / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp makes the directory private, safetensors its file
        (partial / "model.safetensors").chmod(0o644)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _load_tokenizer(directory: Path, vocab_size: int) -> Any:
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file() or not (directory / "tokenizer_config.json").is_file():
        raise TinyModelError(f"{directory} has no tokenizer.json and tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for name in ("eos_token", "pad_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            raise TinyModelError(f"the tokenizer in {directory} has no {name}: training needs one")
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise TinyModelError(
            f"the tokenizer in {directory} has ids up to {needed - 1}: a vocabulary of {vocab_size} is too small"
        )
    return tokenizer


def _config(shape: Shape, tokenizer: Any, vocab_size: int) -> "Qwen3Config":
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _save_model(directory: Path, config: "Qwen3Config", seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(directory)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_record(directory: Path) -> dict[str, Any] | None:
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TinyModelError(f"{path} is damaged ({error}): remove {directory} and build it again") from error


def main(
    tokenizer: Annotated[Path, typer.Option(help="Directory with tokenizer.json and tokenizer_config.json.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    size: Annotated[
        Size, typer.Option(help="student: 9.8 million parameters, teacher: 20 million, with Qwen3's vocabulary.")
    ],
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
    vocab_size: Annotated[int, typer.Option(min=1, help="Rows of the embedding.")] = QWEN3_VOCABULARY,
) -> None:
    """Build one small untrained model."""
    try:
        built = build(tokenizer, out, size, seed, vocab_size)
    except TinyModelError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{'wrote' if built else 'found'} {out}")


if __name__ == "__main__":
    typer.run(main)
