"""How much memory vLLM needs, beside what it has planned for, to score prompts. Imports neither vLLM nor verl.

vLLM runs no request with prompt log-probs when it measures itself at start-up, so this memory has to fit into what
``gpu_memory_utilization`` leaves free.

Read in vLLM 0.24.0 and 0.27.1, which hold two model runners:

- V1 (vllm/v1/worker/gpu_model_runner.py, ``_get_prompt_logprobs_dict``): one request after the other, each with the logits of
  all its tokens of the step at once. A step has at most ``max_num_batched_tokens`` tokens, of one long request or of many.
  ``compute_logprobs`` (vllm/v1/sample/sampler.py) is ``logits.log_softmax(dim=-1, dtype=torch.float32)``: logits, their
  float32 copy, and the result are alive together. The previous request's logits and result are, too, until they are
  overwritten; its tokens count towards the same step.
- V2 (vllm/v1/worker/gpu/sample/prompt_logprob.py, ``compute_prompt_logprobs_with_chunking``): all tokens of the step, in
  chunks of 1024 whose log-probs are computed without a second buffer; a chunk's logits stay until the next ones are there.

0.24.0 takes V2 for Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM and three more architectures, 0.27.1 for every dense
one (vllm/config/vllm.py, ``use_v2_model_runner``); both need Triton, fall back to V1 where V2 lacks a feature, and follow
``VLLM_USE_V2_MODEL_RUNNER`` if it is set.
"""

# CHUNK_SIZE of vLLM's V2 model runner.
V2_CHUNK_TOKENS = 1024

# vLLM pads a vocabulary to a multiple of this (vllm/model_executor/layers/vocab_parallel_embedding.py).
_VOCAB_PADDING = 64


def scoring_peak_bytes(
    vocab_size: int,
    max_num_batched_tokens: int,
    logits_bytes: int = 2,
    *,
    tensor_parallel: int = 1,
    chunk_tokens: int | None = None,
) -> int:
    """Return an upper bound, in bytes on one device, on the buffers of [tokens, vocabulary] that one scoring step holds.

    ``logits_bytes``: of one logit; 2 for a model in bf16 or fp16, 4 for one in fp32 or with a float32 head.
    ``tensor_parallel``: devices that share the vocabulary; each gathers the whole logits, through one more copy of them.
    ``chunk_tokens``: None for the V1 runner, whose bound holds for V2 as well; ``V2_CHUNK_TOKENS`` for the V2 runner.

    The bound leaves out what has no vocabulary in its shape: k + 1 numbers per token, and the hidden states.
    Raises ``ValueError`` for a number below 1 and for ``logits_bytes`` other than 2 and 4.
    """
    if min(vocab_size, max_num_batched_tokens, tensor_parallel, chunk_tokens or 1) < 1 or chunk_tokens == 0:
        raise ValueError(
            f"sizes must be at least 1: {vocab_size=}, {max_num_batched_tokens=}, {tensor_parallel=}, {chunk_tokens=}"
        )
    if logits_bytes not in (2, 4):
        raise ValueError(f"logits_bytes is {logits_bytes}: 2 (bf16, fp16) or 4 (fp32)")
    vocabulary = -(-vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    # This device's share, all shares one after the other, and the same in the order of the vocabulary.
    head = logits_bytes if tensor_parallel == 1 else logits_bytes * (2 + 1 / tensor_parallel)
    if chunk_tokens is not None:
        newest = min(max_num_batched_tokens, chunk_tokens)
        previous = min(max_num_batched_tokens - newest, chunk_tokens)
        return _ceil(vocabulary * (newest * head + previous * logits_bytes))
    softmax = logits_bytes + (4 if logits_bytes != 4 else 0) + 4
    # The sampler's logits are alive, too: a row per request. The last token of a prompt has such a row but no prompt log-prob,
    # which makes room for it; only the one prompt that the step cuts off has both.
    return _ceil(vocabulary * (max_num_batched_tokens * max(head, softmax) + logits_bytes))


def _ceil(number: float) -> int:
    return -int(-number // 1)
