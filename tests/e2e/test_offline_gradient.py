"""One dumped step of each mode, recomputed from its tokens and rewards with plain Hugging Face."""

import math
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Finished

pytestmark = pytest.mark.e2e


def response_log_probs(model: torch.nn.Module, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Log-probs [j] of the response's tokens, one sequence at a time: no padding, no batching."""
    ids = torch.cat([prompt, response])[None]
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]


def group_advantages(rewards: list[float], keys: list[str]) -> list[float]:
    """GRPO: (reward - group mean) / (group standard deviation + 1e-6), over the responses of one prompt."""
    groups: dict[str, list[float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        groups.setdefault(key.rsplit("_", 2)[0], []).append(reward)
    result = []
    for key, reward in zip(keys, rewards, strict=True):
        group = torch.tensor(groups[key.rsplit("_", 2)[0]])
        result.append(((reward - group.mean()) / (group.std() + 1e-6)).item())
    return result


def token_advantages(mode: str, advantage: float, teacher: list[float], old: list[float]) -> list[float]:
    """The advantage of each token from the formulas, in the authors' order: exp, clamp, log, mean, exp."""
    if mode == "grpo":
        return [advantage] * len(old)
    if mode == "opd":
        return [t - o for t, o in zip(teacher, old, strict=True)]
    if mode == "opd_rl":
        return [advantage + 0.3 * (t - o) for t, o in zip(teacher, old, strict=True)]
    if advantage <= 0:
        return [advantage] * len(old)
    clipped = [min(max(math.exp(t - o), 1 / 3), 3.0) for t, o in zip(teacher, old, strict=True)]
    mean = math.exp(sum(math.log(rho) for rho in clipped) / len(clipped))
    return [advantage * rho / mean for rho in clipped]


@pytest.mark.parametrize("mode", ["grpo", "opd", "opd_rl", "distilled_rl"])
def test_gradient_norm_of_a_dumped_step(mode: str, four: dict[str, Finished], miniature: Path, work: Path) -> None:
    from distilled_rl.miniature.models import load_model

    dump = torch.load(work / "dumps" / mode / "step_1.pt", weights_only=True)
    student = load_model(miniature / "models" / "student").train()
    teacher = load_model(miniature / "models" / "teacher-clean")
    rewards = [row.sum().item() for row in dump["rm_scores"]]
    loss = torch.zeros(())
    rows = len(dump["keys"])
    assert rows == 128
    for row, advantage in enumerate(group_advantages(rewards, dump["keys"])):
        prompt, response = dump["prompts"][row], dump["responses"][row]
        log_probs = response_log_probs(student, prompt, response)
        old = log_probs.detach()
        torch.testing.assert_close(old, dump["old_log_probs"][row], atol=2e-5, rtol=0)
        with torch.inference_mode():
            scored = response_log_probs(teacher, prompt, response)
        expected = torch.tensor(token_advantages(mode, advantage, scored.tolist(), old.tolist()))
        torch.testing.assert_close(expected, dump["advantages"][row], atol=1e-3, rtol=1e-3)
        # on-policy: the PPO ratio is 1, its gradient that of the log-prob; mean over tokens, then over responses
        loss = loss - ((log_probs - old).exp() * expected).mean() / rows
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm().item()
    assert four[mode].steps()[0]["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
