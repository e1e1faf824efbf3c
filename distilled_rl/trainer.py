"""The trainer ``distilled_rl``: verl's synchronous trainer with the advantages handed through a method.

It holds no formula: it calls ``super()``, reads the fields of one batch, lets :mod:`distilled_rl.methods` change the
advantages, and writes them back. ``trainer.v1.trainer_mode=distilled_rl`` selects it.
"""

import gc
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from distilled_rl.config import COLOCATED_MESH, COLOCATED_NODE, TRAINER_MODE, DistilledRLConfig
from distilled_rl.diagnostics import teacher_metrics
from distilled_rl.estimator import flat_groups
from distilled_rl.methods import TeacherBatch, every_token, get_method
from distilled_rl.teacher.server import ServedTeacher, align_teacher_log_probs

logger = logging.getLogger(__name__)


@register_trainer(TRAINER_MODE)
class DistilledRLTrainer(PPOTrainerSync):
    """verl's ``PPOTrainerSync`` for the four modes."""

    def __init__(self, config: DictConfig) -> None:
        self.settings = DistilledRLConfig.from_config(config)
        self.method = get_method(self.settings.mode)
        # verl compares trainer_mode with the literal "sync" (verl/trainer/ppo/v1/trainer_base.py:153,731,902,912,1004,1499);
        # any other value gets the asynchronous replay buffer.
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        self._served_teacher: ServedTeacher | None = None
        self.teacher_source: str = OmegaConf.select(config, "teacher.source") or "server"
        super().__init__(config)
        if self.method.needs_teacher and not (
            self.use_teacher_policy or self.teacher_source in ("colocated", "temperature")
        ):
            raise ValueError(
                f"mode {self.method.name!r} needs a teacher, but distillation.enabled is false and teacher.source is "
                f"{self.teacher_source}: no teacher would be started"
            )
        # verl/trainer/ppo/v1/replay_buffer.py:144 polls every 2 s, which dominates a short step.
        self.replay_buffer.poll_interval = self.settings.poll_interval

    def _init_resource_pool_mgr(self) -> None:
        """Give the hybrid worker a teacher when it is to be colocated."""
        super()._init_resource_pool_mgr()
        if self.teacher_source != "colocated":
            return
        # Imported here: the module pulls in verl's workers.
        from distilled_rl.teacher.colocated import ColocatedTeacherWorker

        with open_dict(self.config.actor_rollout_ref):
            self.config.actor_rollout_ref[COLOCATED_NODE] = self.config.teacher
        [role] = {Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys()
        self.role_worker_mapping[role] = ray.remote(ColocatedTeacherWorker)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        """Fetch prompts, named by step and position instead of at random when the run is to be reproducible."""
        batch = super()._next_train_batch(num_prompts)
        if self.settings.reproducible:
            uids = [f"{self.global_steps:08d}-{position:06d}" for position in range(len(batch))]
            batch["uid"] = tu.get_tensordict({"uid": np.array(uids, dtype=object)})["uid"]  # type: ignore[arg-type]
        return batch

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Train; the agent loops are told the sampling seed and whether the method needs the teacher."""
        # Imported here: a worker unpickles a class of this module, which imports verl, whose import brings the trainer.
        from distilled_rl.rollout import SEED_KEY, TEACHER_KEY, DistilledRLAgentLoopManager

        if isinstance(agent_loop_manager, DistilledRLAgentLoopManager):
            agent_loop_manager.marks = {TEACHER_KEY: self.method.needs_teacher and not self.selective}
            if self.settings.reproducible:
                agent_loop_manager.marks[SEED_KEY] = self.settings.seed
        gc.collect()
        gc.freeze()  # what start-up left behind lives as long as the run; full collections need not walk it
        super().fit(agent_loop_manager)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Put rows in the order of their names first when the run is to be reproducible: they arrive as they finish."""
        if self.settings.reproducible:
            batch.reorder(sorted(range(len(batch.keys)), key=lambda row: _row_order(batch.keys[row])))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute verl's advantages, then apply the method to them, token by token, and log what it did."""
        batch = super()._compute_advantage(batch, metrics)
        batch = self._zero_flat_groups(batch, metrics)
        teacher: dict[str, torch.Tensor] = {}
        if self.method.needs_teacher:
            data = self._fetch(batch, [])
            mask: Any = data["response_mask"].bool()
            rows = self._rows_to_score(data["advantages"], mask)
            teacher_log_probs = self._teacher_log_probs(batch, data, rows)
            fields = TeacherBatch(
                teacher_log_probs=teacher_log_probs,
                old_log_probs=_same_layout(data["old_log_probs"], teacher_log_probs),
                advantages=_same_layout(data["advantages"], teacher_log_probs),
                mask=_same_layout(mask, teacher_log_probs),
            )
            advantages, method_metrics = self.method.apply(fields, self.settings.options)
            metrics.update(method_metrics)
            scored = _same_layout(mask, teacher_log_probs, mask.values() & _per_token(rows, mask))
            metrics.update(teacher_metrics(fields.teacher_log_probs, fields.old_log_probs, scored))
            metrics["teacher/scored_responses"] = rows.float().mean().item()
            batch = tq.kv_batch_put(
                keys=batch.keys,
                partition_id=batch.partition_id,
                fields=TensorDict({"advantages": advantages}, batch_size=len(batch)),
            )
            teacher = {"teacher_log_probs": teacher_log_probs}
        if self.global_steps in self.settings.dump_steps:
            self._dump(batch, teacher)
        return batch

    @property
    def selective(self) -> bool:
        """Whether only those responses are scored, after the advantages are known, that the method lets the teacher change."""
        method = self.method
        return self.settings.score == "needed" and method.needs_teacher and method.scores is not every_token

    def _rows_to_score(self, advantages: Any, mask: Any) -> torch.Tensor:
        """Return bool [B], the responses that the teacher scores."""
        if not self.selective:
            return torch.ones(len(advantages.offsets()) - 1, dtype=torch.bool)
        tokens = self.method.scores(advantages.values(), self.settings.options) & mask.values()
        return torch.stack([row.any() for row in tokens.split(advantages.offsets().diff().tolist())])

    def _teacher_log_probs(self, batch: KVBatchMeta, data: TensorDict, rows: torch.Tensor) -> torch.Tensor:
        """Return the teacher's log-probs of the sampled tokens, float32 nested [B, j]; the student's own, a ratio of 1, in
        the rows that are not scored."""
        keys = [batch.keys[row] for row in rows.nonzero().flatten().tolist()]
        old: Any = data["old_log_probs"]
        if not keys:
            return _same_layout(old, old, old.values().float())
        if self.teacher_source == "temperature":
            aligned: Any = self._score_by_student(batch, keys, _select(data["response_mask"], rows))
        else:
            aligned = self._score_by_teacher(batch, keys, data, rows)
        if len(keys) == len(batch.keys):
            return aligned
        values = old.values().float().clone()
        values[_per_token(rows, old)] = aligned.values()
        return _same_layout(old, old, values)

    def _score_by_student(self, batch: KVBatchMeta, keys: list[str], mask: torch.Tensor) -> torch.Tensor:
        """Have the actor score these rows once more, at the teacher's temperature."""
        part = self._part(batch, keys, "actor", self.config.teacher.temperature)
        self.actor_rollout_wg.compute_log_prob(part)
        got = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["log_probs"])
        self._require(got, ["log_probs"])
        return response_from_nested(got["log_probs"], mask).float()

    def _score_by_teacher(
        self, batch: KVBatchMeta, keys: list[str], data: TensorDict, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the aligned scores of these rows, asking the teacher where the agent loops have not."""
        if self.teacher_source == "colocated":
            self._score_colocated(batch, keys)
        if self.selective and self.teacher_source == "server":
            got = self._score_served(batch, keys)
        else:
            fields = ["teacher_logprobs", "teacher_ids"]
            got = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
            self._require(got, fields)
        return align_teacher_log_probs(
            got["teacher_logprobs"],
            got["teacher_ids"],
            _select(data["responses"], rows),
            _select(data["response_mask"], rows),
        )

    def _score_served(self, batch: KVBatchMeta, keys: list[str]) -> TensorDict:
        """Have the teacher servers score these rows."""
        if self._served_teacher is None:
            from distilled_rl.rollout import one_server_clients

            clients = one_server_clients(self.config, self.get_teacher_client() or {})
            self._served_teacher = ServedTeacher(self.config, clients)
        fields, several = ["input_ids"], len(self.config.distillation.teacher_models) > 1
        route = self.config.distillation.teacher_key
        data = tq.kv_batch_get(
            keys=keys, partition_id=batch.partition_id, select_fields=[*fields, route] if several else fields
        )
        self._require(data, fields)
        routes = list(data[route]) if several and route in data.keys() else [None] * len(keys)
        return self._served_teacher.score(data["input_ids"].unbind(), routes)

    def _score_colocated(self, batch: KVBatchMeta, keys: list[str]) -> None:
        """Have the colocated teacher score these rows; the others get fields without a number."""
        part = self._part(batch, keys, COLOCATED_MESH, self.config.actor_rollout_ref.rollout.temperature)
        self.actor_rollout_wg.compute_teacher_log_prob(part)
        scored = set(part.keys)
        lengths = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in scored}
        if lengths:  # every row of a batch has the same fields: not-a-number where nobody may read
            offsets = torch.tensor([0, *lengths.values()]).cumsum(0)
            total = int(offsets[-1])
            fields = {"teacher_logprobs": torch.full((total, 1), math.nan), "teacher_ids": torch.zeros(total, 1).int()}
            tq.kv_batch_put(
                keys=list(lengths),
                partition_id=batch.partition_id,
                fields=TensorDict(
                    {
                        name: torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
                        for name, values in fields.items()
                    },
                    batch_size=len(lengths),
                ),
            )

    def _zero_flat_groups(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Give groups whose rewards are all equal advantages of exactly 0, and count them."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid", "rm_scores", "advantages"]
        )
        scores = torch.stack([row.sum() for row in data["rm_scores"].unbind()])
        flat = flat_groups(scores, list(data["uid"]))
        metrics["training/flat_reward_responses"] = flat.float().mean().item()
        advantages = data["advantages"]
        rows = torch.repeat_interleave(flat, advantages.offsets().diff())
        if self.config.algorithm.use_kl_in_reward or not (advantages.values()[rows] != 0).any():
            return batch
        zeroed = _same_layout(advantages, advantages, torch.where(rows, 0.0, advantages.values()))
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"advantages": zeroed}, batch_size=len(batch)),
        )

    def _part(self, batch: KVBatchMeta, keys: list[str], mesh: str, temperature: float) -> KVBatchMeta:
        """Return these rows and, where the ranks of ``mesh`` need equal shares, a few more, with what an engine is told."""
        group = self.actor_rollout_wg
        ranks = max(group._query_dispatch_info(mesh)) + 1
        chosen = set(keys)
        others = (key for key in batch.keys if key not in chosen)
        # every batch is a multiple of the ranks, so there are enough
        part = batch.select_keys([*keys, *itertools.islice(others, -len(keys) % ranks)])
        rollout = self.config.actor_rollout_ref.rollout
        part.extra_info = {
            **(batch.extra_info or {}),
            "calculate_entropy": False,
            "compute_loss": False,
            "temperature": temperature,
        }
        if not rollout.log_prob_use_dynamic_bsz:
            share = len(part) // ranks
            limit = min(share, rollout.log_prob_micro_batch_size_per_gpu)
            part.extra_info["micro_batch_size_per_gpu"] = max(n for n in range(1, limit + 1) if share % n == 0)
        return part

    def _fetch(self, batch: KVBatchMeta, extra: list[str]) -> TensorDict:
        fields = ["response_mask", "responses", "old_log_probs", "advantages", *extra]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        self._require(data, fields)
        return data

    def _require(self, data: TensorDict, fields: list[str]) -> None:
        missing = [field for field in fields if field not in data.keys()]
        if missing:
            raise ValueError(
                f"step {self.global_steps}: the batch lacks {', '.join(missing)}; teacher fields come from the teacher, "
                "which must score every training response that the method needs"
            )

    def _dump(self, batch: KVBatchMeta, extra: dict[str, torch.Tensor]) -> None:
        """Write this step's tensors, from prompts to final advantages, as lists of unpadded rows."""
        fields = [
            "prompts",
            "responses",
            "response_mask",
            "old_log_probs",
            "rm_scores",
            "advantages",
            "rollout_log_probs",
        ]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {field: list(data[field].unbind()) for field in fields if field in data.keys()}
        rows |= {field: list(tensor.unbind()) for field, tensor in extra.items()}
        directory = Path(str(self.settings.dump_dir))
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"step": self.global_steps, "keys": list(batch.keys), **rows}, directory / f"step_{self.global_steps}.pt"
        )


def _per_token(rows: torch.Tensor, like: Any) -> torch.Tensor:
    """Return ``rows`` [B], one value per response, as [N], one per token of the nested tensor ``like``."""
    return torch.repeat_interleave(rows, like.offsets().diff())


def _select(tensor: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a nested [B, j] tensor for which ``rows``, bool [B], is True."""
    if rows.all():
        return tensor
    lengths = tensor.offsets().diff()[rows]
    return torch.nested.nested_tensor_from_jagged(
        tensor.values()[_per_token(rows, tensor)],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


def _row_order(key: str) -> tuple[str, int, int]:
    """Return the sort key of a row name ``{uid}_{session}_{output}`` (verl/trainer/ppo/v1/agent_loop_tq.py:200)."""
    uid, session, output = key.rsplit("_", 2)
    return uid, int(session), int(output)


def _same_layout(tensor: Any, like: Any, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return the nested ``tensor`` (or ``values`` in its shape) with the offsets object of ``like``: torch adds nested
    tensors only when they share it.

    Raises ``ValueError`` when the lengths differ.
    """
    if not torch.equal(tensor.offsets(), like.offsets()):
        raise ValueError(
            f"rows have other lengths: {tensor.offsets().diff().tolist()[:8]}… against {like.offsets().diff().tolist()[:8]}…"
        )
    return torch.nested.nested_tensor_from_jagged(
        tensor.values() if values is None else values,
        offsets=like.offsets(),
        min_seqlen=like._get_min_seqlen(),
        max_seqlen=like._get_max_seqlen(),
    )


# The sweep's trainer registers with this module; it needs the class above.
import distilled_rl.sweep  # noqa: E402, F401
