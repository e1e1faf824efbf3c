"""The served teacher's result path: vLLM's containers, the client, and a real server on the CPU.

What needs a real engine runs in processes of its own (this file as a script, see `main`) and is read by many tests.
"""

import asyncio
import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distilled_rl.launch import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
from distilled_rl.processes import Watched, tail
from distilled_rl.teacher import vllm_server
from distilled_rl.teacher.specs import TeacherSpec
from distilled_rl.teacher.vllm_server import ScoringClient, even_shares, flat_prompt_log_probs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 420.0
# Ray's workers end by themselves when their cluster is gone; not in the same instant.
GRACE_SECONDS = 30.0
# Fewer tokens per step than the longest sequence has: vLLM scores those in chunks.
STEP_TOKENS, MAX_MODEL_LEN = 24, 64
LENGTHS = (1, 2, 7, 24, 25, 48, 49, 63)
K = 5


# --- vLLM's containers ---------------------------------------------------------------------------------------------------


def containers(tokens: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    """Return one prompt's log-probs as vLLM's dicts and as its flat form, filled as vllm/v1/engine/logprobs.py does."""
    from vllm.logprobs import append_logprobs_for_next_position, create_prompt_logprobs

    g = np.random.default_rng(seed)
    both = create_prompt_logprobs(False), create_prompt_logprobs(True)
    for _ in range(tokens - 1):
        ids = g.permutation(1000)[: k + 1]
        log_probs = -np.sort(g.exponential(2.0, k + 1).astype(np.float32))
        rank = k + 1
        if k and g.random() < 0.5:  # the prompt's own token, which comes first, is among the k most likely
            rank = int(g.integers(1, k + 1))
            ids[0], log_probs[0] = ids[rank], log_probs[rank]
        for container in both:
            append_logprobs_for_next_position(
                container, ids.tolist(), log_probs.tolist(), itertools.repeat(None), rank, k
            )
    return both


@pytest.mark.parametrize("tokens", [1, 2, 3, 700])
@pytest.mark.parametrize("k", [0, 1, 5, 64])
def test_the_flat_form_is_read_as_verl_reads_dicts(verl_on_cpu: None, k: int, tokens: int) -> None:
    from verl.workers.rollout.vllm_rollout.utils import extract_prompt_logprobs

    dicts, flat = containers(tokens, k)
    verls: dict[str, list] = {}
    extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=dicts), k, verls)  # type: ignore[arg-type]
    ids, log_probs = flat_prompt_log_probs(flat, k, tokens)
    assert ids.dtype == np.int32 and log_probs.dtype == np.float32 and ids.shape == (tokens, max(k, 1))
    assert ids.tolist() == verls["prompt_ids"]
    assert log_probs.tolist() == verls["prompt_logprobs"]


@pytest.mark.parametrize("k", [0, 5])
def test_more_numbers_than_fit_in_one_block(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    _, flat = containers(50, k)
    whole = flat_prompt_log_probs(flat, k)
    for block in (1, 7, 49 * (k + 1), 24 * (k + 1)):
        monkeypatch.setattr(vllm_server, "_BLOCK", block)
        for mine, expected in zip(flat_prompt_log_probs(flat, k), whole, strict=True):
            assert np.array_equal(mine, expected)


def test_log_probs_that_are_no_numbers_stay_what_they_are(verl_on_cpu: None) -> None:
    _, flat = containers(4, 0)
    flat.logprobs[:] = [float("nan"), float("-inf"), -1.0]
    log_probs = flat_prompt_log_probs(flat, 0)[1].flatten()
    assert np.isnan(log_probs[0]) and log_probs[1] == -np.inf and log_probs[2:].tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda flat: flat.token_ids.pop(), "24 token ids and 25 log-probs"),
        (lambda flat: flat.logprobs.append(-1.0), "25 token ids and 26 log-probs"),
        (lambda flat: flat.end_indices.__setitem__(2, 9), "not 5 entries for each of 5 tokens"),
        (lambda flat: flat.start_indices.__setitem__(2, 4), "not 5 entries"),
        (lambda flat: flat.start_indices.__setitem__(0, 1), "not 5 entries"),
        (lambda flat: flat.end_indices.pop(), "not 5 entries"),
        (lambda flat: flat.append({1: SimpleNamespace(logprob=-1.0, rank=1, decoded_token=None)}), "7 positions"),
        (lambda flat: flat.logprobs.__setitem__(3, None), "no number"),
        (lambda flat: flat.token_ids.__setitem__(3, "7"), "no number"),
        (lambda flat: flat.token_ids.__setitem__(3, 2**40), "no number"),
        (lambda flat: flat.start_indices.clear(), "0 positions"),
    ],
)
def test_a_container_of_another_shape_is_an_error(verl_on_cpu: None, damage: Any, message: str) -> None:
    _, flat = containers(6, 4)
    damage(flat)
    with pytest.raises(ValueError, match=message):
        flat_prompt_log_probs(flat, 4, 6)


def test_another_k_or_a_negative_one_is_an_error(verl_on_cpu: None) -> None:
    _, flat = containers(6, 4)
    with pytest.raises(ValueError, match="not 6 entries"):
        flat_prompt_log_probs(flat, 5)
    with pytest.raises(ValueError, match="k is -1"):
        flat_prompt_log_probs(flat, -1)


# --- The client ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(0, 5000), max_size=60), parts=st.integers(1, 9))
def test_shares_hold_every_sequence_once_and_about_as_many_tokens(lengths: list[int], parts: int) -> None:
    shares = even_shares(lengths, parts)
    assert len(shares) == parts and all(share == sorted(share) for share in shares)
    assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))
    loads = [sum(lengths[number] for number in share) for share in shares]
    # A part was the lightest when it got its last sequence, so no other has less than it had before.
    assert max(loads) - min(loads) <= max(lengths, default=0)


class FakeServer:
    """Answers as a server does: ids shifted left, the log-prob of a token minus its id."""

    def __init__(self, fault: Exception | None = None, delay: float = 0.0, progress: Sequence[int] = ()) -> None:
        self.asked: list[list[list[int]]] = []
        self.fault, self.delay, self.progress = fault, delay, list(progress)
        self.score = SimpleNamespace(remote=self._score)
        self.finished = SimpleNamespace(remote=self._finished)

    async def _score(self, arrays: list[np.ndarray], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        self.asked.append([array.tolist() for array in arrays])
        await asyncio.sleep(self.delay)
        if self.fault:
            raise self.fault
        ids = [np.append(array[1:], 0).astype(np.int32)[:, None] for array in arrays]
        return [(rows, -rows.astype(np.float32)) for rows in ids]

    async def _finished(self) -> int:
        if not self.progress:
            await asyncio.sleep(3600)
        return self.progress.pop(0) if len(self.progress) > 1 else self.progress[0]


def sequences(lengths: Sequence[int]) -> list[torch.Tensor]:
    return [torch.arange(1, length + 1) + 10 * number for number, length in enumerate(lengths)]


def test_the_client_keeps_the_order_and_asks_each_server_once() -> None:
    servers = [FakeServer(), FakeServer(), FakeServer()]
    rows = sequences([3, 9, 1, 8, 4])
    scored = asyncio.run(ScoringClient(servers).score(rows))
    assert [ids.flatten().tolist() for ids, _ in scored] == [[*row[1:].tolist(), 0] for row in rows]
    assert all(torch.equal(log_probs, -ids.float()) and ids.dtype == torch.int32 for ids, log_probs in scored)
    # longest first, each to the server with the fewest tokens so far: 9 | 8 | 4, 3, 1
    assert [[len(row) for row in asked] for server in servers for asked in server.asked] == [[9], [8], [3, 1, 4]]


def test_a_server_without_a_share_is_not_asked_and_no_server_is_an_error() -> None:
    servers = [FakeServer(), FakeServer()]
    assert len(asyncio.run(ScoringClient(servers).score(sequences([3])))) == 1
    assert [len(server.asked) for server in servers] == [1, 0]
    with pytest.raises(ValueError, match="without servers"):
        ScoringClient([])


def test_a_failure_is_raised_without_waiting_for_the_other_servers() -> None:
    servers = [FakeServer(delay=60), FakeServer(ConnectionError("gone"))]
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(ScoringClient(servers).score(sequences([3, 3])))
    assert time.monotonic() - start < 10


def test_a_server_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * vllm_server.PROBE_SECONDS < 60
    monkeypatch.setattr(vllm_server, "PROBE_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
        asyncio.run(ScoringClient([FakeServer(delay=60)]).score(sequences([3])))
    monkeypatch.setattr(vllm_server, "STALL_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"finished none for 0\.2 s"):
        asyncio.run(ScoringClient([FakeServer(delay=60, progress=[4])]).score(sequences([3])))
    # One that goes on finishing something may take as long as it likes.
    slow = FakeServer(delay=0.6, progress=range(1000))
    assert len(asyncio.run(ScoringClient([slow]).score(sequences([3])))) == 1


# --- The teacher ---------------------------------------------------------------------------------------------------------

SPEC = TeacherSpec(key=None, where="teacher", name="big", source="server", model="org/big")


def test_the_teacher_returns_the_fields_of_verls_server(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.scoring import server_fields
    from distilled_rl.teacher.served import ServedTeacher

    rows = sequences([3, 9, 1])
    fields = ServedTeacher(SPEC, [FakeServer(), FakeServer()]).score(rows)
    nested: Any = torch.nested.nested_tensor(rows, layout=torch.jagged)
    values = torch.cat([-row.roll(-1).float() for row in rows])
    log_probs = torch.nested.nested_tensor_from_jagged(values, nested.offsets(), min_seqlen=1, max_seqlen=9)
    expected = server_fields(log_probs, nested)
    assert fields.keys() == expected.keys() and fields.batch_size == expected.batch_size
    for key in expected.keys():
        assert fields[key].dtype == expected[key].dtype
        assert torch.equal(fields[key].offsets(), expected[key].offsets())
        assert torch.equal(fields[key].values(), expected[key].values()), key


def test_the_teacher_can_be_asked_where_an_event_loop_runs(verl_on_cpu: None) -> None:
    from distilled_rl.teacher.served import ServedTeacher

    async def ask() -> Any:
        return ServedTeacher(SPEC, [FakeServer()]).score(sequences([3, 2]))

    assert asyncio.run(ask()).batch_size == (2,)


@pytest.mark.parametrize("answer", [[], [(np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32))]])
def test_an_answer_of_another_size_is_an_error(verl_on_cpu: None, answer: list) -> None:
    from distilled_rl.teacher.served import ServedTeacher

    server = FakeServer()

    async def other(*_: Any) -> list:
        return answer

    server.score.remote = other
    with pytest.raises(
        RuntimeError, match=r"the teacher big \(org/big.*(0 results for 1|\[2\]… tokens instead of \[3\])"
    ):
        ServedTeacher(SPEC, [server]).score(sequences([3]))


def test_a_failing_server_is_named(verl_on_cpu: None) -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

    from distilled_rl.teacher.served import ServedTeacher

    def task_error(cause: Exception) -> Exception:
        return RayTaskError("score", "Traceback", cause).as_instanceof_cause()

    for fault, kind, message in (
        (ActorDiedError(), RuntimeError, r"big \(org/big.* lost a server: .*start the run again"),
        (ActorUnavailableError("busy", None), RuntimeError, r"big \(org/big.* lost a server"),
        (
            task_error(RuntimeError("engine")),
            RuntimeError,
            r"big \(org/big.*failed: RuntimeError: engine; .*start the run",
        ),
        (task_error(ValueError("too long")), ValueError, r"big \(org/big.*cannot score the batch: too long"),
        (OSError("wire"), RuntimeError, r"big \(org/big.*failed: OSError: wire"),
    ):
        with pytest.raises(kind, match=message) as caught:
            ServedTeacher(SPEC, [FakeServer(fault)]).score(sequences([3]))
        assert type(caught.value) is kind


# --- A real server -------------------------------------------------------------------------------------------------------


def left_over(mark: str) -> list[str]:
    """Return the live processes that inherited ``mark``."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DISTILLED_RL_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return left


def run_script(part: str, folder: Path, timeout: float = LIMIT_SECONDS) -> dict[str, Any]:
    """Run ``main`` of this file in a process tree of its own, of which nothing is left, and return its results."""
    log, mark = folder / f"{part}.log", uuid4().hex
    environment = {
        "DISTILLED_RL_TEST_MARK": mark,
        **QUIET_ENVIRONMENT,
        **CPU_ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    watched = Watched([sys.executable, str(Path(__file__).resolve()), part, str(folder)], log, environment)
    status = watched.wait(lambda: None, timeout=timeout, interval=0.2)
    assert status == 0, f"exit status {status}; the end of the log:\n{tail(log, 60)}"
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := left_over(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"processes left behind: {left}"
    return torch.load(folder / f"{part}.pt", weights_only=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from distilled_rl.miniature.models import new_model, save_model
    from distilled_rl.miniature.tokenizer import save_tokenizer

    folder = tmp_path_factory.mktemp("teacher_path")
    for name in ("student", "teacher"):
        save_model(new_model(name, seed=1), folder / name)
        save_tokenizer(folder / name)
    return folder


@pytest.fixture(scope="module")
def served(models: Path) -> dict[str, Any]:
    return run_script("served", models)


@pytest.fixture(scope="module")
def engine(models: Path) -> dict[str, Any]:
    return run_script("engine", models)


def prompts() -> list[torch.Tensor]:
    from distilled_rl.miniature.tokenizer import VOCABULARY

    g = torch.Generator().manual_seed(3)
    return [torch.randint(len(VOCABULARY), (length,), generator=g) for length in LENGTHS]


def expected_log_probs(models: Path) -> list[torch.Tensor]:
    """Return the teacher's log-softmax over the vocabulary, float32 [S, V] per prompt, by Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(row[None]).logits[0].log_softmax(-1) for row in prompts()]


def own_tokens(log_probs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part[:-1].gather(1, row[1:, None]) for part, row in zip(log_probs, prompts(), strict=True)]


def test_a_real_servers_scores_are_those_of_hugging_face(models: Path, served: dict[str, Any]) -> None:
    expected = own_tokens(expected_log_probs(models))
    for row, ids, log_probs, right in zip(prompts(), served["ids"], served["log_probs"], expected, strict=True):
        assert ids.flatten().tolist() == [*row[1:].tolist(), 0]
        torch.testing.assert_close(log_probs[:-1], right, rtol=0, atol=1e-4)
        assert log_probs[-1] == 0


def test_the_most_likely_tokens_are_those_of_hugging_face(models: Path, served: dict[str, Any]) -> None:
    for (ids, log_probs), right in zip(served["most_likely"], expected_log_probs(models), strict=True):
        assert ids.shape == log_probs.shape == (len(right), K)
        torch.testing.assert_close(log_probs[:-1], right[:-1].topk(K).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(log_probs[:-1], right[:-1].gather(1, ids[:-1].long()), rtol=0, atol=1e-4)


def test_verls_agent_loops_get_the_same_from_the_same_servers(served: dict[str, Any]) -> None:
    scored = list(zip(served["ids"], served["log_probs"], strict=True))
    for name, expected in (("verl", scored), ("verl_most_likely", served["most_likely"])):
        for (ids, log_probs), (right_ids, right) in zip(served[name], expected, strict=True):
            assert ids.dtype == torch.int32 and log_probs.dtype == torch.float32
            assert torch.equal(ids, right_ids)
            torch.testing.assert_close(log_probs, right, rtol=0, atol=1e-5)


def test_the_servers_way_to_verls_fields_is_verls_own(served: dict[str, Any]) -> None:
    """What ScoringServer.generate returns is what verl's generate returns for the same request, and others go to it."""
    assert served["generate_types"] == {"own": "ndarray", "verl": "list"}
    for field in ("prompt_ids", "prompt_logprobs"):
        own, verls = (torch.tensor(served["generate"][way][field]) for way in ("own", "verl"))
        torch.testing.assert_close(own.double(), verls.double(), rtol=0, atol=1e-5)
    assert len(served["generated"]) == 3


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("too_long", ValueError, r"a sequence has 64 tokens.*max_model_len of 64; raise that"),
        ("empty", ValueError, r"a sequence has 0 tokens"),
        ("unknown_token", ValueError, r"vLLM refuses a sequence of 2 tokens"),
        ("engine_killed", RuntimeError, r"engine.*start the run again"),
        ("engine_dead", RuntimeError, r"engine.*start the run again"),
        ("actor_killed", RuntimeError, r"has lost a server"),
        ("actor_dead", RuntimeError, r"has lost a server"),
    ],
)
def test_what_a_real_server_cannot_do_is_named_within_a_minute(
    served: dict[str, Any], case: str, kind: type, message: str
) -> None:
    error, text, seconds = served["errors"][case]
    assert error == kind.__name__ and seconds < 60
    assert re.search(r"^the teacher big \(org/big, in vLLM servers\)", text) and re.search(message, text), text


def test_a_step_never_has_more_logits_rows_than_the_bound_of_the_peak(engine: dict[str, Any]) -> None:
    runs = engine["runs"]
    assert runs[STEP_TOKENS]["steps"] > runs[MAX_MODEL_LEN * len(LENGTHS)]["steps"]  # the prompts were in chunks
    for budget, run in runs.items():
        # scoring_peak_bytes: at most `max_num_batched_tokens` rows for prompts, and the sampler's, one per request
        assert max(run["prompt_rows"]) <= budget
        assert max(run["step_rows"]) <= budget
        assert sum(run["prompt_rows"]) == sum(length - 1 for length in LENGTHS)
    # The bound is not a loose one: a long prompt fills a whole step.
    assert max(runs[STEP_TOKENS]["prompt_rows"]) == STEP_TOKENS


def test_chunked_prompts_have_the_log_probs_of_whole_ones(models: Path, engine: dict[str, Any]) -> None:
    small, large = (engine["runs"][budget]["log_probs"] for budget in (STEP_TOKENS, MAX_MODEL_LEN * len(LENGTHS)))
    for chunked, whole, right in zip(small, large, own_tokens(expected_log_probs(models)), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)
        torch.testing.assert_close(chunked[:-1], right, rtol=0, atol=1e-4)


# --- What the scripts run ------------------------------------------------------------------------------------------------


def score_in_engine(folder: Path) -> dict[str, Any]:
    """Score the prompts with vLLM in this process, at a small and a large budget, counting rows of logits.

    ``prompt_rows``: of each call of the model's head for prompt log-probs. ``step_rows``: their sum in each step.
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.worker import gpu_model_runner

    runner: Any = gpu_model_runner.GPUModelRunner
    get, results = runner._get_prompt_logprobs_dict, {}
    for budget in (STEP_TOKENS, MAX_MODEL_LEN * len(LENGTHS)):
        prompt_rows: list[int] = []
        step_rows: list[int] = []

        def counted(self: Any, *args: Any, rows: list[int] = prompt_rows, steps: list[int] = step_rows) -> Any:
            compute, before = self.model.compute_logits, len(rows)

            def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
                rows.append(len(hidden_states))
                return compute(hidden_states)

            self.model.compute_logits = compute_logits
            try:
                return get(self, *args)
            finally:
                del self.model.compute_logits
                steps.append(sum(rows[before:]))

        runner._get_prompt_logprobs_dict = counted
        llm = LLM(
            str(folder / "teacher"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=len(LENGTHS),
            enable_chunked_prefill=True,
            kv_cache_memory_bytes=2**26,
            distributed_executor_backend="uni",
        )
        assert type(llm.llm_engine.engine_core).__name__ == "InprocClient"
        params = SamplingParams(prompt_logprobs=0, flat_logprobs=True, max_tokens=1, detokenize=False)
        prompt_rows.clear()
        step_rows.clear()
        outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in prompts()], params)  # type: ignore[arg-type]
        flat: list[Any] = [output.prompt_logprobs for output in outputs]
        results[budget] = {
            "prompt_rows": list(prompt_rows),
            "step_rows": list(step_rows),
            "steps": len(step_rows),
            "log_probs": [torch.tensor(flat_prompt_log_probs(part, 0)[1]) for part in flat],
        }
    return {"runs": results}


def score_served(folder: Path) -> dict[str, Any]:
    """Start a teacher pool as verl's trainer does, ask it in every way, and then kill its engine and its server."""
    import threading

    import ray
    import verl  # noqa: F401

    from distilled_rl import plugin

    plugin.ensure_loaded()
    from omegaconf import OmegaConf
    from verl.experimental.teacher_loop import MultiTeacherModelManager
    from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
    from verl.single_controller.ray import ResourcePoolManager

    from distilled_rl.recipe import compose
    from distilled_rl.teacher.served import ServedTeacher

    vllm_server.register()
    inference = "distillation.teacher_models.teacher_model.inference"
    config = compose(
        "distilled_rl",
        [
            *("scale=cpu", "student=local", "teacher=local", "dataset=miniature"),
            *(f"student.model={folder}/student", f"teacher.model={folder}/teacher", f"dataset.dir={folder}"),
            *(f"{inference}.name={vllm_server.SCORING_ENGINE}", f"{inference}.max_num_batched_tokens={STEP_TOKENS}"),
            *(f"{inference}.max_num_seqs={len(LENGTHS)}", f"{inference}.max_model_len={MAX_MODEL_LEN}"),
            f"{inference}.enable_chunked_prefill=true",
        ],
    )
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))  # type: ignore[arg-type]
    pools = ResourcePoolManager(resource_pool_spec={"teacher_pool": [1]}, mapping={})
    pools.create_resource_pool()
    manager = MultiTeacherModelManager(config, pools.resource_pool_dict["teacher_pool"])
    [(key, servers)] = manager.server_handles.items()
    print("server ready under the key", key, flush=True)
    teacher, rows = ServedTeacher(SPEC, servers), prompts()
    results: dict[str, Any] = {"key": key, "errors": {}}

    start = time.monotonic()
    fields = teacher.score(rows)
    print(f"scored in {time.monotonic() - start:.2f} s", flush=True)
    results |= {"ids": fields["teacher_ids"].unbind(), "log_probs": fields["teacher_logprobs"].unbind()}
    results["most_likely"] = asyncio.run(ScoringClient(servers).score(rows, K))

    async def as_agent_loops_do(topk: int | None) -> list[Any]:
        asker = AsyncTeacherLLMServerManager(config, manager.get_client())
        if topk is not None:  # as verl's forward_kl_topk does
            asker.distillation_loss_config = SimpleNamespace(loss_settings=SimpleNamespace(use_topk=True), topk=topk)  # type: ignore[assignment]
        return await asyncio.gather(*(asker.compute_teacher_logprobs_single(row.tolist()) for row in rows))

    results["verl"] = asyncio.run(as_agent_loops_do(None))
    results["verl_most_likely"] = asyncio.run(as_agent_loops_do(K))

    [server] = servers
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2, "detokenize": False}
    tokens = rows[-1].tolist()
    own: Any = ray.get(server.generate.remote(tokens, dict(params), "a"))
    # Anything beyond the plain request, such as a priority, goes to verl's own method.
    verls: Any = ray.get(server.generate.remote(tokens, dict(params), "b", priority=0))
    results["generate"] = {"own": own.extra_fields, "verl": verls.extra_fields}
    results["generate_types"] = {
        way: type(output.extra_fields["prompt_ids"]).__name__ for way, output in (("own", own), ("verl", verls))
    }
    plain = {"max_tokens": 3, "temperature": 1.0, "ignore_eos": True}
    generated: Any = ray.get(server.generate.remote(rows[2].tolist(), plain, "c"))
    results["generated"] = generated.token_ids

    def fails(case: str, asked: list[torch.Tensor], kill: Any = None) -> None:
        start = time.monotonic()
        try:
            if kill:
                threading.Timer(0.3, kill).start()
            teacher.score(asked)
        except Exception as error:
            results["errors"][case] = (type(error).__name__, str(error), time.monotonic() - start)
            print(f"{case}: {time.monotonic() - start:.1f} s, {error}", flush=True)

    fails("too_long", [rows[0], torch.zeros(MAX_MODEL_LEN, dtype=torch.long)])
    fails("empty", [rows[0][:0]])
    fails("unknown_token", [torch.tensor([1, 10**6])])
    actor = psutil.Process(ray.get(server.__ray_call__.remote(_process_id)))
    [core] = [child for child in actor.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    fails("engine_killed", rows * 500, core.kill)
    fails("engine_dead", rows)
    ray.get(server.__ray_call__.remote(_hold_requests))  # the next call is one that the server is still busy with
    fails("actor_killed", rows, actor.kill)
    fails("actor_dead", rows)
    ray.shutdown()
    return results


def _process_id(_server: Any) -> int:
    import os

    return os.getpid()


def _hold_requests(server: Any) -> None:
    """Close verl's gate, as ``abort_all_requests`` does."""
    server._submission_paused = True
    server._resume_event.clear()


def main(part: str, folder: Path) -> None:
    results = {"engine": score_in_engine, "served": score_served}[part](folder)
    torch.save(results, folder / f"{part}.pt")
    print(json.dumps({"part": part, "done": True}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
