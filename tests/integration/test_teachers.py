"""Teachers without Ray: which rows they are asked for, what a colocated one writes, and how its engine is configured."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from tests.integration.test_trainer import nested, position_batch

pytestmark = pytest.mark.integration

PROMPTS, RESPONSES = [3, 9, 1, 5, 2, 7, 4, 6], [4, 1, 6, 2, 3, 3, 5, 2]
TEACHER_FIELDS = ("teacher_logprobs", "teacher_ids")


class KeyedQueue:
    """A TransferQueue in memory, row by row: a field can be there for some rows only, and reading the others fails."""

    def __init__(self, keys: list[str], fields: dict[str, torch.Tensor]) -> None:
        self.rows = {key: {name: field.unbind()[row] for name, field in fields.items()} for row, key in enumerate(keys)}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        data = TensorDict(
            {name: nested([self.rows[key][name] for key in keys]) for name in select_fields if name != "uid"},
            batch_size=len(keys),
        )
        if "uid" in select_fields:
            data["uid"] = NonTensorStack(*[key.split("_")[0] for key in keys])
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> Any:
        from transfer_queue import KVBatchMeta

        for name in fields.keys():
            for key, row in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = row
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)


class CountingTeacher:
    """A worker group of ``ranks`` data-parallel ranks that writes known scores and remembers who was scored."""

    def __init__(self, queue: KeyedQueue, keys: list[str], fields: dict[str, torch.Tensor], ranks: int) -> None:
        self.queue, self.ranks = queue, ranks
        self.known = {
            key: {name: fields[name].unbind()[row] for name in TEACHER_FIELDS} for row, key in enumerate(keys)
        }
        self.calls: list[Any] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh in ("teacher", "actor")
        return list(range(self.ranks))

    def compute_teacher_log_prob(self, part: Any) -> None:
        self.calls.append(part)
        for key in part.keys:
            self.queue.rows[key].update(self.known[key])

    def compute_log_prob(self, part: Any) -> None:
        """The actor's own pass: log-probs over prompt and response, shifted left by one."""
        self.calls.append(part)
        for key in part.keys:
            self.queue.rows[key]["log_probs"] = self.known[key]["teacher_logprobs"].squeeze(-1)


class CountingServer:
    """A served teacher with the same scores: it is given token ids, not row names."""

    def __init__(self, fields: dict[str, torch.Tensor], sequences: list[torch.Tensor]) -> None:
        self.known = {
            tuple(sequence.tolist()): [fields[name].unbind()[row] for name in TEACHER_FIELDS]
            for row, sequence in enumerate(sequences)
        }
        self.asked: list[tuple[int, ...]] = []

    def score(self, sequences: list[torch.Tensor], routes: list[Any]) -> TensorDict:
        assert routes == [None] * len(sequences)
        self.asked += [tuple(sequence.tolist()) for sequence in sequences]
        rows = [self.known[tuple(sequence.tolist())] for sequence in sequences]
        return TensorDict(
            {name: nested([row[number] for row in rows]) for number, name in enumerate(TEACHER_FIELDS)},
            batch_size=len(sequences),
        )


def run(
    monkeypatch: pytest.MonkeyPatch,
    node: dict[str, Any],
    signs: list[float],
    ranks: int = 1,
    score: str = "needed",
    dynamic: bool = False,
    served: bool = False,
    source: str = "colocated",
) -> tuple[torch.Tensor, Any, dict, list[str]]:
    """Return final advantages [N], the teacher, the metrics, and the rows' names, for advantages of these signs."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from distilled_rl import trainer as module
    from distilled_rl.config import DistilledRLConfig
    from distilled_rl.methods import get_method
    from distilled_rl.teacher import scoring

    fields = position_batch(PROMPTS, RESPONSES)
    fields["advantages"] = nested([torch.full((n,), sign) for n, sign in zip(RESPONSES, signs, strict=True)])
    keys = [f"uid{row}_0_0" for row in range(len(RESPONSES))]
    queue = KeyedQueue(keys, {name: field for name, field in fields.items() if name not in TEACHER_FIELDS})
    sequences = [torch.arange(p + n) + 100 * row + 7 for row, (p, n) in enumerate(zip(PROMPTS, RESPONSES, strict=True))]
    teacher: Any = CountingServer(fields, sequences) if served else CountingTeacher(queue, keys, fields, ranks)
    for row, key in enumerate(keys):
        queue.rows[key]["input_ids"] = sequences[row]
        if served and score == "all":  # the agent loops have asked
            queue.rows[key] |= {name: fields[name].unbind()[row] for name in TEACHER_FIELDS}
    for place in (module, scoring):
        monkeypatch.setattr(place, "tq", queue)
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer = object.__new__(module.DistilledRLTrainer)
    trainer.settings = DistilledRLConfig.from_dict({"score": score, **node})
    trainer.method = get_method(trainer.settings.mode)
    trainer.global_steps, trainer.actor_rollout_wg = 1, teacher
    trainer.teacher_source = "server" if served else source
    rollout = {
        "temperature": 0.6,
        "log_prob_use_dynamic_bsz": dynamic,
        "log_prob_micro_batch_size_per_gpu": 2,
    }
    trainer.config = OmegaConf.create(
        {
            "algorithm": {"use_kl_in_reward": True},
            "teacher": {"temperature": 0.5},
            "actor_rollout_ref": {"rollout": rollout},
            "distillation": {"teacher_models": {"teacher_model": {}}, "teacher_key": "data_source"},
        }
    )
    trainer.scorer._server = teacher if served else None
    tags = [{"seq_len": prompt + response} for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    metrics: dict[str, float] = {}
    trainer._compute_advantage(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), metrics)
    return torch.cat([queue.rows[key]["advantages"] for key in keys]), teacher, metrics, keys


SIGNS = [1.0, -1.0, 0.5, 0.0, -0.5, 2.0, -2.0, 0.0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("node", "needed"),
    [
        ({"mode": "distilled_rl"}, [0, 2, 5]),
        ({"mode": "distilled_rl", "apply_to": "negative"}, [1, 4, 6]),
        ({"mode": "distilled_rl", "apply_to": "all"}, [0, 1, 2, 4, 5, 6]),
        ({"mode": "opd"}, list(range(8))),
        ({"mode": "opd_rl", "teacher_coef": 0.3}, list(range(8))),
    ],
)
def test_exactly_the_needed_rows_are_scored_and_nothing_changes(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, node: dict, needed: list[int], ranks: int
) -> None:
    selective, teacher, metrics, keys = run(monkeypatch, node, SIGNS, ranks)
    [part] = teacher.calls
    assert part.keys[: len(needed)] == [keys[row] for row in needed]
    # more only to give each rank the same number, and no row twice
    assert len(part) == -(-len(needed) // ranks) * ranks and len(set(part.keys)) == len(part)
    assert metrics["teacher/scored_responses"] == len(needed) / 8
    assert metrics["teacher/scored_tokens"] == sum(PROMPTS[row] + RESPONSES[row] for row in needed)
    everything, teacher, _, _ = run(monkeypatch, node, SIGNS, ranks, score="all")
    assert len(teacher.calls[0]) == 8
    assert torch.equal(selective, everything)


@pytest.mark.parametrize("node", [{"mode": "distilled_rl"}, {"mode": "opd"}, {"mode": "opd_rl", "teacher_coef": 0.3}])
def test_the_student_at_another_temperature_is_one_more_actor_pass(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, node: dict
) -> None:
    by_student, teacher, metrics, _ = run(monkeypatch, node, SIGNS, source="temperature")
    [part] = teacher.calls
    assert part.extra_info["temperature"] == 0.5 and metrics["teacher/scored_responses"] == len(part) / 8
    by_teacher, *_ = run(monkeypatch, node, SIGNS)  # the same numbers from a teacher
    assert torch.equal(by_student, by_teacher)


@pytest.mark.parametrize(
    ("node", "needed"),
    [({"mode": "distilled_rl"}, [0, 2, 5]), ({"mode": "distilled_rl", "apply_to": "negative"}, [1, 4, 6])],
)
def test_servers_are_asked_for_exactly_the_needed_rows(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, node: dict, needed: list[int]
) -> None:
    selective, teacher, metrics, _ = run(monkeypatch, node, SIGNS, served=True)
    assert [sequence[0] for sequence in teacher.asked] == [100 * row + 7 for row in needed]
    assert metrics["teacher/scored_responses"] == len(needed) / 8
    everything, teacher, metrics, _ = run(monkeypatch, node, SIGNS, served=True, score="all")
    assert teacher.asked == [] and metrics["teacher/scored_responses"] == 1
    assert torch.equal(selective, everything)


def test_a_method_that_uses_every_row_leaves_the_asking_to_the_agent_loops(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distilled_rl import trainer as module
    from distilled_rl.config import DistilledRLConfig
    from distilled_rl.methods import get_method

    trainer = object.__new__(module.DistilledRLTrainer)
    for mode, selective in (("grpo", False), ("opd", False), ("opd_rl", False), ("distilled_rl", True)):
        trainer.method, trainer.settings = get_method(mode), DistilledRLConfig.from_dict({"mode": mode})
        assert trainer.selective == selective


def test_a_server_that_fails_is_named(verl_on_cpu: None) -> None:
    from types import SimpleNamespace

    from distilled_rl.teacher.server import ServedTeacher

    async def fail(**_: Any) -> None:
        raise ConnectionError("HTTP 500")

    teacher = object.__new__(ServedTeacher)
    teacher._manager = SimpleNamespace(  # type: ignore[assignment]
        compute_teacher_logprobs_single=fail,
        teacher_model_configs={"teacher_model": SimpleNamespace(model_path="org/teacher")},
    )
    with pytest.raises(RuntimeError, match="the teacher server of org/teacher failed: HTTP 500"):
        teacher.score([torch.tensor([1, 2])], [None])


def test_a_batch_without_a_needed_row_asks_nobody(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    advantages, teacher, metrics, _ = run(monkeypatch, {"mode": "distilled_rl"}, [-1.0, 0.0] * 4)
    assert teacher.calls == [] and metrics["teacher/scored_responses"] == 0 and metrics["teacher/kl_k1"] == 0
    assert torch.equal(
        advantages, torch.cat([torch.full((n,), sign) for n, sign in zip(RESPONSES, [-1.0, 0.0] * 4, strict=True)])
    )


@pytest.mark.parametrize(("ranks", "share", "micro"), [(1, 3, 1), (2, 2, 2), (4, 1, 1)])
def test_the_engine_is_told_a_micro_batch_that_divides_its_rows(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, ranks: int, share: int, micro: int
) -> None:
    _, teacher, _, _ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS, ranks)
    [part] = teacher.calls
    assert len(part) // ranks == share and part.extra_info["micro_batch_size_per_gpu"] == micro
    assert part.extra_info["temperature"] == 0.6 and not part.extra_info["calculate_entropy"]
    _, teacher, _, _ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS, ranks, dynamic=True)
    assert "micro_batch_size_per_gpu" not in teacher.calls[0].extra_info


def test_rows_that_are_not_scored_hold_no_number(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, teacher, _, keys = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS)
    for row, key in enumerate(keys):
        written = teacher.queue.rows[key]["teacher_logprobs"]
        assert written.shape == (PROMPTS[row] + RESPONSES[row], 1)
        assert written.isnan().all() == (key not in teacher.calls[0].keys)


def test_fields_are_those_of_verls_server(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.colocated import server_fields
    from distilled_rl.teacher.server import align_teacher_log_probs

    rows = [torch.tensor([11, 12, 13, 14]), torch.tensor([21, 22]), torch.tensor([31, 32, 33])]
    # entry p of the engine's output belongs to token p + 1; its last one to no token
    engine = nested([-torch.arange(1, len(row) + 1).float() - 10 * number for number, row in enumerate(rows)])
    fields = server_fields(engine, nested(rows))
    assert fields["teacher_ids"].dtype == torch.int32 and fields["teacher_logprobs"].dtype == torch.float32
    assert [row.flatten().tolist() for row in fields["teacher_ids"].unbind()] == [[12, 13, 14, 0], [22, 0], [32, 33, 0]]
    assert [row.flatten().tolist() for row in fields["teacher_logprobs"].unbind()] == [
        [-1, -2, -3, 0],
        [-11, 0],
        [-21, -22, 0],
    ]
    responses = nested([rows[0][2:], rows[1][1:], rows[2][1:]])
    aligned = align_teacher_log_probs(
        fields["teacher_logprobs"], fields["teacher_ids"], responses, nested([torch.ones(len(r)) for r in responses])
    )
    assert [row.tolist() for row in aligned.unbind()] == [[-2, -3], [-11], [-21, -22]]


def test_the_engine_is_frozen_and_of_the_teachers_model_and_dtype(verl_on_cpu: None, tmp_path: Any) -> None:
    from distilled_rl.config import COLOCATED_NODE
    from distilled_rl.miniature.models import new_model, save_model
    from distilled_rl.miniature.tokenizer import save_tokenizer
    from distilled_rl.recipe import compose
    from distilled_rl.teacher.colocated import training_config

    for name in ("student", "teacher"):
        save_model(new_model(name, seed=1), tmp_path / name)
        save_tokenizer(tmp_path / name)
    config = compose(
        "distilled_rl",
        [
            *("scale=cpu", "student=local", "teacher=colocated", "dataset=miniature"),
            *(f"student.model={tmp_path}/student", f"teacher.model={tmp_path}/teacher", "teacher.dtype=bf16"),
        ],
    )
    node = config.actor_rollout_ref
    OmegaConf.set_struct(node, False)
    node[COLOCATED_NODE] = config.teacher
    typed = training_config(node)
    assert typed.engine_config.forward_only and typed.engine_config.model_dtype == "bf16"
    assert typed.engine_config.strategy == "fsdp2"
    assert typed.engine_config.infer_micro_batch_size_per_gpu == node.rollout.log_prob_micro_batch_size_per_gpu
    assert typed.model_config.hf_config.hidden_size == 96 and typed.model_config.path == f"{tmp_path}/teacher"
    assert node.model.path == f"{tmp_path}/student"
