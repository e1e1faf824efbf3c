"""verl's vLLM teacher server with a method that scores a batch, and the replica that starts it.

Imports vLLM's server. :func:`distilled_rl.teacher.vllm_server.register` tells verl of the replica without doing so.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from distilled_rl.teacher.vllm_server import flat_prompt_log_probs

# The sampling parameters of a request that only asks for prompt log-probs (verl/experimental/teacher_loop/teacher_manager.py,
# `_get_teacher_sampling_params`). None but the first bears on those; `max_tokens` is 1.
_SCORING_PARAMS = frozenset({"prompt_logprobs", "max_tokens", "temperature", "detokenize"})


class ScoringServer(vLLMHttpServer):
    """verl's vLLM server, which also scores whole sequences, many in one call.

    The log-probs are the model's own, at temperature 1, over all tokens of its tokenizer: verl masks what a padded vocabulary
    has beyond, and the placeholders of a vision model's images (``monkey_patch_compute_logits`` in
    verl/workers/rollout/vllm_rollout/utils.py).
    """

    _finished = 0

    async def score(self, sequences: Sequence[np.ndarray], k: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids, int32 [S, max(k, 1)], and log-probs, float32 of the same shape, for each sequence of ids, int32 [S].

        The layout is that of :func:`~distilled_rl.teacher.vllm_server.flat_prompt_log_probs`. All requests reach the engine
        together.

        Raises ``ValueError``, before anything is scored, for a sequence that is empty or does not leave room for the one token
        that vLLM generates; ``ValueError`` for what vLLM refuses: a token id that the model does not know, or a ``k`` above
        its ``max_logprobs``; and ``RuntimeError`` when the engine is dead or drops a request. The other requests of the call
        are then aborted.
        """
        limit = self.config.max_model_len
        for sequence in sequences:
            if not 1 <= len(sequence) < limit:
                raise ValueError(
                    f"a sequence has {len(sequence)} tokens, and scoring generates 1 more: at least 1 and in all at most "
                    f"the teacher's max_model_len of {limit}; raise that (distillation.teacher_models.*.inference), or shorten "
                    "prompts and responses"
                )
        tasks = [asyncio.create_task(self._score(sequence.tolist(), k, uuid4().hex)) for sequence in sequences]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # which aborts its request in the engine
            await asyncio.gather(*tasks, return_exceptions=True)
        return [rows for rows, _ in results]

    async def finished(self) -> int:
        """Return how many sequences this server has scored. Raises ``RuntimeError`` when its engine is dead."""
        if self.engine.errored:
            raise RuntimeError("the vLLM engine of this teacher server is dead: its log has the cause")
        return self._finished

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """Do as verl's server does; what asks for prompt log-probs only gets them as two arrays instead of nested lists.

        ``extra_fields["prompt_ids"]`` int32 and ``["prompt_logprobs"]`` float32, [S, max(k, 1)] both; verl's
        ``AsyncTeacherLLMServerManager`` makes tensors of either.
        """
        k = sampling_params.get("prompt_logprobs")
        scoring = sampling_params.keys() <= _SCORING_PARAMS and sampling_params.get("max_tokens") == 1
        media = args or any(value is not None for value in kwargs.values())
        if k is None or k < 0 or not scoring or media:
            return await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        tokens = normalize_token_ids(prompt_ids)
        (ids, log_probs), generated = await self._score(tokens, k, request_id)
        fields = {"global_steps": self.global_steps, "prompt_ids": ids, "prompt_logprobs": log_probs}
        return TokenOutput(token_ids=generated, stop_reason="completed", extra_fields=fields)

    def _validate_configs(self) -> None:
        super()._validate_configs()
        if self.config.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(
                f"logprobs_mode is {self.config.logprobs_mode}: a teacher must return log-probs; set "
                "distillation.teacher_models.*.inference.logprobs_mode to raw_logprobs"
            )

    async def _score(
        self, sequence: list[int], k: int, request_id: str
    ) -> tuple[tuple[np.ndarray, np.ndarray], list[int]]:
        """Return ids and log-probs of one sequence, and the token that vLLM generated."""
        params = SamplingParams(
            prompt_logprobs=k,
            flat_logprobs=True,
            detokenize=False,
            max_tokens=1,
            temperature=1.0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # verl's gate: closed while the engine is paused (vllm_async_server.py, generate and abort_all_requests).
        if await self._park_until_admitted(request_id) is not None:
            raise RuntimeError("the teacher server rejects requests: it has left the pool")
        result: RequestOutput | None = None
        try:
            prompt = TokensPrompt(prompt_token_ids=sequence)
            async for output in self.engine.generate(prompt=prompt, sampling_params=params, request_id=request_id):
                result = output
        # vLLM's own classes stay here: the process that asks need not import vLLM to read the error.
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses a sequence of {len(sequence)} tokens: {error}") from None
        except VLLMServerError as error:
            raise RuntimeError(f"the vLLM engine of this teacher server failed: {error}") from None
        finally:
            self._admitting -= 1
        if result is None or not result.outputs or result.outputs[0].finish_reason in (None, "abort", "error"):
            raise RuntimeError(f"the teacher server dropped a request of {len(sequence)} tokens before it was scored")
        rows = flat_prompt_log_probs(result.prompt_logprobs, k, len(sequence))  # type: ignore[arg-type]
        self._finished += 1
        return rows, list(result.outputs[0].token_ids)


class ScoringReplica(vLLMReplica):
    """verl's vLLM replica with :class:`ScoringServer` servers.

    verl's processes behind it are told that the engine is ``vllm``: they compare that name, and know no other
    (verl/workers/rollout/base.py, ``get_rollout_class``; verl/workers/config/rollout.py, ``__post_init__``, which runs again
    here with the checks that go by it).
    """

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        config = dataclasses.replace(omega_conf_to_dataclass(config), name="vllm")
        super().__init__(replica_rank, config, *args, **kwargs)
        self.server_class = ray.remote(ScoringServer)
