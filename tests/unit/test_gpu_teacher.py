"""The chunked head, and the benchmark of a packed teacher in its tiny form."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from distilled_rl.teacher.head import next_token_log_probs, row_kernel

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_teacher.py"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("gpu_teacher", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_teacher"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_teacher"]


def head_inputs(rows=50, hidden=24, vocabulary=97, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=g).to(dtype)
    weight = torch.randn(vocabulary, hidden, generator=g).to(dtype)
    return states, weight, torch.randint(0, vocabulary, (rows,), generator=g)


def dense(hidden, weight, targets, temperature):
    logits = (hidden @ weight.T).double() / temperature
    return logits.log_softmax(-1)[torch.arange(len(targets)), targets].float()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_head_is_a_dense_log_softmax(dtype, chunk, temperature):
    hidden, weight, targets = head_inputs(dtype=dtype)
    got = next_token_log_probs(hidden, weight, targets, chunk, temperature)
    assert got.dtype == torch.float32 and got.shape == (50,)
    # Logits reach about 20 here. In bf16 a chunk's product may round one of them another way than the whole one: 2^-8 of it.
    atol = 1e-5 if dtype == torch.float32 else 20 * 2**-8 / temperature
    torch.testing.assert_close(got, dense(hidden, weight, targets, temperature), rtol=1e-5, atol=atol)


def test_int32_targets_no_rows_and_no_gradient():
    hidden, weight, targets = head_inputs()
    got = next_token_log_probs(hidden, weight.requires_grad_(), targets.int(), 8)
    assert torch.equal(got, next_token_log_probs(hidden, weight, targets, 8)) and not got.requires_grad
    assert next_token_log_probs(hidden[:0], weight, targets[:0], 8).shape == (0,)


class Outputs(TorchDispatchMode):
    """The rows of every product with the vocabulary, and the most numbers in any tensor made inside."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if func.overloadpacket == torch.ops.aten.mm:
            self.products += [size[0] for size in sizes]
        else:
            # The weight transposed for the product is a view.
            self.largest = max([self.largest, *(size.numel() for size in sizes if func != torch.ops.aten.t.default)])
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_a_chunk_are_held(dtype, temperature):
    hidden, weight, targets = head_inputs(rows=50, dtype=dtype)
    with Outputs() as outputs:
        next_token_log_probs(hidden, weight, targets, 8, temperature)
    assert outputs.products == [8] * 6 + [2]
    assert outputs.largest <= 8 * len(weight)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda h, w, t: (h[0], w, t, 8), r"\[N, H\] and \[V, H\]"),
        (lambda h, w, t: (h[:, 1:], w, t, 8), r"\(50, 23\) and weight \(97, 24\)"),
        (lambda h, w, t: (h, w, t[1:], 8), "one for each of the 50 rows"),
        (lambda h, w, t: (h.bfloat16(), w, t, 8), "one float dtype"),
        (lambda h, w, t: (h, w, t, 0), "chunk=0"),
        (lambda h, w, t: (h, w, t, 8, 0.0), "temperature=0.0"),
        (lambda h, w, t: (h, w, t, 8, float("nan")), "temperature=nan"),
        (lambda h, w, t: (h, w, t - 100, 8), "targets are -100 to"),
        (lambda h, w, t: (h, w, t + 50, 8), "vocabulary of 97"),
    ],
)
def test_what_the_head_refuses(change, named):
    with pytest.raises(ValueError, match=named):
        next_token_log_probs(*change(*head_inputs()))


def test_the_kernel_of_flash_attn_is_called_as_its_library_says(monkeypatch):
    """A stand-in with the signature of flash-attn 2.8.3 (flash_attn/ops/triton/cross_entropy.py); no GPU is needed."""

    def cross_entropy_loss(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, **_):
        assert labels.dtype == torch.int64
        losses = torch.nn.functional.cross_entropy(logits.float() * logit_scale, labels, reduction="none")
        return losses, torch.zeros_like(losses)

    monkeypatch.setattr("distilled_rl.teacher.head._flash_attn_loss", lambda: cross_entropy_loss)
    name, rows = row_kernel(torch.device("cuda"))
    hidden, weight, targets = head_inputs()
    assert name == "flash-attn" and row_kernel(CPU)[0] == "torch"
    torch.testing.assert_close(rows(hidden @ weight.T, targets, 0.6), dense(hidden, weight, targets, 0.6))


def test_packed_rows_are_scored_as_each_alone(benchmark):
    settings = benchmark.Settings(10, 2, 64, 0.4, 160, 48, 1, 3)
    model = benchmark.build_teacher(benchmark.TINY, CPU, torch.float32, seed=0)
    rows = benchmark.draw(settings, benchmark.TINY["vocab_size"])
    packed = benchmark.pack(rows, settings.max_tokens, CPU)
    assert len(packed) > 1 and max(len(batch.lengths) for batch in packed) > 1
    got = benchmark.score(model, packed, settings.chunk)
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    for row, log_probs in zip(rows, got, strict=True):
        with torch.no_grad():
            logits = plain(row[None]).logits[0]
        want = logits.log_softmax(-1)[torch.arange(len(row) - 1), row[1:]]
        torch.testing.assert_close(log_probs[:-1], want, rtol=0, atol=1e-5)
        assert log_probs[-1] == 0
    chosen = benchmark.choose([len(row) for row in rows], settings.share)
    assert len(chosen) == 4
    needed = benchmark.score(model, benchmark.pack([rows[row] for row in chosen], settings.max_tokens, CPU), 48)
    for row, log_probs in zip(chosen, needed, strict=True):
        torch.testing.assert_close(log_probs, got[row], rtol=0, atol=1e-5)


def test_the_chosen_rows_hold_their_share_of_the_tokens(benchmark):
    settings = benchmark.Settings(64, 512, 4096, 0.4, 40_960, 2048, 1, 0)
    lengths = [len(row) for row in benchmark.draw(settings, 10)]
    chosen = benchmark.choose(lengths, 0.4)
    assert len(chosen) == 26  # 0.4 x 64 = 25.6
    assert sum(lengths[row] for row in chosen) / sum(lengths) == pytest.approx(0.4, abs=0.02)
    assert benchmark.choose(lengths, 1.0) == list(range(64))


def test_the_tiny_benchmark_reports_all_figures(benchmark, tmp_path):
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(tiny=True, rounds=1, out=out)
    report = json.loads(out.read_text())
    assert report["seconds"].keys() == report["peak_bytes"].keys() == {"body", "every", "needed", "copy"}
    assert report["attention"] == "rowwise_sdpa" and report["log_prob_kernel"] == "torch"
    assert report["parameters"] * 4 == report["weight_bytes"]
    assert report["head_difference"] <= 1e-5 and report["needed_difference"] <= 1e-5
    assert report["goals"] == {}


def test_a_missed_goal_is_one(benchmark):
    figures = {"head_share": 0.081, "needed_ratio": 0.45, "head_difference": 0.0}
    assert [(name, met) for name, _, _, met in benchmark.goals(figures)] == [
        ("head_share", False), ("needed_ratio", True), ("head_difference", True)
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_benchmark_meets_its_goals(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARK), "--no-assert", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    missed = [name for name, goal in json.loads(out.read_text())["goals"].items() if not goal["met"]]
    assert not missed, result.stdout
