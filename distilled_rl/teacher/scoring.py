"""The teachers' log-probs of one batch, wherever the teachers are: in servers, in the student's workers, or the student itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from distilled_rl.config import COLOCATED_MESH
from distilled_rl.jagged import from_rows, per_token, same_layout, select_rows
from distilled_rl.teacher.sequences import Reader
from distilled_rl.teacher.server import align_teacher_log_probs, server_fields
from distilled_rl.teacher.specs import TeacherSpec


class Source(Protocol):
    """Where one teacher's log-probs come from."""

    def score(self, sequences: Sequence[torch.Tensor]) -> TensorDict:
        """Return ``teacher_logprobs`` float32 and ``teacher_ids`` int32, nested [B, j, 1], of whole sequences, int [j] each.

        Both are shifted left by one, the last entry of a row a dummy 0, as verl's teacher server writes them.
        """
        ...


class WorkerGroupTeacher:
    """A teacher in verl's FSDP workers: a colocated one, or the student itself at another temperature."""

    def __init__(self, spec: TeacherSpec, group: Any, rollout: DictConfig) -> None:
        self.spec, self.group, self.rollout = spec, group, rollout
        colocated = spec.source == "colocated"
        self._mesh = COLOCATED_MESH if colocated else "actor"
        self._temperature = rollout.temperature if colocated else spec.temperature

    def score(self, sequences: Sequence[torch.Tensor]) -> TensorDict:
        """See :class:`Source`. Each rank is given the same number of sequences, of about the same length in all."""
        ranks = max(self.group._query_dispatch_info(self._mesh)) + 1
        order = dealt(list(map(len, sequences)), ranks)
        part = self._batch([sequences[row] for row in order], share=len(order) // ranks)
        try:
            if self.spec.source == "colocated":
                tu.assign_non_tensor_data(part, "teacher", self.spec.name)
                log_probs = self.group.compute_teacher_log_prob(part)["log_probs"]
            else:
                log_probs = self.group.compute_log_prob(part)["log_probs"]
        except Exception as error:
            raise RuntimeError(f"the teacher {self.spec.name} ({self.spec.source}) failed: {error}") from error
        rows = dict(
            zip(order, log_probs.unbind(), strict=True)
        )  # a row that fills up is there twice, with equal scores
        return server_fields(from_rows([rows[row] for row in range(len(sequences))]), from_rows(sequences))

    def _batch(self, sequences: Sequence[torch.Tensor], share: int) -> TensorDict:
        """Return what an engine of verl reads, with what it is told."""
        ids: Any = from_rows(sequences)
        positions = from_rows([torch.arange(len(sequence)) for sequence in sequences])
        batch = TensorDict(
            {
                "input_ids": ids,
                "position_ids": same_layout(positions, ids),
                "loss_mask": same_layout(ids, ids, torch.ones_like(ids.values())),
            },
            batch_size=len(sequences),
        )
        settings: dict[str, Any] = {"calculate_entropy": False, "compute_loss": False, "temperature": self._temperature}
        if not self.rollout.log_prob_use_dynamic_bsz:
            limit = min(share, self.rollout.log_prob_micro_batch_size_per_gpu)
            settings["micro_batch_size_per_gpu"] = max(n for n in range(1, limit + 1) if share % n == 0)
        for key, value in settings.items():
            tu.assign_non_tensor_data(batch, key, value)
        return batch


def dealt(lengths: Sequence[int], ranks: int) -> list[int]:
    """Return the rows in an order whose ``ranks`` equal parts hold about the same number of tokens.

    The longest come first, dealt back and forth; short rows come twice where the ranks do not divide the rows.
    """
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    rows += [rows[-1]] * (-len(rows) % ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(rows), ranks):
        group = rows[start : start + ranks]
        for hand, row in zip(hands, group if start // ranks % 2 == 0 else group[::-1], strict=True):
            hand.append(row)
    return [row for hand in hands for row in hand]


class BatchScorer:
    """Scores chosen rows of a batch, each by its teacher.

    ``specs``: the run's teachers. ``group``: verl's worker group of the actor. ``servers``: returns the handles of verl's teacher
    servers by key.
    """

    def __init__(
        self,
        config: DictConfig,
        specs: Sequence[TeacherSpec],
        group: Any,
        servers: Callable[[], Mapping[str, Sequence[Any]]],
    ) -> None:
        self._config, self._group, self._servers = config, group, servers
        self.specs = {spec.key: spec for spec in specs}
        self._sources: dict[str | None, Source] = {}
        arguments = OmegaConf.select(config, "data.apply_chat_template_kwargs")
        plain: Any = OmegaConf.to_container(arguments, resolve=True) if arguments is not None else {}
        self._readers = {key: Reader(spec, plain) for key, spec in self.specs.items()}

    def teachers_of(self, batch: KVBatchMeta) -> list[TeacherSpec]:
        """Return each row's teacher. Raises ``ValueError`` that lists the known keys for one that no teacher has."""
        if None in self.specs:
            return [self.specs[None]] * len(batch.keys)
        described = OmegaConf.select(self._config, "teacher") is not None
        column = self._config.teacher.key if described else self._config.distillation.teacher_key
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[column])
        require(data, [column])
        keys = [str(key) for key in data[column]]
        known = ", ".join(sorted(map(str, self.specs)))
        if unknown := sorted(set(keys) - {str(key) for key in self.specs}):
            keys_in, teachers_in = (
                ("teacher.key", "teacher.by_key")
                if described
                else ("distillation.teacher_key", "distillation.teacher_models")
            )
            raise ValueError(
                f"the data column {column} ({keys_in}) holds {', '.join(map(repr, unknown[:5]))}, for which there is no teacher; "
                f"{teachers_in} knows {known}"
            )
        return [self.specs[key] for key in keys]

    def log_probs(self, batch: KVBatchMeta, data: TensorDict, rows: torch.Tensor, asked: bool) -> torch.Tensor:
        """Return the teacher's log-probs of the sampled tokens, float32 nested [B, j]; the student's own, a ratio of 1, in
        the rows that are not scored.

        ``data``: ``responses``, ``response_mask``, and ``old_log_probs`` of the batch, nested [B, j]. ``rows``: bool [B], the
        responses to score. ``asked``: the agent loops have asked the servers for every row. Raises ``ValueError`` for scores
        that are missing, of other tokens, or placeholders, and ``RuntimeError`` for a teacher that fails.
        """
        old: Any = data["old_log_probs"]
        values = old.values().float().clone()
        owners = self.teachers_of(batch)
        for spec in self.specs.values():
            mine = rows & torch.tensor([owner is spec for owner in owners])
            if not mine.any():
                continue
            try:
                aligned: Any = self._score(spec, batch, data, mine, asked)
            except ValueError as error:
                raise ValueError(f"the teacher {spec.name} ({spec.source}): {error}") from error
            values[per_token(mine, old)] = aligned.values()
        return same_layout(old, old, values)

    def _score(
        self, spec: TeacherSpec, batch: KVBatchMeta, data: TensorDict, rows: torch.Tensor, asked: bool
    ) -> torch.Tensor:
        """Return one teacher's aligned scores of its rows."""
        keys = [batch.keys[row] for row in rows.nonzero().flatten().tolist()]
        responses: Any = select_rows(data["responses"], rows)
        mask = select_rows(data["response_mask"], rows)
        if asked:
            fields = ["teacher_logprobs", "teacher_ids"]
            got = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
            require(got, fields)
        else:
            sequences, read = self._as_read(spec, keys, batch.partition_id, responses)
            responses = same_layout(responses, responses, torch.cat(read))
            got = self._source(spec).score(sequences)
        return align_teacher_log_probs(got["teacher_logprobs"], got["teacher_ids"], responses, mask)

    def _as_read(
        self, spec: TeacherSpec, keys: list[str], partition: str, responses: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return whole sequences and their responses as this teacher reads them, int64 [j] each."""
        reader, own = self._readers[spec.key], spec.prompt == "own"
        fields = ["raw_prompt"] if own else ["prompts"]
        data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)
        require(data, fields)
        prompts = reader.prompts([] if own else data["prompts"].unbind(), list(data["raw_prompt"]) if own else None)
        read = reader.responses(responses.unbind())
        return [torch.cat(pair) for pair in zip(prompts, read, strict=True)], read

    def _source(self, spec: TeacherSpec) -> Source:
        if spec.key not in self._sources:
            self._sources[spec.key] = self._make_source(spec)
        return self._sources[spec.key]

    def _make_source(self, spec: TeacherSpec) -> Source:
        if spec.source == "url":
            from distilled_rl.teacher.url import UrlTeacher

            return UrlTeacher(spec)
        if spec.source == "server":
            from distilled_rl.teacher.served import ServedTeacher

            return ServedTeacher(spec, servers_of(self._servers(), spec))
        return WorkerGroupTeacher(spec, self._group, self._config.actor_rollout_ref.rollout)


def servers_of(servers: Mapping[str, Sequence[Any]], spec: TeacherSpec) -> Sequence[Any]:
    """Return the servers of one teacher: under its key, or the only ones there are (verl calls a single served teacher
    "default", verl/workers/config/distillation.py:286). Raises ``ValueError``."""
    if spec.key is not None and spec.key in servers:
        return servers[spec.key]
    if len(servers) == 1:
        return next(iter(servers.values()))
    raise ValueError(f"verl serves the teachers {', '.join(sorted(servers)) or 'of no key'}, not {spec.key}")


def require(data: TensorDict, fields: list[str]) -> None:
    """Raise ``ValueError`` that names the fields that a batch lacks."""
    missing = [field for field in fields if field not in data.keys()]
    if missing:
        raise ValueError(
            f"the batch lacks {', '.join(missing)}; teacher fields come from the teacher, which must score every training "
            "response that the method needs"
        )
