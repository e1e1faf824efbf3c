"""The cost model against transformers' models, torch's counter of operations, live memory, and logged token counts."""

import json
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distilled_rl.teacher.cost import (
    Batch,
    Operations,
    compare_tokens,
    forward_operations,
    generation_operations,
    scoring_cost,
    step_cost,
    training_operations,
)
from distilled_rl.teacher.decoder import Decoder


def shape(model_type, hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, tied, **more):
    keys = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return {key: value for key, value in (keys | more).items() if value is not None}


QWEN3_1_7B = shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936, True)
QWEN3_8B = shape("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False)
STUDENT = shape("qwen3", 64, 192, 2, 2, 1, 32, 32, True)  # the miniature's
MODELS = {
    "qwen3-1.7b": (QWEN3_1_7B, 1_720_574_976),
    "qwen3-4b": (shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True), 4_022_468_096),
    "qwen3-8b": (QWEN3_8B, 8_190_735_360),
    "miniature student": (STUDENT, 100_800),
    "miniature teacher": (shape("qwen3", 96, 288, 2, 2, 1, 32, 32, True), 206_432),
    "qwen3 with biases": (shape("qwen3", 64, 192, 2, 4, 2, 32, 32, False, attention_bias=True), None),
    "qwen2.5-1.5b": (shape("qwen2", 1536, 8960, 28, 12, 2, None, 151_936, True), 1_543_714_304),
    "llama-3.2-1b": (shape("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True), 1_235_814_400),
    "llama without defaults": (shape("llama", 64, 192, 2, 4, None, None, 32, False), None),
    "llama with biases": (
        shape("llama", 64, 192, 2, 4, 2, 32, 32, False, attention_bias=True, mlp_bias=True),
        None,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(config, device="meta", attention="sdpa", dtype=torch.float32):
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **keys), dtype=dtype, attn_implementation=attention
        ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    config, published = MODELS[name]
    decoder = Decoder.from_config(config)
    assert decoder.parameters == sum(parameter.numel() for parameter in build(config).parameters())
    assert decoder.parameters == published or published is None
    assert decoder.weight_bytes("bf16") * 2 == decoder.weight_bytes("fp32") == 4 * decoder.parameters


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_operations_are_those_that_torch_counts(attention):
    """torch counts matrix products (mm: body and head; bmm: attention), eager attention as a full square of tokens, without
    the causal half; on a CPU it counts nothing of sdpa. The tolerance is for the rotary embedding's own product."""
    tokens, rows = 96, 2
    config = shape("qwen3", 64, 192, 3, 4, 2, 32, 320, False)
    model, counter = build(config, "cpu", attention), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(rows, tokens, dtype=torch.long), use_cache=False)
    counted = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    got = forward_operations(Decoder.from_config(config), Batch.of([tokens] * rows))
    assert counted["aten.mm"] == got.body + got.head
    assert set(counted) == {"aten.mm", "aten.bmm"}
    # A full square has tokens^2 pairs, a causal half tokens (tokens + 1) / 2. The rotary product is [d/2, 1] x [1, tokens], once.
    square = got.attention * 2 * tokens / (tokens + 1) if attention == "eager" else 0
    rotary = 2 * 16 * tokens
    assert counted["aten.bmm"] == pytest.approx(square + rotary, rel=1e-12)
    assert rotary < 0.001 * got.total


def test_operations_of_an_8b_teacher_by_hand():
    decoder = Decoder.from_config(QWEN3_8B)
    got = forward_operations(decoder, Batch.of([1000, 3000]))
    # A layer's matrices: q and o 4096 x 4096, k and v 4096 x 1024, gate, up, and down 4096 x 12288.
    weights = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288)
    assert got.body == 2 * weights * 4000
    pairs = (1000 * 1001 + 3000 * 3001) / 2
    assert got.attention == 36 * pairs * 32 * (2 * 128 + 2 * 128)  # a score and a weighted value for each pair and head
    assert got.head == 2 * 4096 * 151_936 * 4000
    assert got.total == got.body + got.attention + got.head
    assert decoder.kv_cache_bytes(1) == 36 * 2 * 8 * 128 * 2
    assert decoder.logits_bytes(1024, "bf16") == 1024 * 151_936 * 2


def test_a_batch_by_its_moments_is_the_batch_by_its_lengths():
    lengths = [3, 10, 700, 52]
    mean = sum(lengths) / 4
    spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / 4) / mean
    around, exact = Batch.around(4, mean, spread), Batch.of(lengths)
    assert (around.rows, around.tokens) == (exact.rows, exact.tokens)
    assert around.squares == pytest.approx(exact.squares, rel=1e-12)
    assert exact.pairs == sum(length * (length + 1) // 2 for length in lengths)


def test_training_and_generation_by_their_passes():
    decoder, batch = Decoder.from_config(STUDENT), Batch.of([5, 9])
    once = forward_operations(decoder, batch)
    assert training_operations(decoder, batch, checkpointing=False).total == 3 * once.total
    assert training_operations(decoder, batch) == Operations(4 * once.body, 4 * once.attention, 3 * once.head)
    # Prompts of 2 tokens: one pass over each prompt, then one token at a time, each attending to all before it and itself.
    prompt, single = forward_operations(decoder, Batch.of([2, 2]), 2), forward_operations(decoder, Batch.of([1]))
    body, attention, head = prompt.body, prompt.attention, prompt.head
    for length in (5, 9):
        for position in range(3, length):
            body += single.body
            attention += single.attention * position
            head += single.head
    assert generation_operations(decoder, batch, response_tokens=3 + 7) == Operations(body, attention, head)


class LiveBytes(TorchDispatchMode):
    """The most bytes of storage, made inside, that are alive at once; works on the meta device."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage not in self.known:
                self.known[storage] = size = storage.nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, size)
        return out

    def free(self, size):
        self.live -= size


def output_alone(module, query, key, value, attention_mask, **_):
    """Attention that holds what flash attention does, its output; sdpa keeps the scores on the meta device."""
    return torch.empty_like(query.transpose(1, 2)), None


ALL_ATTENTION_FUNCTIONS.register("output_alone", output_alone)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-8b", "qwen2.5-1.5b"])
def test_activations_are_what_a_forward_pass_holds(name):
    config = MODELS[name][0] | {"num_hidden_layers": 2}
    model = build(config, attention="output_alone", dtype=torch.bfloat16).requires_grad_(False)
    tokens = 4096
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), LiveBytes() as memory:
        model.model(ids, use_cache=False)
    held = Decoder.from_config(config).activation_bytes(tokens)
    assert memory.peak == pytest.approx(held, rel=0.001)  # the positions come to it


def test_scoring_needed_rows_of_an_8b_teacher():
    cost = scoring_cost(QWEN3_8B, prompt_tokens=200, response_tokens=1800, rows=1024, share=0.4)
    assert (cost.needed.rows, cost.every.rows) == (0.4 * 1024, 1024)
    assert cost.needed.tokens == pytest.approx(0.4 * 1024 * 2000)
    assert cost.ratio == pytest.approx(0.4)
    assert cost.every.operations == forward_operations(Decoder.from_config(QWEN3_8B), Batch.of([2000] * 1024))
    assert cost.weight_bytes == cost.needed.copy_bytes == cost.every.copy_bytes == 2 * 8_190_735_360
    assert cost.logits_bytes == 1024 * 151_936 * 4
    assert cost.activation_bytes == (4 * 4096 + 3 * 12_288 + 256) * 40_960 * 2
    # 15.9e9 operations a token, 819,200 tokens, at 400e12 a second; 16.4 GB at 50 GB a second.
    work = cost.needed.operations.total / 400e12
    assert cost.needed.seconds(400e12) == work == pytest.approx(32.4, rel=0.01)
    assert cost.needed.seconds(400e12, 50e9) == pytest.approx(work + 0.3276, abs=1e-4)
    spread = scoring_cost(QWEN3_8B, 200, 1800, 1024, 0.4, "fp32", spread=0.5, offloaded=False)
    assert spread.needed.operations.attention == pytest.approx(1.25 * cost.needed.operations.attention, rel=1e-3)
    assert spread.needed.operations.body == cost.needed.operations.body
    assert spread.weight_bytes == 2 * cost.weight_bytes and spread.needed.copy_bytes == 0
    nothing = scoring_cost(QWEN3_8B, 200, 1800, 1024, 0.0).needed
    assert nothing.seconds(1.0, 1.0) == 0


def test_the_teacher_beside_the_step():
    teacher = scoring_cost(QWEN3_8B, 200, 1800, 1024, 0.4)
    step = step_cost(QWEN3_1_7B, 200, 1800, 1024)
    decoder, batch = Decoder.from_config(QWEN3_1_7B), Batch.of([2000] * 1024)
    assert step.old_log_probs == forward_operations(decoder, batch)
    assert step.update == training_operations(decoder, batch)
    assert step.generation == generation_operations(decoder, batch, 1800 * 1024)
    assert step.total == step.generation.total + step.old_log_probs.total + step.update.total
    # Per token: the student about 5.7 forward passes (the head 4.9) of 3.7e9, the teacher 0.4 of 15.7e9.
    assert teacher.needed.operations.total / step.total == pytest.approx(0.30, abs=0.02)
    assert step_cost(QWEN3_1_7B, 200, 1800, 1024, checkpointing=False).total < step.total


# Of runs of the miniature: 128 responses a step. A step of each kind: every row scored, half of them, and one without a teacher.
LOG = """
{"step":0,"data":{"val-core/miniature/chain/acc/mean@1":0.375}}
{"step":1,"data":{"teacher/scored_responses":1.0,"teacher/scored_tokens":5634.0,"prompt_length/mean":12.0,"response_length/mean":32.015625}}
{"step":2,"data":{"teacher/scored_responses":0.5078125,"teacher/scored_tokens":2860.0,"prompt_length/mean":12.0,"response_length/mean":32.0078125}}
{"step":3,"data":{"prompt_length/mean":12.0,"response_length/mean":32.0}}
"""


def test_tokens_are_those_that_a_run_logs():
    every, half = compare_tokens(map(json.loads, LOG.split()), rows=128)
    assert every == (1, 5634.0, 5634.0)
    # 65 rows of 44.0078 tokens on average; the scored ones were 44 tokens each.
    assert half == (2, 2860.0, pytest.approx(2860.5, abs=0.01))
    cost = scoring_cost(STUDENT, 12, 32.0078125, 128, 0.5078125)
    assert cost.needed.tokens == half[2]


@pytest.mark.parametrize("key", sorted(STUDENT.keys() - {"model_type", "tie_word_embeddings"}))
def test_a_missing_size_is_an_error_that_names_its_key(key):
    config = {name: value for name, value in STUDENT.items() if name != key}
    with pytest.raises(ValueError, match=f"lacks {key}$"):
        scoring_cost(config, 12, 32, 128, 1.0)
    for bad in (0, 2.5, "64", True):
        with pytest.raises(ValueError, match=f"{key} is {bad!r}, not a whole number above 0"):
            step_cost(config | {key: bad}, 12, 32, 128)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe'"),
        ({"num_experts": 8}, "'qwen3'.*mixture of experts"),
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl'"),
        ({"model_type": None}, "model_type None"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_other_architectures_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        Decoder.from_config(STUDENT | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"share": 1.1},
        {"share": -0.1},
        {"rows": 0},
        {"response_tokens": -1},
        {"chunk": 0},
        {"micro_batch_tokens": 0},
        {"spread": -1},
        {"dtype": "int4"},
    ],
)
def test_numbers_out_of_range_are_errors_that_name_them(changes):
    arguments = {"prompt_tokens": 12, "response_tokens": 32, "rows": 128, "share": 0.5} | changes
    with pytest.raises(ValueError, match=next(iter(changes))):
        scoring_cost(STUDENT, **arguments)
    with pytest.raises(ValueError, match="copy_bytes_per_second=0"):
        scoring_cost(STUDENT, 12, 32, 128, 0.5).needed.seconds(1e12, 0)
