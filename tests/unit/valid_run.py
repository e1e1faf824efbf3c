"""Models and data of a few kilobytes, and the overrides that make a valid run of them (the fixture ``make_run``)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY = {"<pad>": 0, "$": 1, **{str(digit): 2 + digit for digit in range(10)}, "+": 12, "=": 13}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
PROMPT_LENGTH, RESPONSE_LENGTH = 16, 34


def write_model(folder: Path, vocabulary: dict[str, int] | None = None, eos: str = "$", **config: Any) -> Path:
    """Write a model folder: config.json with some values changed, a tokenizer, weights of one number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    Tokenizer(WordLevel(vocabulary or VOCABULARY, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "pad_token": "<pad>"}))
    safetensors.numpy.save_file({"weight": numpy.zeros(1, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    """Return problems in verl's schema."""
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number % 10}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(number % 10 + 1)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def write_parquet(path: Path, content: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return path


@dataclass(frozen=True)
class Assets:
    """Where a valid run's student, teacher and data lie, and the overrides that put them into a recipe."""

    root: Path

    def overrides(self, mode: str) -> list[str]:
        teacher = ["teacher=none"] if mode == "grpo" else ["teacher=local", f"teacher.model={self.root / 'teacher'}"]
        return [
            "scale=cpu",
            "student=local",
            f"student.model={self.root / 'student'}",
            *teacher,
            "dataset=miniature",
            f"dataset.train={self.root / 'train.parquet'}",
            f"dataset.val={self.root / 'val.parquet'}",
            f"dataset.max_prompt_length={PROMPT_LENGTH}",
            f"dataset.max_response_length={RESPONSE_LENGTH}",
            "dataset.max_model_len=64",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "trainer.total_training_steps=4",
            f"run.output={self.root / 'runs'}",
        ]
