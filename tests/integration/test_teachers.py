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


def sequence(row: int) -> torch.Tensor:
    """Prompt and response of a row: ids that tell which row it is and where they stand."""
    return torch.arange(PROMPTS[row] + RESPONSES[row]) + 100 * row + 7


def row_of(ids: torch.Tensor) -> int:
    return (int(ids[0]) - 7) // 100


class CountingTeacher:
    """A worker group of ``ranks`` data-parallel ranks that returns known scores and remembers what it was given."""

    def __init__(self, scores: list[torch.Tensor], ranks: int) -> None:
        self.scores, self.ranks = scores, ranks
        self.calls: list[Any] = []
        self.rows: list[list[int]] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh in ("teacher", "actor")
        return list(range(self.ranks))

    def compute_teacher_log_prob(self, part: Any) -> TensorDict:
        """An engine's log-probs over prompt and response, shifted left by one; the last entry is of no token."""
        self.calls.append(part)
        rows = [row_of(ids) for ids in part["input_ids"].unbind()]
        for row, ids, positions in zip(rows, part["input_ids"].unbind(), part["position_ids"].unbind(), strict=True):
            assert torch.equal(ids, sequence(row)) and positions.tolist() == list(range(len(ids)))
        self.rows.append(rows)
        return TensorDict({"log_probs": nested([self.scores[row] for row in rows])}, batch_size=len(rows))

    compute_log_prob = compute_teacher_log_prob  # the actor's own pass


class CountingServer:
    """A served teacher with the same scores."""

    def __init__(self, scores: list[torch.Tensor]) -> None:
        self.scores = scores
        self.rows: list[list[int]] = []

    def score(self, sequences: list[torch.Tensor]) -> TensorDict:
        from distilled_rl.teacher.server import server_fields

        self.rows.append([row_of(ids) for ids in sequences])
        return server_fields(nested([self.scores[row] for row in self.rows[-1]]), nested(sequences))


def setting(tensordict: Any, key: str, default: Any = None) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(tensordict, key, default)


def run(
    monkeypatch: pytest.MonkeyPatch,
    node: dict[str, Any],
    signs: list[float],
    ranks: int = 1,
    score: str = "needed",
    dynamic: bool = False,
    source: str = "colocated",
) -> tuple[torch.Tensor, Any, dict]:
    """Return final advantages [N], the teacher, and the metrics, for advantages of these signs."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from distilled_rl import trainer as module
    from distilled_rl.config import DistilledRLConfig
    from distilled_rl.methods import get_method
    from distilled_rl.teacher import scoring
    from distilled_rl.teacher.specs import TeacherSpec

    fields = position_batch(PROMPTS, RESPONSES)
    fields["advantages"] = nested([torch.full((n,), sign) for n, sign in zip(RESPONSES, signs, strict=True)])
    scores = [row.squeeze(-1) for row in fields["teacher_logprobs"].unbind()]
    keys = [f"uid{row}_0_0" for row in range(len(RESPONSES))]
    asked = source == "server" and score == "all"  # by the agent loops
    queue = KeyedQueue(keys, {name: field for name, field in fields.items() if asked or name not in TEACHER_FIELDS})
    teacher: Any = CountingServer(scores) if source in ("server", "url") else CountingTeacher(scores, ranks)
    for row, key in enumerate(keys):
        queue.rows[key]["prompts"] = sequence(row)[: PROMPTS[row]]
    for place in (module, scoring):
        monkeypatch.setattr(place, "tq", queue)
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer = object.__new__(module.DistilledRLTrainer)
    trainer.settings = DistilledRLConfig.from_dict({"score": score, **node})
    trainer.method = get_method(trainer.settings.mode)
    trainer.global_steps, trainer.actor_rollout_wg = 1, teacher
    trainer.teachers = (
        TeacherSpec(key=None, where="teacher", name="t", source=source, model="org/t", temperature=0.5),
    )
    rollout = {"temperature": 0.6, "log_prob_use_dynamic_bsz": dynamic, "log_prob_micro_batch_size_per_gpu": 2}
    trainer.config = OmegaConf.create(
        {"algorithm": {"use_kl_in_reward": True}, "actor_rollout_ref": {"rollout": rollout}}
    )
    if isinstance(teacher, CountingServer):
        trainer.scorer._sources[None] = teacher
    tags = [{"seq_len": prompt + response} for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    metrics: dict[str, float] = {}
    trainer._compute_advantage(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), metrics)
    return torch.cat([queue.rows[key]["advantages"] for key in keys]), teacher, metrics


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
    selective, teacher, metrics = run(monkeypatch, node, SIGNS, ranks)
    [rows] = teacher.rows
    # a row comes again only to give each rank the same number
    assert sorted(set(rows)) == needed and len(rows) == -(-len(needed) // ranks) * ranks
    assert metrics["teacher/scored_responses"] == len(needed) / 8
    assert metrics["teacher/scored_tokens"] == sum(PROMPTS[row] + RESPONSES[row] for row in needed)
    everything, teacher, _ = run(monkeypatch, node, SIGNS, ranks, score="all")
    assert sorted(teacher.rows[0]) == list(range(8))
    assert torch.equal(selective, everything)


def test_ranks_get_about_the_same_number_of_tokens(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.scoring import dealt

    order = dealt([8, 1, 7, 2, 6, 3, 5, 4], 2)
    assert sorted(order) == list(range(8))
    shares = [sum([8, 1, 7, 2, 6, 3, 5, 4][row] for row in order[part : part + 4]) for part in (0, 4)]
    assert shares == [18, 18]
    assert dealt([5, 4, 3], 2) == [0, 2, 1, 2]  # the shortest fills up
    assert dealt([3], 4) == [0, 0, 0, 0]


@pytest.mark.parametrize("node", [{"mode": "distilled_rl"}, {"mode": "opd"}, {"mode": "opd_rl", "teacher_coef": 0.3}])
def test_the_student_at_another_temperature_is_one_more_actor_pass(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, node: dict
) -> None:
    by_student, teacher, metrics = run(monkeypatch, node, SIGNS, source="temperature")
    [part] = teacher.calls
    assert setting(part, "temperature") == 0.5 and metrics["teacher/scored_responses"] == len(part) / 8
    by_teacher, *_ = run(monkeypatch, node, SIGNS)  # the same numbers from a teacher
    assert torch.equal(by_student, by_teacher)


@pytest.mark.parametrize(
    ("node", "needed"),
    [({"mode": "distilled_rl"}, [0, 2, 5]), ({"mode": "distilled_rl", "apply_to": "negative"}, [1, 4, 6])],
)
def test_servers_are_asked_for_exactly_the_needed_rows(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, node: dict, needed: list[int]
) -> None:
    selective, teacher, metrics = run(monkeypatch, node, SIGNS, source="server")
    assert teacher.rows == [needed]
    assert metrics["teacher/scored_responses"] == len(needed) / 8
    everything, teacher, metrics = run(monkeypatch, node, SIGNS, source="server", score="all")
    assert teacher.rows == [] and metrics["teacher/scored_responses"] == 1
    assert torch.equal(selective, everything)


@pytest.mark.parametrize(("score", "rows"), [("needed", [0, 2, 5]), ("all", list(range(8)))])
def test_a_server_at_a_url_is_asked_by_the_trainer(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, score: str, rows: list[int]
) -> None:
    by_url, teacher, _ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS, source="url", score=score)
    assert teacher.rows == [rows]
    beside, *_ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS)
    assert torch.equal(by_url, beside)


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


def test_a_teacher_that_fails_is_named(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.scoring import WorkerGroupTeacher
    from distilled_rl.teacher.specs import TeacherSpec

    class Broken(CountingTeacher):
        def compute_teacher_log_prob(self, part: Any) -> TensorDict:
            raise torch.OutOfMemoryError("out of memory")

    spec = TeacherSpec(key=None, where="teacher", name="big", source="colocated", model="org/big")
    rollout = OmegaConf.create({"temperature": 1.0, "log_prob_use_dynamic_bsz": True})
    with pytest.raises(RuntimeError, match=r"the teacher big .colocated. failed: out of memory"):
        WorkerGroupTeacher(spec, Broken([], 1), rollout).score([sequence(0)])  # type: ignore[arg-type]


def test_a_batch_without_a_needed_row_asks_nobody(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    advantages, teacher, metrics = run(monkeypatch, {"mode": "distilled_rl"}, [-1.0, 0.0] * 4)
    assert teacher.calls == [] and metrics["teacher/scored_responses"] == 0 and metrics["teacher/kl_k1"] == 0
    assert torch.equal(
        advantages, torch.cat([torch.full((n,), sign) for n, sign in zip(RESPONSES, [-1.0, 0.0] * 4, strict=True)])
    )


@pytest.mark.parametrize(("ranks", "share", "micro"), [(1, 3, 1), (2, 2, 2), (4, 1, 1)])
def test_the_engine_is_told_a_micro_batch_that_divides_its_rows(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, ranks: int, share: int, micro: int
) -> None:
    _, teacher, _ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS, ranks)
    [part] = teacher.calls
    assert len(part) // ranks == share and setting(part, "micro_batch_size_per_gpu") == micro
    assert setting(part, "temperature") == 0.6 and not setting(part, "calculate_entropy", True)
    _, teacher, _ = run(monkeypatch, {"mode": "distilled_rl"}, SIGNS, ranks, dynamic=True)
    assert setting(teacher.calls[0], "micro_batch_size_per_gpu") is None


def several_specs() -> tuple[Any, ...]:
    from distilled_rl.teacher.specs import TeacherSpec

    return tuple(
        TeacherSpec(key=key, where=f"teacher.by_key.{key}", name=key, source="url", url="http://x")
        for key in ("algebra", "geometry")
    )


def several(monkeypatch: pytest.MonkeyPatch, column: list[str]) -> tuple[Any, Any, TensorDict]:
    """Return a scorer of two teachers, the batch, and its data, for this data column."""
    from transfer_queue import KVBatchMeta

    from distilled_rl.teacher import scoring

    fields = position_batch(PROMPTS, RESPONSES)
    keys = [f"uid{row}_0_0" for row in range(len(RESPONSES))]

    class Routed(KeyedQueue):
        def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
            if select_fields != ["subject"]:
                return super().kv_batch_get(keys, partition_id, select_fields)
            data = TensorDict(batch_size=len(keys))
            data["subject"] = NonTensorStack(*column)
            return data

    queue = Routed(keys, fields)
    for row, key in enumerate(keys):
        queue.rows[key]["prompts"] = sequence(row)[: PROMPTS[row]]
    monkeypatch.setattr(scoring, "tq", queue)
    config = OmegaConf.create({"teacher": {"key": "subject"}})
    scorer = scoring.BatchScorer(config, several_specs(), None, dict)
    batch = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    data = queue.kv_batch_get(keys, "train", ["responses", "response_mask", "old_log_probs"])
    return scorer, batch, data


def test_each_problem_goes_to_its_teacher(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    column = ["algebra", "geometry", "geometry", "algebra"] * 2
    scorer, batch, data = several(monkeypatch, column)
    fields = position_batch(PROMPTS, RESPONSES)
    scores = [row.squeeze(-1) for row in fields["teacher_logprobs"].unbind()]
    teachers = {"algebra": CountingServer(scores), "geometry": CountingServer([row - 1 for row in scores])}
    scorer._sources = dict(teachers)
    rows = torch.tensor([True, True, True, False, True, False, True, True])
    got = scorer.log_probs(batch, data, rows, asked=False).unbind()
    assert teachers["algebra"].rows == [[0, 4, 7]] and teachers["geometry"].rows == [[1, 2, 6]]
    for row, (p, n) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        own = torch.tensor([-(row + 1) - (p + t) * 1e-3 for t in range(n)]) - float(column[row] == "geometry")
        expected = own if rows[row] else data["old_log_probs"].unbind()[row]
        torch.testing.assert_close(got[row], expected)


def test_a_key_without_a_teacher_is_an_error_that_lists_the_known_ones(
    verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, batch, data = several(monkeypatch, ["algebra"] * 7 + ["poetry"])
    with pytest.raises(ValueError, match=r"subject .teacher.key. holds 'poetry'.*knows algebra, geometry"):
        scorer.log_probs(batch, data, torch.ones(8, dtype=torch.bool), asked=False)


def test_the_end_of_text_is_scored_as_the_teachers(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from distilled_rl.teacher.sequences import Reader, with_ends

    spec = dataclasses.replace(several_specs()[0], eos_map={5: 6, 6: 5})
    assert with_ends(torch.tensor([4, 5, 6]), spec.eos_map).tolist() == [4, 6, 5]  # all at once
    [read] = Reader(spec).responses([torch.tensor([1, 2, 5])])
    assert read.tolist() == [1, 2, 6]
    assert Reader(spec).prompts([torch.tensor([5, 1])], None)[0].tolist() == [5, 1]  # the prompt stays


def test_a_teacher_reads_the_messages_through_its_own_template(verl_on_cpu: None, tmp_path: Any) -> None:
    import dataclasses

    from distilled_rl.miniature.tokenizer import save_tokenizer
    from distilled_rl.teacher.sequences import Reader

    save_tokenizer(tmp_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    refuse_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuse_system + "{{ messages[-1]['content'] }}+"
    tokenizer.save_pretrained(tmp_path)
    spec = dataclasses.replace(several_specs()[0], prompt="own", model=str(tmp_path), name="templated")
    reader = Reader(spec)
    [prompt] = reader.prompts([], [[{"role": "user", "content": "1+2"}]])
    assert prompt.tolist() == tokenizer.encode("1+2+", add_special_tokens=False)
    with pytest.raises(ValueError, match=r"the chat template of the teacher templated .* refuses a prompt: no system"):
        reader.prompts([], [[{"role": "system", "content": "x"}]])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_no_number_for_a_live_token_is_an_error(verl_on_cpu: None, value: float) -> None:
    from distilled_rl.teacher.server import align_teacher_log_probs

    names = ("teacher_logprobs", "teacher_ids", "responses", "response_mask")
    fields = position_batch([3, 2], [4, 2])
    fields["teacher_logprobs"].values()[3 - 1 + 1] = value  # row 0, second response token
    with pytest.raises(ValueError, match=r"token id 11 is .*inf|token id 11 is nan"):
        align_teacher_log_probs(*(fields[name] for name in names))
    fields["response_mask"].values()[1] = 0  # not live
    align_teacher_log_probs(*(fields[name] for name in names))


def test_fields_are_those_of_verls_server(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.server import align_teacher_log_probs, server_fields

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
    node[COLOCATED_NODE] = {"t": config.teacher}
    typed = training_config(node, "t")
    assert typed.engine_config.forward_only and typed.engine_config.model_dtype == "bf16"
    assert typed.engine_config.strategy == "fsdp2"
    assert typed.engine_config.infer_micro_batch_size_per_gpu == node.rollout.log_prob_micro_batch_size_per_gpu
    assert typed.model_config.hf_config.hidden_size == 96 and typed.model_config.path == f"{tmp_path}/teacher"
    assert node.model.path == f"{tmp_path}/student"
