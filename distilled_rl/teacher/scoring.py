"""The teacher's log-probs of one batch, from wherever the teacher is: a server, the student's workers, or the student itself."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from distilled_rl.config import COLOCATED_MESH
from distilled_rl.jagged import per_token, same_layout, select_rows
from distilled_rl.teacher.server import ServedTeacher, align_teacher_log_probs


class BatchScorer:
    """Scores chosen rows of a batch.

    ``source``: server, colocated, or temperature. ``group``: verl's worker group of the actor. ``clients``: returns the
    clients of the teacher servers by key.
    """

    def __init__(
        self, config: DictConfig, source: str, group: Any, clients: Callable[[], dict[str, Any] | None]
    ) -> None:
        self._config, self._source, self._group, self._clients = config, source, group, clients
        self._server: ServedTeacher | None = None

    def log_probs(self, batch: KVBatchMeta, data: TensorDict, rows: torch.Tensor, asked: bool) -> torch.Tensor:
        """Return the teacher's log-probs of the sampled tokens, float32 nested [B, j]; the student's own, a ratio of 1, in
        the rows that are not scored.

        ``data``: ``responses``, ``response_mask``, and ``old_log_probs`` of the batch, nested [B, j]. ``rows``: bool [B], the
        responses to score. ``asked``: the agent loops have asked the server for every row. Raises ``ValueError`` for scores
        that are missing, of other tokens, or placeholders, and ``RuntimeError`` for a server that fails.
        """
        keys = [batch.keys[row] for row in rows.nonzero().flatten().tolist()]
        old: Any = data["old_log_probs"]
        if not keys:
            return same_layout(old, old, old.values().float())
        if self._source == "temperature":
            aligned: Any = self._score_by_student(batch, keys, select_rows(data["response_mask"], rows))
        else:
            aligned = self._score_by_teacher(batch, keys, data, rows, asked)
        if len(keys) == len(batch.keys):
            return aligned
        values = old.values().float().clone()
        values[per_token(rows, old)] = aligned.values()
        return same_layout(old, old, values)

    def _score_by_student(self, batch: KVBatchMeta, keys: list[str], mask: torch.Tensor) -> torch.Tensor:
        """Have the actor score these rows once more, at the teacher's temperature."""
        part = self._part(batch, keys, "actor", self._config.teacher.temperature)
        self._group.compute_log_prob(part)
        got = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["log_probs"])
        require(got, ["log_probs"])
        return response_from_nested(got["log_probs"], mask).float()

    def _score_by_teacher(
        self, batch: KVBatchMeta, keys: list[str], data: TensorDict, rows: torch.Tensor, asked: bool
    ) -> torch.Tensor:
        """Return the aligned scores of these rows, asking the teacher where the agent loops have not."""
        if self._source == "colocated":
            self._score_colocated(batch, keys)
        if self._source == "server" and not asked:
            got = self._score_served(batch, keys)
        else:
            fields = ["teacher_logprobs", "teacher_ids"]
            got = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
            require(got, fields)
        return align_teacher_log_probs(
            got["teacher_logprobs"],
            got["teacher_ids"],
            select_rows(data["responses"], rows),
            select_rows(data["response_mask"], rows),
        )

    def _score_served(self, batch: KVBatchMeta, keys: list[str]) -> TensorDict:
        """Have the teacher servers score these rows."""
        if self._server is None:
            from distilled_rl.rollout import one_server_clients

            clients = one_server_clients(self._config, self._clients() or {})
            self._server = ServedTeacher(self._config, clients)
        fields, several = ["input_ids"], len(self._config.distillation.teacher_models) > 1
        route = self._config.distillation.teacher_key
        data = tq.kv_batch_get(
            keys=keys, partition_id=batch.partition_id, select_fields=[*fields, route] if several else fields
        )
        require(data, fields)
        routes = list(data[route]) if several and route in data.keys() else [None] * len(keys)
        return self._server.score(data["input_ids"].unbind(), routes)

    def _score_colocated(self, batch: KVBatchMeta, keys: list[str]) -> None:
        """Have the colocated teacher score these rows; the others get fields without a number."""
        part = self._part(batch, keys, COLOCATED_MESH, self._config.actor_rollout_ref.rollout.temperature)
        self._group.compute_teacher_log_prob(part)
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

    def _part(self, batch: KVBatchMeta, keys: list[str], mesh: str, temperature: float) -> KVBatchMeta:
        """Return these rows and, where the ranks of ``mesh`` need equal shares, a few more, with what an engine is told."""
        group = self._group
        ranks = max(group._query_dispatch_info(mesh)) + 1
        chosen = set(keys)
        others = (key for key in batch.keys if key not in chosen)
        # every batch is a multiple of the ranks, so there are enough
        part = batch.select_keys([*keys, *itertools.islice(others, -len(keys) % ranks)])
        rollout = self._config.actor_rollout_ref.rollout
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


def require(data: TensorDict, fields: list[str]) -> None:
    """Raise ``ValueError`` that names the fields that a batch lacks."""
    missing = [field for field in fields if field not in data.keys()]
    if missing:
        raise ValueError(
            f"the batch lacks {', '.join(missing)}; teacher fields come from the teacher, which must score every training "
            "response that the method needs"
        )
