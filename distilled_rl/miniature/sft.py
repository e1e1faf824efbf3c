"""Supervised fine-tuning on worked solutions, in plain PyTorch."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from distilled_rl.miniature import models, task
from distilled_rl.miniature.tokenizer import encode

Log = Callable[[str], None]


@dataclass(frozen=True)
class SFTSettings:
    """The optimiser's settings; `seed` fixes the initial weights, the problems, the book's slips and their order."""

    steps: int
    lr: float
    seed: int
    batch: int = 128
    warmup: int = 20
    final_lr: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0


def learning_rate(step: int, settings: SFTSettings) -> float:
    """The rate of 0-based `step`: a linear warm-up, then a cosine that ends at `final_lr` times the peak."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * cosine)


def encode_corpus(problems: Sequence[task.Problem], textbook: task.Textbook, seed: int) -> torch.Tensor:
    """The ids [N, 44] of prompt + solution for each problem; all have the same length, so nothing is padded."""
    rng = random.Random(f"miniature/solve/{seed}")
    return torch.tensor([encode(problem.prompt + textbook.solve(problem, rng)) for problem in problems])


def response_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over the response tokens, `$` included, of `ids` [B, T]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, task.PROMPT_TOKENS - 1 :]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, task.PROMPT_TOKENS :].flatten())


def train(size: str, textbook: task.Textbook, settings: SFTSettings, log: Log | None = None) -> Qwen3ForCausalLM:
    """Train a new model of `size` on `steps * batch` different problems solved by `textbook`, seen once each.

    The same arguments give the same weights on the same kind of CPU and with the same number of threads.
    """
    problems = task.sft_problems(settings.steps * settings.batch, str(settings.seed))
    corpus = encode_corpus(problems, textbook, settings.seed)
    model = models.new_model(size, settings.seed).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    spoke = time.monotonic()
    for step, ids in enumerate(corpus.split(settings.batch)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = response_loss(model, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        if log is not None and (time.monotonic() - spoke > 3 or step + 1 == settings.steps):
            spoke = time.monotonic()
            log(f"step {step + 1}/{settings.steps}  loss {loss.item():.4f}")
    return model.eval()
