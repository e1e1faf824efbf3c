"""The trainer ``distilled_rl``: verl's synchronous trainer with the advantages handed through a method.

It holds no formula: it calls ``super()``, reads the fields of one batch, lets :mod:`distilled_rl.methods` change the
advantages, and writes them back. ``trainer.v1.trainer_mode=distilled_rl`` selects it.
"""

import functools
import gc
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from distilled_rl.config import COLOCATED_NODE, SKIP_KEY, TRAINER_MODE, DistilledRLConfig, skip_changes
from distilled_rl.diagnostics import teacher_metrics
from distilled_rl.estimator import flat_groups
from distilled_rl.jagged import per_token, same_layout
from distilled_rl.methods import TeacherBatch, every_token, get_method
from distilled_rl.teacher import vllm_server
from distilled_rl.teacher.scoring import BatchScorer, require
from distilled_rl.teacher.specs import teacher_specs

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
        self.teachers = teacher_specs(config)
        vllm_server.register()
        super().__init__(config)
        served = any(spec.source == "server" for spec in self.teachers)
        if self.method.needs_teacher and (not self.teachers or (served and not self.use_teacher_policy)):
            raise ValueError(
                f"mode {self.method.name!r} needs a teacher, but distillation.enabled is {self.use_teacher_policy} and the "
                f"teacher node names {', '.join(spec.name for spec in self.teachers) or 'none'}: no teacher would be started"
            )
        # verl/trainer/ppo/v1/replay_buffer.py:144 polls every 2 s, which dominates a short step.
        self.replay_buffer.poll_interval = self.settings.poll_interval

    def _init_resource_pool_mgr(self) -> None:
        """Put this package's worker in the place of verl's, with teachers in it when they are to be colocated."""
        super()._init_resource_pool_mgr()
        # Imported here: the modules pull in verl's workers.
        from distilled_rl.teacher.colocated import ColocatedTeacherWorker
        from distilled_rl.worker import DistilledRLWorker

        beside = {
            spec.name: {"model": spec.model, "dtype": spec.dtype}
            for spec in self.teachers
            if spec.source == "colocated"
        }
        with open_dict(self.config.actor_rollout_ref):
            self.config.actor_rollout_ref[COLOCATED_NODE] = beside
        [role] = {Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys()
        self.role_worker_mapping[role] = ray.remote(ColocatedTeacherWorker if beside else DistilledRLWorker)

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
            agent_loop_manager.marks = {TEACHER_KEY: self.asked_by_agent_loops}
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
            data = self._fetch(batch)
            mask: Any = data["response_mask"].bool()
            rows = self._rows_to_score(data["advantages"], mask)
            teacher_log_probs = self.scorer.log_probs(batch, data, rows, asked=self.asked_by_agent_loops)
            fields = TeacherBatch(
                teacher_log_probs=teacher_log_probs,
                old_log_probs=same_layout(data["old_log_probs"], teacher_log_probs),
                advantages=same_layout(data["advantages"], teacher_log_probs),
                mask=same_layout(mask, teacher_log_probs),
            )
            advantages, method_metrics = self.method.apply(fields, self.settings.options)
            metrics.update(method_metrics)
            scored = same_layout(mask, teacher_log_probs, mask.values() & per_token(rows, mask))
            metrics.update(teacher_metrics(fields.teacher_log_probs, fields.old_log_probs, scored))
            metrics["teacher/scored_responses"] = rows.float().mean().item()
            if len(self.teachers) > 1:
                metrics.update(self._metrics_by_teacher(batch, fields, mask, rows))
            metrics["teacher/scored_tokens"] = sum(
                tag["seq_len"] for tag, scored_row in zip(batch.tags, rows.tolist(), strict=True) if scored_row
            )
            batch = tq.kv_batch_put(
                keys=batch.keys,
                partition_id=batch.partition_id,
                fields=TensorDict({"advantages": advantages}, batch_size=len(batch)),
            )
            teacher = {"teacher_log_probs": teacher_log_probs}
        if self.global_steps in self.settings.dump_steps:
            self._dump(batch, teacher)
        return batch

    @functools.cached_property
    def scorer(self) -> BatchScorer:
        """Where the teacher's log-probs come from."""
        return BatchScorer(self.config, self.teachers, self.actor_rollout_wg, self._teacher_servers)

    def _teacher_servers(self) -> Mapping[str, Sequence[Any]]:
        """Return the handles of verl's teacher servers, by the teacher's key."""
        return {} if self.teacher_model_manager is None else self.teacher_model_manager.server_handles

    @property
    def selective(self) -> bool:
        """Whether only those responses are scored, after the advantages are known, that the method lets the teacher change."""
        method = self.method
        return self.settings.score == "needed" and method.needs_teacher and method.scores is not every_token

    @property
    def asked_by_agent_loops(self) -> bool:
        """Whether the agent loops ask the teacher for each response as it is finished, while others are still generated.

        They hand verl's servers the tokens that the student read and wrote; anything else is the trainer's to ask, later. So are
        several teachers: verl looks a server up by the data column's raw value (verl/experimental/agent_loop/agent_loop.py:1043),
        and a column of whole numbers would find none.
        """
        plain = len(self.teachers) == 1 and all(
            spec.source == "server" and spec.reads_what_the_student_wrote for spec in self.teachers
        )
        return self.method.needs_teacher and plain and not self.selective

    def _metrics_by_teacher(
        self, batch: KVBatchMeta, fields: TeacherBatch, mask: Any, rows: torch.Tensor
    ) -> dict[str, float]:
        """Return the teacher's metrics apart for each of several, ``teacher/NAME/...``, over the rows that it scored."""
        owners, metrics = self.scorer.teachers_of(batch), {}
        for spec in self.teachers:
            mine = torch.tensor([owner is spec for owner in owners])
            scored = same_layout(mask, fields.mask, mask.values() & per_token(rows & mine, mask))
            for key, value in teacher_metrics(fields.teacher_log_probs, fields.old_log_probs, scored).items():
                metrics[key.replace("teacher/", f"teacher/{spec.name}/", 1)] = value
            metrics[f"teacher/{spec.name}/responses"] = mine.float().mean().item()
            metrics[f"teacher/{spec.name}/scored_responses"] = (rows & mine).float().mean().item()
        return metrics

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Update the actor, leaving out responses that cannot change it where the run skips them."""
        skip = self.settings.skip_zero_advantage
        batch.extra_info[SKIP_KEY] = skip_changes(self.config) is None if skip is None else skip
        return super()._update_actor(batch, metrics)

    def _rows_to_score(self, advantages: Any, mask: Any) -> torch.Tensor:
        """Return bool [B], the responses that the teacher scores."""
        if not self.selective:
            return torch.ones(len(advantages.offsets()) - 1, dtype=torch.bool)
        tokens = self.method.scores(advantages.values(), self.settings.options) & mask.values()
        return torch.stack([row.any() for row in tokens.split(advantages.offsets().diff().tolist())])

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
        zeroed = same_layout(advantages, advantages, torch.where(rows, 0.0, advantages.values()))
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"advantages": zeroed}, batch_size=len(batch)),
        )

    def _fetch(self, batch: KVBatchMeta) -> TensorDict:
        fields = ["response_mask", "responses", "old_log_probs", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        require(data, fields)
        return data

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


def _row_order(key: str) -> tuple[str, int, int]:
    """Return the sort key of a row name ``{uid}_{session}_{output}`` (verl/trainer/ppo/v1/agent_loop_tq.py:200)."""
    uid, session, output = key.rsplit("_", 2)
    return uid, int(session), int(output)


# The sweep's trainer registers with this module; it needs the class above.
import distilled_rl.sweep  # noqa: E402, F401
