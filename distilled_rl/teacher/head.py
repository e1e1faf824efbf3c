"""Log-probs of given tokens from hidden states, without the logits of all rows at once.

A vocabulary of 151,936 makes the logits of one row of bf16 as large as 37 of its hidden states of 4096, so the head works on
a few rows at a time. Imports neither verl nor transformers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def next_token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, temperature: float = 1.0
) -> Tensor:
    """Return ``log softmax(hidden @ weight.T / temperature)`` at the targets, float32 [N]; for inference only.

    ``hidden``: float [N, H], the last hidden states (after the final norm). ``weight``: [V, H] of the same dtype and device,
    the output embedding. ``targets``: int [N], the token after each row; the caller shifts. ``chunk``: rows whose logits are
    held at once. Logits have the dtype of ``weight``; temperature, maximum, and sum are float32 (see :func:`row_kernel`).

    Beside the result it holds ``chunk * V`` logits of that dtype, and in torch's way one or two float32 copies of them.
    Raises ``ValueError`` for shapes or dtypes that do not fit, a target outside the vocabulary, ``chunk`` below 1, and a
    temperature that is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: they must be [N, H] and [V, H]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets are {tuple(targets.shape)}: one for each of the {len(hidden)} rows of hidden")
    if hidden.dtype != weight.dtype or not weight.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: they must be of one float dtype")
    if chunk < 1 or not temperature > 0:
        raise ValueError(f"{chunk=} must be at least 1, {temperature=} positive")
    result = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    if not len(hidden):
        return result
    # The kernel of flash-attn takes such an id without an error.
    lowest, highest = (int(bound) for bound in targets.aminmax())
    if lowest < 0 or highest >= len(weight):
        raise ValueError(f"targets are {lowest} to {highest}: ids of a vocabulary of {len(weight)} are needed")
    targets = targets.long()
    _, row_log_probs = row_kernel(hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        result[rows] = row_log_probs(torch.nn.functional.linear(hidden[rows], weight), targets[rows], temperature)
    return result


def row_kernel(device: torch.device) -> tuple[str, Callable[[Tensor, Tensor, float], Tensor]]:
    """Return the name of what turns logits [n, V], targets int64 [n], and a temperature into log-probs float32 [n], and it.

    ``flash-attn`` on a GPU where that library is installed, as verl's ``logprobs_from_logits`` does: one reading of the logits
    and no copy. Else ``torch``: it has no ``log_softmax`` from bf16 to float32 in one pass, and converts the chunk first.
    """
    loss = _flash_attn_loss() if device.type == "cuda" else None
    if loss is None:
        return "torch", _torch_rows
    return "flash-attn", lambda logits, targets, temperature: -loss(logits, targets, logit_scale=1 / temperature)[0]


def _torch_rows(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1 else logits.float().div_(temperature)
    return torch.log_softmax(scaled, dim=-1, dtype=torch.float32).gather(-1, targets[:, None]).squeeze(-1)


@functools.cache
def _flash_attn_loss() -> Callable[..., Any] | None:
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss  # type: ignore[import-not-found]
    except ImportError:
        return None
    return cross_entropy_loss
