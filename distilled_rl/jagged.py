"""Nested jagged tensors [B, j]: choosing rows, and giving tensors one layout."""

from collections.abc import Sequence
from typing import Any

import torch


def from_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows [j, ...] of one dtype as a nested tensor [B, j, ...] that knows its longest and shortest row.

    Raises ``ValueError`` when there is no row.
    """
    if not rows:
        raise ValueError("a nested tensor needs at least one row")
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(rows)),
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


def per_token(rows: torch.Tensor, like: Any) -> torch.Tensor:
    """Return ``rows`` [B], one value per response, as [N], one per token of the nested tensor ``like``."""
    return torch.repeat_interleave(rows, like.offsets().diff())


def select_rows(tensor: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a nested [B, j] tensor for which ``rows``, bool [B], is True."""
    if rows.all():
        return tensor
    lengths = tensor.offsets().diff()[rows]
    return torch.nested.nested_tensor_from_jagged(
        tensor.values()[per_token(rows, tensor)],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


def same_layout(tensor: Any, like: Any, values: torch.Tensor | None = None) -> torch.Tensor:
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
