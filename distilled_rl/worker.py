"""The hybrid worker of every run: verl's, with an update that skips what cannot change it, and a weight sync that lets runs
share a machine.

A response whose advantage is 0 on every token adds exactly 0 to the policy gradient, though its forward and backward pass
cost as much as any other's. Groups whose answers are all right or all wrong are such, and there are many of them.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from distilled_rl.config import SKIP_KEY, SOCKET_BASE

# What the update tells the loss.
TOKENS_KEY = "distilled_rl_batch_num_tokens"


class OverAllResponses:
    """verl's actor loss, normalised over the whole mini-batch when responses have been left out of it.

    The number of responses in the mini-batch (``global_batch_size``) is the trainer's and stays; the number of tokens is
    counted by the engine over the responses that it is given (verl/workers/engine/fsdp/transformer_impl.py:730).
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss = loss

    def __call__(self, *, data: TensorDict, **others: Any) -> Any:
        """Return what verl's loss returns for a micro-batch; ``others`` are the engine's further arguments."""
        tokens = tu.get_non_tensor_data(data, TOKENS_KEY, None)
        if tokens is not None:
            tu.assign_non_tensor(data, batch_num_tokens=tokens)
        return self.loss(data=data, **others)


class ActorWorker(TrainingWorker):
    """verl's worker of one engine, whose update can skip responses without advantage."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        """Set the loss of the update."""
        super().set_loss_fn(OverAllResponses(loss_fn))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Update on one mini-batch; where the trainer asks for it, without the responses whose advantages are all 0.

        The metrics gain ``skipped_response_fraction``, the same on every rank. In an update that may skip, ``ppo_kl`` and
        ``pg_clipfrac`` are means over the responses that are not skipped, and ``entropy_loss`` is left out: verl divides
        its sum over those by the number of all. The loss, its gradient and their norm are those of all responses.
        """
        rows, skip = len(data), tu.pop(data, SKIP_KEY, False)
        if skip:
            data = self._with_advantage(data)
        output = super().train_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            metrics["skipped_response_fraction"] = 1 - len(data) / rows
            if skip:
                metrics.pop("actor/entropy_loss", None)
        return output

    def _with_advantage(self, data: TensorDict) -> TensorDict:
        """Return the rows with an advantage, and as many others as it takes to give each rank the same number, at least one.

        At least one, because the optimizer must step even where no response has an advantage: its moments and weight decay
        change the weights at a gradient of 0 too.
        """
        group = self.engine.get_data_parallel_group()
        live = has_advantage(data["advantages"], data["response_mask"]).tolist()
        lengths = data["input_ids"].offsets().diff().tolist()
        ranks: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(ranks, (live, lengths, data["loss_mask"].sum().item()), group)
        wanted = max(1, *(sum(theirs) for theirs, _, _ in ranks))
        micro = None
        if not tu.get(data, "use_dynamic_bsz", self.engine_config.use_dynamic_bsz):
            limit = tu.get(data, "micro_batch_size_per_gpu", self.engine_config.micro_batch_size_per_gpu)
            wanted, micro = whole_micro_batches(wanted, limit)
        data = tu.index_select_tensor_dict(data, kept_rows(live, wanted))
        if micro is not None:
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro)
        tu.assign_non_tensor(data, **{TOKENS_KEY: sum(tokens for _, _, tokens in ranks)})
        computed = [long[row] for theirs, long, _ in ranks for row in kept_rows(theirs, wanted)]
        tu.assign_non_tensor_data(data, "global_token_num", computed)
        return data


def has_advantage(advantages: Any, mask: Any) -> torch.Tensor:
    """Return bool [B]: the rows with an advantage other than 0 (or not a number) on a live token.

    ``advantages`` float and ``mask``: nested [B, j], of the same lengths.
    """
    tokens = (advantages.values() != 0) & mask.values().bool()
    return torch.stack([row.any() for row in tokens.split(advantages.offsets().diff().tolist())])


def kept_rows(live: list[bool], wanted: int) -> list[int]:
    """Return the indices of ``wanted`` rows in their order: the live ones, and the first of the others to fill up."""
    return sorted(sorted(range(len(live)), key=lambda row: not live[row])[:wanted])


def whole_micro_batches(rows: int, limit: int) -> tuple[int, int]:
    """Return how many rows, at least ``rows``, split into equal micro-batches of at most ``limit``, and the size of those.

    Never more than ``rows`` rounded up to a multiple of ``limit``.
    """
    count = -(-rows // limit)
    size = -(-rows // count)
    return count * size, size


class DistilledRLWorker(ActorRolloutRefWorker):
    """verl's hybrid worker of actor, rollout, and optionally reference policy."""

    actor_worker_cls = ActorWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def init_model(self) -> None:
        """Build what verl builds, and meet the rollout engine at this run's own sockets."""
        super().init_model()
        rollout: Any = self.rollout
        base = os.environ.get(SOCKET_BASE)
        # only vLLM's has a socket; with disaggregation verl gives each server a base of its own (vllm_pd_replica.py:281)
        if base is not None and hasattr(rollout, "zmq_handle") and not self.config.rollout.disaggregation.enabled:
            rollout.zmq_handle = own_socket(rollout.zmq_handle, int(base))


def own_socket(handle: str, base: int) -> str:
    """Return the name of the socket at which vLLM's worker, told ``VERL_ZMQ_BASE_TRAINER_RANK=base``, waits for weights.

    verl names it after Ray's job, which is 01000000 for the first job of every cluster: two runs on a machine, each with a
    Ray of its own, would read each other's weights and wait for ever (verl/workers/rollout/vllm_rollout/vllm_rollout.py:141).
    The receiver adds the base to its rank (verl/workers/rollout/vllm_rollout/utils.py:430).
    Raises ``ValueError`` for a name of another form.
    """
    head, found, rank = handle.removesuffix(".sock").rpartition("-rank-")
    if not found or not rank.isdecimal() or not handle.endswith(".sock"):
        raise ValueError(f"verl's weight-sync socket is called {handle!r}, without a rank at its end: verl has changed")
    return f"{head}-rank-{base + int(rank)}.sock"
