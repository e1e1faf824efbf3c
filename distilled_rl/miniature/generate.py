"""Batched sampling with a key-value cache, and the evaluation of a checkpoint on problems."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from distilled_rl.miniature import task
from distilled_rl.miniature.models import load_model
from distilled_rl.miniature.tokenizer import EOS_ID, PAD_ID, decode, encode

CHUNK = 1000  # responses sampled side by side: more is no faster on two cores


@dataclass(frozen=True)
class Evaluation:
    """What a model does on N problems, sampled at temperature 1.

    greedy:         share of the greedy responses that are rewarded; None if greedy was not asked for
    pass_at_1:      mean reward of the samples
    scores:         per problem, the mean reward of its samples
    wrong_step:     among the rewarded samples, the share that contains a wrong step; 0 if none is rewarded
    ended:          share of the samples that reach `$`
    """

    greedy: float | None
    pass_at_1: float
    scores: tuple[float, ...]
    wrong_step: float
    ended: float

    def __str__(self) -> str:
        greedy = "" if self.greedy is None else f"greedy {self.greedy:.3f}  "
        return f"{greedy}pass@1 {self.pass_at_1:.3f}  rewarded with a wrong step {self.wrong_step:.3f}"


@torch.inference_mode()
def sample(model: Qwen3ForCausalLM, prompts: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Continue `prompts` [B, P] by at most 34 tokens -> responses [B, R], `<pad>` after `$`.

    With a `generator` the tokens are drawn at temperature 1, without one they are the most likely.
    """
    cache = DynamicCache(config=model.config)
    alive = torch.ones(len(prompts), dtype=torch.bool)
    ids, responses = prompts, []
    for _ in range(task.RESPONSE_TOKENS):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if generator is None:
            tokens = logits.argmax(-1)
        else:
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        tokens = torch.where(alive, tokens, PAD_ID)
        responses.append(tokens)
        alive = alive & (tokens != EOS_ID)
        if not alive.any():
            break
        ids = tokens[:, None]
    return torch.stack(responses, dim=1)


def respond(
    model: Qwen3ForCausalLM, problems: Sequence[task.Problem], generator: torch.Generator | None = None
) -> list[str]:
    """One response per problem, as text that ends in `$` if the model ended it."""
    responses: list[str] = []
    for start in range(0, len(problems), CHUNK):
        prompts = torch.tensor([encode(problem.prompt) for problem in problems[start : start + CHUNK]])
        responses += [decode(row) for row in sample(model, prompts, generator).tolist()]
    return responses


def evaluate(
    model_dir: Path | str,
    problems: Sequence[task.Problem],
    samples: int = 4,
    greedy: bool = True,
    seed: int = 0,
) -> Evaluation:
    """Evaluate the checkpoint in `model_dir`: `samples` responses per problem at temperature 1, and the greedy one.

    The same `seed` gives the same samples. ValueError if there are no problems or no samples.
    """
    if not problems or samples < 1:
        raise ValueError("an evaluation needs at least one problem and one sample")
    model = load_model(model_dir)
    greedy_score = None
    if greedy:
        greedy_score = sum(grade["score"] for grade in _grades(model, problems, None)) / len(problems)
    generator = torch.Generator().manual_seed(seed)
    rounds = [_grades(model, problems, generator) for _ in range(samples)]
    flat = [grade for grades in rounds for grade in grades]
    rewarded = [grade for grade in flat if grade["score"] == 1.0]
    return Evaluation(
        greedy=greedy_score,
        pass_at_1=len(rewarded) / len(flat),
        scores=tuple(sum(grade["score"] for grade in grades) / samples for grades in zip(*rounds, strict=True)),
        wrong_step=sum(grade["steps_right"] == 0.0 for grade in rewarded) / max(1, len(rewarded)),
        ended=sum(grade["ended"] for grade in flat) / len(flat),
    )


def _grades(
    model: Qwen3ForCausalLM, problems: Sequence[task.Problem], generator: torch.Generator | None
) -> list[dict[str, float]]:
    responses = respond(model, problems, generator)
    return [
        task.grade(response, problem.answer, {"problem": problem.text})
        for response, problem in zip(responses, problems, strict=True)
    ]
