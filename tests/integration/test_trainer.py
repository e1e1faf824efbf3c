"""The trainer's one override, on batches held in memory: alignment, checks, and what is written back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

pytestmark = pytest.mark.integration


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Queue:
    """A TransferQueue in a dictionary: what the trainer reads and writes."""

    def __init__(self, fields: dict[str, torch.Tensor]) -> None:
        self.fields = fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        chosen = {name: self.fields[name] for name in select_fields if name in self.fields}
        data = TensorDict(chosen, batch_size=len(keys))
        if "uid" in select_fields:
            data["uid"] = NonTensorStack(*[key.split("_")[0] for key in keys])
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> Any:
        self.fields.update({name: fields[name] for name in fields.keys()})
        return SimpleNamespace(keys=keys, partition_id=partition_id)


class Batch(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.keys)


def position_batch(prompts: list[int], responses: list[int]) -> dict[str, torch.Tensor]:
    """A batch whose teacher log-prob encodes where it stands: row * 1 + position of the scored token in the sequence * 1e-3.

    verl's server writes entry p for token p + 1 and a dummy last.
    """
    teacher, ids, sampled = [], [], []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = torch.arange(prompt + response) + 100 * row + 7
        scores = torch.tensor([-(row + 1) - position * 1e-3 for position in range(1, prompt + response)] + [0.0])
        teacher.append(scores[:, None])
        ids.append(torch.cat([tokens[1:], torch.zeros(1, dtype=torch.long)])[:, None].int())
        sampled.append(tokens[prompt:])
    ones = [torch.ones(response, dtype=torch.long) for response in responses]
    return {
        "teacher_logprobs": nested(teacher),
        "teacher_ids": nested(ids),
        "responses": nested(sampled),
        "response_mask": nested(ones),
        "old_log_probs": nested([torch.full((response,), -1.5) for response in responses]),
        "rm_scores": nested([torch.full((response,), float(row) / response) for row, response in enumerate(responses)]),
        "advantages": nested(
            [torch.full((response,), 1.0 if row % 2 == 0 else -1.0) for row, response in enumerate(responses)]
        ),
    }


PROMPTS, RESPONSES = [3, 9, 1, 5], [4, 1, 6, 2]


def test_teacher_entry_of_each_response_token_is_picked(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.server import align_teacher_log_probs

    fields = position_batch(PROMPTS, RESPONSES)
    aligned = align_teacher_log_probs(
        *(fields[name] for name in ("teacher_logprobs", "teacher_ids", "responses", "response_mask"))
    )
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        # response token t stands at position prompt + t of the sequence
        expected = torch.tensor([-(row + 1) - (prompt + t) * 1e-3 for t in range(response)])
        torch.testing.assert_close(aligned.unbind()[row], expected)


def test_any_split_of_the_batch_gives_the_same_alignment(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.server import align_teacher_log_probs

    names = ("teacher_logprobs", "teacher_ids", "responses", "response_mask")
    whole = align_teacher_log_probs(*(position_batch(PROMPTS, RESPONSES)[name] for name in names)).unbind()
    fields = position_batch(PROMPTS, RESPONSES)
    for rows in ([0, 1], [2, 3], [1], [3, 0]):
        part = align_teacher_log_probs(
            *(nested([fields[name].unbind()[row] for row in rows]) for name in names)
        ).unbind()
        for got, row in zip(part, rows, strict=True):
            assert torch.equal(got, whole[row])


def test_another_token_than_the_sampled_one_is_an_error(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.server import align_teacher_log_probs

    fields = position_batch(PROMPTS, RESPONSES)
    fields["teacher_ids"].values()[3 - 1 + 2] += 1  # row 0, third response token
    with pytest.raises(ValueError, match=r"scored token id 13 where the student sampled 12 \(response 0; 1 of 13"):
        align_teacher_log_probs(
            *(fields[name] for name in ("teacher_logprobs", "teacher_ids", "responses", "response_mask"))
        )


def test_placeholder_zeros_are_an_error(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.server import PLACEHOLDER_TOKENS, align_teacher_log_probs

    names = ("teacher_logprobs", "teacher_ids", "responses", "response_mask")
    fields = position_batch([2, 2], [PLACEHOLDER_TOKENS, PLACEHOLDER_TOKENS - 1])
    fields["teacher_logprobs"].values().zero_()
    with pytest.raises(ValueError, match=r"response\(s\) \[0\] are all exactly 0"):
        align_teacher_log_probs(*(fields[name] for name in names))


def run_advantage(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, torch.Tensor],
    node: dict[str, Any],
    keys: list[str] | None = None,
) -> tuple[Queue, dict]:
    """Run ``DistilledRLTrainer._compute_advantage`` on ``fields`` (verl's own part, which needs Ray, left out)."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from distilled_rl import trainer as module
    from distilled_rl.config import DistilledRLConfig
    from distilled_rl.methods import get_method
    from distilled_rl.teacher import scoring
    from distilled_rl.teacher.specs import TeacherSpec

    queue = Queue(fields)
    for place in (module, scoring):
        monkeypatch.setattr(place, "tq", queue)
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer = object.__new__(module.DistilledRLTrainer)
    trainer.settings = DistilledRLConfig.from_dict({"score": "all", **node})
    trainer.method = get_method(trainer.settings.mode)
    trainer.global_steps, trainer.actor_rollout_wg = 1, None
    trainer.teachers = (TeacherSpec(key=None, where="teacher", name="t", source="server", model="org/t"),)
    trainer.config = OmegaConf.create({"algorithm": {"use_kl_in_reward": False}})
    keys = keys or [f"uid{row}_0_0" for row in range(fields["advantages"].size(0))]
    metrics: dict[str, float] = {}
    batch = Batch(keys=keys, partition_id="train", tags=[{"seq_len": 10} for _ in keys])
    trainer._compute_advantage(batch, metrics)  # type: ignore[arg-type]
    return queue, metrics


def test_written_advantages_are_the_methods(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = position_batch(PROMPTS, RESPONSES)
    queue, metrics = run_advantage(monkeypatch, fields, {"mode": "opd", "teacher_coef": 2.0})
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = torch.tensor([2.0 * (-(row + 1) - (prompt + t) * 1e-3 + 1.5) for t in range(response)])
        torch.testing.assert_close(queue.fields["advantages"].unbind()[row], expected)
    assert metrics["teacher/kl_k1"] == pytest.approx(
        sum(
            (row + 1) + (p + t) * 1e-3 - 1.5
            for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
            for t in range(r)
        )
        / 13
    )


def test_another_teacher_gives_another_update(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = position_batch(PROMPTS, RESPONSES)
    two = position_batch(PROMPTS, RESPONSES)
    two["teacher_logprobs"] = nested(
        [row - 0.3 * torch.arange(len(row))[:, None] for row in two["teacher_logprobs"].unbind()]
    )
    first, _ = run_advantage(monkeypatch, one, {"mode": "distilled_rl"})
    second, _ = run_advantage(monkeypatch, two, {"mode": "distilled_rl"})
    assert not torch.equal(first.fields["advantages"].values(), second.fields["advantages"].values())


def test_teacher_equal_to_old_policy_leaves_advantages_bit_equal(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = position_batch(PROMPTS, RESPONSES)
    old = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        old.append(fields["teacher_logprobs"].unbind()[row][prompt - 1 : prompt - 1 + response, 0])
    fields["old_log_probs"] = nested(old)
    before = fields["advantages"].values().clone()
    queue, metrics = run_advantage(monkeypatch, fields, {"mode": "distilled_rl", "apply_to": "all"})
    assert torch.equal(queue.fields["advantages"].values(), before)
    assert metrics["rho/w_min"] == metrics["rho/w_max"] == 1.0


def test_padding_rows_of_verl_change_nothing(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # verl pads a batch with rows of one masked token and teacher zeros (verl/trainer/ppo/padding_utils.py:95)
    fields = position_batch(PROMPTS, RESPONSES)
    plain, _ = run_advantage(monkeypatch, dict(fields), {"mode": "distilled_rl"})
    padded = {name: list(value.unbind()) for name, value in position_batch(PROMPTS, RESPONSES).items()}
    padded["teacher_logprobs"].append(torch.zeros(128, 1))
    padded["teacher_ids"].append(torch.full((128, 1), 5, dtype=torch.int32))
    padded["responses"].append(torch.tensor([5]))
    padded["response_mask"].append(torch.tensor([0]))
    padded["old_log_probs"].append(torch.tensor([float("nan")]))
    padded["advantages"].append(torch.tensor([0.0]))
    padded["rm_scores"].append(torch.tensor([0.0]))
    queue, metrics = run_advantage(monkeypatch, {k: nested(v) for k, v in padded.items()}, {"mode": "distilled_rl"})
    assert torch.equal(queue.fields["advantages"].values()[:-1], plain.fields["advantages"].values())
    assert queue.fields["advantages"].values()[-1] == 0
    assert metrics["rho/empty_responses"] == 1


def test_missing_teacher_field_is_named(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = position_batch(PROMPTS, RESPONSES)
    del fields["teacher_ids"]
    with pytest.raises(ValueError, match="lacks teacher_ids"):
        run_advantage(monkeypatch, fields, {"mode": "opd"})


def test_lengths_that_differ_are_an_error(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = position_batch(PROMPTS, RESPONSES)
    fields["old_log_probs"] = nested([torch.zeros(length) for length in [4, 2, 5, 2]])
    with pytest.raises(ValueError, match="other lengths"):
        run_advantage(monkeypatch, fields, {"mode": "opd"})


def test_dump_holds_the_rows(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields = position_batch(PROMPTS, RESPONSES)
    fields["prompts"] = nested([torch.arange(length) for length in PROMPTS])
    run_advantage(monkeypatch, fields, {"mode": "distilled_rl", "dump_dir": str(tmp_path), "dump_steps": [1]})
    dump = torch.load(tmp_path / "step_1.pt", weights_only=True)
    assert [len(row) for row in dump["responses"]] == RESPONSES
    assert torch.equal(torch.cat(dump["advantages"]), fields["advantages"].values())


def test_estimator_follows_norm_adv_by_std(verl_on_cpu: None) -> None:
    import numpy as np
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    mask, index = torch.ones(2, 2), np.array(["a", "a"], dtype=object)
    estimator = get_adv_estimator_fn("distilled_rl")
    plain, _ = estimator(
        token_level_rewards=rewards, response_mask=mask, index=index, config=AlgoConfig(norm_adv_by_std_in_grpo=False)
    )
    assert plain.tolist() == [[0.5, 0.5], [-0.5, -0.5]]  # 1 - mean .5
    scaled, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=index, config=AlgoConfig())
    assert scaled[0, 0].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-6))  # unbiased std of {0, 1} is sqrt(1/2)


def test_zero_variance_group_has_advantage_zero_and_weight_one(verl_on_cpu: None) -> None:
    import numpy as np
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from distilled_rl.objective import teacher_weights

    rewards, mask = torch.tensor([[0.0, 0.1]] * 8), torch.ones(8, 2)
    advantages, _ = get_adv_estimator_fn("distilled_rl")(
        token_level_rewards=rewards, response_mask=mask, index=np.array(["a"] * 8, dtype=object)
    )
    weights = teacher_weights(torch.full((8, 2), -0.1), torch.randn(8, 2) - 2, advantages, mask.bool())
    assert torch.equal(advantages, torch.zeros(8, 2))
    assert torch.equal(weights.w, torch.ones(8, 2))


def test_trainer_zeroes_and_counts_groups_of_one_reward(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # rows 0 and 1 share a prompt and a reward of .1 up to rounding; verl would divide the rounding by itself
    fields = position_batch(PROMPTS, RESPONSES)
    fields["rm_scores"] = nested(
        [torch.full((length,), value / length) for length, value in zip(RESPONSES, [0.1, 0.1, 0, 1], strict=True)]
    )
    queue, metrics = run_advantage(monkeypatch, fields, {"mode": "grpo"}, ["a_0_0", "a_1_0", "b_0_0", "b_1_0"])
    assert [set(row.tolist()) for row in queue.fields["advantages"].unbind()] == [{0.0}, {0.0}, {1.0}, {-1.0}]
    assert metrics["training/flat_reward_responses"] == 0.5
