"""The bound on what one scoring step of vLLM holds in [tokens, vocabulary]."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distilled_rl.teacher.peak import V2_CHUNK_TOKENS, scoring_peak_bytes

QWEN3 = 151_936  # a multiple of 64


def test_the_v1_runner_holds_logits_their_float32_copy_and_the_result() -> None:
    # per logit 2 (bf16) + 4 (float32 copy) + 4 (log-softmax); and one more row of logits, the sampler's
    assert scoring_peak_bytes(QWEN3, 8192) == QWEN3 * (8192 * 10 + 2)
    # float32 logits need no copy
    assert scoring_peak_bytes(QWEN3, 8192, 4) == QWEN3 * (8192 * 8 + 4)


def test_the_vocabulary_is_padded() -> None:
    assert scoring_peak_bytes(65, 3) == scoring_peak_bytes(128, 3) == 128 * (3 * 10 + 2)
    assert scoring_peak_bytes(64, 3) == 64 * (3 * 10 + 2)


def test_gathering_is_a_smaller_peak_than_the_softmax_of_bf16_but_not_of_float32() -> None:
    # bf16, 2 devices: 2 * (1/2 + 1 + 1) = 5 < 10
    assert scoring_peak_bytes(QWEN3, 100, tensor_parallel=2) == scoring_peak_bytes(QWEN3, 100)
    # float32: 4 * (1/2 + 1 + 1) = 10 > 8
    assert scoring_peak_bytes(QWEN3, 100, 4, tensor_parallel=2) == QWEN3 * (100 * 10 + 4)
    # 4 * (1/8 + 2) = 8.5
    assert scoring_peak_bytes(QWEN3, 100, 4, tensor_parallel=8) == QWEN3 * (850 + 4)


def test_the_v2_runner_holds_a_chunk_and_the_logits_of_the_one_before() -> None:
    def peak(tokens: int, bytes_: int = 2, devices: int = 1) -> int:
        return scoring_peak_bytes(QWEN3, tokens, bytes_, tensor_parallel=devices, chunk_tokens=V2_CHUNK_TOKENS)

    assert peak(1000) == QWEN3 * 1000 * 2
    assert peak(1024) == QWEN3 * 1024 * 2
    assert peak(1500) == QWEN3 * 1500 * 2  # 1024 of the first chunk are alive when the 476 of the second come
    assert peak(2048) == peak(100_000) == QWEN3 * 2048 * 2
    assert peak(100_000, 4) == QWEN3 * 2048 * 4
    assert peak(100_000, 2, 2) == QWEN3 * (1024 * 5 + 1024 * 2)


@given(
    vocabulary=st.integers(1, 300_000),
    tokens=st.integers(1, 200_000),
    logits_bytes=st.sampled_from([2, 4]),
    devices=st.sampled_from([1, 2, 3, 8]),
)
def test_the_v1_bound_holds_for_v2_and_grows_with_the_step(
    vocabulary: int, tokens: int, logits_bytes: int, devices: int
) -> None:
    def peak(tokens: int, chunk: int | None) -> int:
        return scoring_peak_bytes(vocabulary, tokens, logits_bytes, tensor_parallel=devices, chunk_tokens=chunk)

    assert peak(tokens, V2_CHUNK_TOKENS) <= peak(tokens, None) <= peak(tokens + 1, None)
    assert peak(tokens, V2_CHUNK_TOKENS) <= peak(tokens + 1, V2_CHUNK_TOKENS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocab_size": 0},
        {"max_num_batched_tokens": 0},
        {"tensor_parallel": 0},
        {"chunk_tokens": 0},
        {"chunk_tokens": -1},
        {"logits_bytes": 1},
        {"logits_bytes": 8},
    ],
)
def test_numbers_that_mean_nothing_are_errors(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"sizes must be at least 1|logits_bytes is"):
        scoring_peak_bytes(**{"vocab_size": 64, "max_num_batched_tokens": 8, **arguments})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_allocates_no_more_than_the_bound_counts(dtype: torch.dtype) -> None:
    """vLLM's ``compute_logprobs`` is this one call; torch's profiler counts what it allocates beside its input."""
    from torch.profiler import ProfilerActivity, profile

    rows, vocabulary = 64, 4096
    logits = torch.randn(rows, vocabulary).to(dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as report:
        result = logits.log_softmax(dim=-1, dtype=torch.float32)
    assert result.dtype == torch.float32
    events: Any = report.events()
    allocated = sum(event.self_cpu_memory_usage for event in events if event.self_cpu_memory_usage > 0)
    held = logits.numel() * logits.element_size()
    counted = scoring_peak_bytes(vocabulary, rows, logits.element_size())
    assert 0.9 * counted <= held + allocated <= counted
