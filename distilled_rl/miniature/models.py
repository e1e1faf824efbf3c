"""The two sizes of the Qwen3 architecture, as ordinary Hugging Face checkpoints in float32."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from distilled_rl.miniature.tokenizer import EOS_ID, PAD_ID, VOCABULARY, save_tokenizer


@dataclass(frozen=True)
class Size:
    """Width of a two-layer model; `parameters` is the count that it must come out at."""

    hidden: int
    intermediate: int
    parameters: int


SIZES = {
    "student": Size(hidden=64, intermediate=192, parameters=100_800),
    "teacher": Size(hidden=96, intermediate=288, parameters=206_432),
}


def model_config(size: str) -> Qwen3Config:
    """The configuration of `size`, one of `SIZES`: tied embeddings, 2 layers, 2 heads and 1 key-value head of 32.

    vLLM's CPU attention has kernels for head_dim 32 and more only (vllm/v1/attention/backends/cpu_attn.py:59). The
    matrices keep the shape of 4 heads and 2 key-value heads of 16; only the q/k norms grow, by 64 parameters in all.
    """
    width = SIZES[size]
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=width.hidden,
        intermediate_size=width.intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        initializer_range=0.07,  # 1 / sqrt(3 * 64), torch's own; with 0.02 the student learns nothing in 500 steps
        dtype="float32",
    )


def new_model(size: str, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model of `size`, the same for the same `seed`. Torch's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config(size))
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != SIZES[size].parameters:
        raise AssertionError(f"the {size} has {count} parameters instead of {SIZES[size].parameters}")
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write `model` and the tokenizer into `folder`, so that transformers and vLLM load it by its path."""
    model.save_pretrained(folder)
    save_tokenizer(folder)


def load_model(folder: Path | str) -> Qwen3ForCausalLM:
    """Read a checkpoint of this architecture from `folder` in float32, ready for evaluation."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
