"""A teacher in verl's vLLM servers, asked by the trainer for the rows that it chooses, after the advantages are known.

(With ``distilled_rl.score: all`` the agent loops ask for every row as it is finished, which overlaps with generation.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from ray.exceptions import RayActorError, RayTaskError
from tensordict import TensorDict
from verl.utils.ray_utils import auto_await

from distilled_rl.jagged import from_rows, same_layout
from distilled_rl.teacher.specs import TeacherSpec
from distilled_rl.teacher.vllm_server import ScoringClient

_START_AGAIN = (
    "the last lines of its server's log say why (often memory: lower gpu_memory_utilization or max_num_batched_tokens in "
    "distillation.teacher_models.*.inference); start the run again, it goes on from its last checkpoint"
)


class ServedTeacher:
    """A :class:`~distilled_rl.teacher.scoring.Source`: one teacher's servers.

    ``servers``: Ray handles of :class:`~distilled_rl.teacher.vllm_replica.ScoringServer`, one per replica; verl's trainer
    holds them in ``teacher_model_manager.server_handles``, under "default" for an only teacher, else under its key.
    """

    def __init__(self, spec: TeacherSpec, servers: Sequence[Any]) -> None:
        self.spec = spec
        self._client = ScoringClient(servers)

    def score(self, sequences: Sequence[torch.Tensor]) -> TensorDict:
        """Return ``teacher_logprobs`` float32 and ``teacher_ids`` int32, nested [B, j, 1], of whole sequences, int [j] each.

        May be called from a thread in which an event loop runs; it blocks it. Raises ``ValueError`` for a sequence that the
        servers cannot score, and ``RuntimeError``, within a minute, when one of them dies or does not answer.
        """
        try:
            rows: Any = self._scored(sequences)
        except RayActorError as error:
            raise RuntimeError(f"{self._who} has lost a server: {_START_AGAIN}") from error
        except RayTaskError as error:
            cause: BaseException = error.cause
            if isinstance(cause, ValueError):
                raise ValueError(f"{self._who} cannot score the batch: {cause}") from error
            raise RuntimeError(f"{self._who} failed: {type(cause).__name__}: {cause}; {_START_AGAIN}") from error
        except Exception as error:
            raise RuntimeError(f"{self._who} failed: {type(error).__name__}: {error}; {_START_AGAIN}") from error
        given = list(map(len, sequences))
        for part in zip(*rows, strict=True):
            if (got := list(map(len, part))) != given:
                raise RuntimeError(
                    f"{self._who} scored rows of {got[:8]}… tokens instead of {given[:8]}…: {_START_AGAIN}"
                )
        ids, log_probs = (from_rows(part) for part in zip(*rows, strict=True))
        return TensorDict(
            {"teacher_logprobs": log_probs, "teacher_ids": same_layout(ids, log_probs)}, batch_size=len(rows)
        )

    @auto_await
    async def _scored(self, sequences: Sequence[torch.Tensor]) -> Any:
        return await self._client.score(sequences)

    @property
    def _who(self) -> str:
        return f"the teacher {self.spec.name} ({self.spec.model}, in vLLM servers)"
