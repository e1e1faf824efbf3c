"""The hybrid worker without Ray: the update that leaves responses out against the one that does not, and its sockets."""

import os
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.multiprocessing.spawn import spawn

from tests.integration.test_trainer import nested

pytestmark = pytest.mark.integration

LEARNING_RATE = 1e-3
SOCKET_BASE = "VERL_ZMQ_BASE_TRAINER_RANK"
PROMPTS, RESPONSES = [3, 9, 1, 5, 2, 7, 4, 6], [4, 1, 6, 2, 9, 3, 5, 2]
AGGREGATIONS: list[dict[str, Any]] = [
    {"loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum"},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 12},
    {"loss_agg_mode": "token-sum"},
]
# Fixed ones of two rows, and dynamic ones: [B, j] sequences are 4 to 11 tokens long.
MICRO_BATCHES: list[dict[str, Any]] = [
    {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    {"use_dynamic_bsz": True, "max_token_len_per_gpu": 14},
]
FIXED, DYNAMIC = MICRO_BATCHES
# On two ranks: which rows of each have an advantage, how the loss is aggregated, and the micro-batches.
TWO_RANKS: dict[str, tuple[tuple[list[int], list[int]], dict[str, Any], dict[str, Any]]] = {
    **{f"uneven, {mode['loss_agg_mode']}": (([0, 3, 6], [5]), mode, DYNAMIC) for mode in AGGREGATIONS},
    "uneven, fixed": (([0, 3, 6], [5]), AGGREGATIONS[1], FIXED),
    "none on one rank": (([], [1, 2]), AGGREGATIONS[1], DYNAMIC),
    "none on one rank, fixed": (([], [1, 2]), AGGREGATIONS[0], FIXED),
    "none": (([], []), AGGREGATIONS[1], DYNAMIC),
    "none, fixed": (([], []), AGGREGATIONS[0], FIXED),
}


def batch(live: list[int], seed: int = 0) -> TensorDict:
    """Eight responses to prompts of their own, of which those in ``live`` have an advantage.

    The third token of every longer response is not the model's, and has an advantage all the same.
    """
    random = torch.Generator().manual_seed(seed)
    fields: dict[str, list[torch.Tensor]] = {}
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = torch.randint(3, 14, (prompt + response,), generator=random)
        mask = torch.ones(response, dtype=torch.long)
        advantages = torch.randn(response, generator=random) * (row in live)
        if response > 3:
            mask[2], advantages[2] = 0, 5.0
        values = {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": -2.8 + 0.2 * torch.randn(response, generator=random),
            "advantages": advantages,
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
    return TensorDict({name: nested(rows) for name, rows in fields.items()}, batch_size=len(PROMPTS))


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a Ray worker finds in its environment."""
    values = {"RANK": rank, "WORLD_SIZE": ranks, "RAY_LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in values.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def actor_node(model: Path) -> Any:
    """``actor_rollout_ref`` of a CPU run with a large step and a weight decay."""
    from distilled_rl.recipe import compose

    overrides = ["scale=cpu", "student=local", "teacher=none", "dataset=miniature", f"student.model={model}"]
    # no clipping: it would hide a gradient of the right direction and the wrong size
    optimizer = {"lr": LEARNING_RATE, "weight_decay": 0.1, "clip_grad": 1e6}
    config = compose(
        "grpo", [*overrides, *(f"actor_rollout_ref.actor.optim.{key}={value}" for key, value in optimizer.items())]
    )
    return OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref, resolve=True))


class Update:
    """Updates of one worker, each from the same weights and a new optimizer."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.engine = worker.actor.engine
        self.parameters = list(self.engine.module.parameters())
        self.start = [local(parameter).clone() for parameter in self.parameters]
        self.gradient = torch.zeros(0)

    def keep_gradient(self, *_: Any) -> None:
        """Called before each step: verl clears the gradients afterwards."""
        self.gradient = flat([local(parameter.grad) for parameter in self.parameters])

    def __call__(
        self, *data: TensorDict, skip: bool | None, ranks: int = 1, mini_batches: int = 1, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Update on each of ``data`` in turn; return the weights' change, the last step's gradient, and the last metrics.

        ``skip`` None: as a trainer that knows of no skipping asks. Settings of the loss are its configuration's; others are
        told with the batch.
        """
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import FSDPActorConfig
        from verl.workers.utils.losses import ppo_loss

        from distilled_rl.config import SKIP_KEY

        self.engine.optimizer.state.clear()
        loss = {key: settings.pop(key) for key in ("loss_agg_mode", "loss_scale_factor") if key in settings}
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, **loss)
        self.worker.set_loss_fn(partial(ppo_loss, config=config))
        metrics: dict[str, Any] = {}
        hook = self.engine.optimizer.register_step_pre_hook(self.keep_gradient)
        for part in data:
            size = len(part) * ranks // mini_batches
            told = {"global_batch_size": size, "mini_batch_size": size, "temperature": 1.0, "epochs": 1, **settings}
            if skip is not None:
                told[SKIP_KEY] = skip
            part = part.clone()
            tu.assign_non_tensor(part, calculate_entropy=True, **told)
            metrics = tu.get(self.worker.update_actor(part), "metrics")
        hook.remove()
        change = [local(now) - then for now, then in zip(self.parameters, self.start, strict=True)]
        for parameter, value in zip(self.parameters, self.start, strict=True):
            local(parameter).copy_(value)
        return flat(change), self.gradient, metrics


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a parameter or gradient."""
    return tensor.detach().to_local()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copies of these in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from distilled_rl.miniature.models import new_model, save_model

    folder = tmp_path_factory.mktemp("student")
    save_model(new_model("student", seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def workers(verl_on_cpu: None, model: Path) -> Iterator[tuple[Any, Any]]:
    """This package's hybrid worker with its rollout, and verl's actor, in this process as the only rank."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from distilled_rl.worker import DistilledRLWorker

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(0, 1, free_port()), SOCKET_BASE: "7000"}.items():
            patch.setenv(name, value)
        job = SimpleNamespace(get_job_id=lambda: "01000000")
        patch.setattr("ray.get_runtime_context", lambda: job)
        ours = DistilledRLWorker(config=actor_node(model), role="actor_rollout")
        theirs = ActorRolloutRefWorker(config=actor_node(model), role="actor")
        for worker in (ours, theirs):
            worker.init_model()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield ours, theirs
        torch.set_num_threads(threads)
        torch.distributed.destroy_process_group()


def agree(kept: tuple[torch.Tensor, ...], whole: tuple[torch.Tensor, ...]) -> None:
    """Assert that two updates are one, up to the order in which float32 gradients were added up."""
    torch.testing.assert_close(kept[1], whole[1], rtol=1e-4, atol=2e-6 * float(whole[1].abs().max()))
    # Adam's first step is lr * g / (|g| + eps): a gradient of eps' size turns its own rounding into a part of lr
    assert (kept[0] - whole[0]).abs().max() < 0.05 * LEARNING_RATE
    assert (kept[0] - whole[0]).abs().mean() < 1e-5 * LEARNING_RATE
    assert whole[0].abs().max() > 1e-3 * LEARNING_RATE


def test_the_actor_is_this_packages(workers: tuple[Any, Any]) -> None:
    from verl.workers.engine_workers import TrainingWorker

    from distilled_rl.worker import ActorWorker

    assert type(workers[0].actor) is ActorWorker and type(workers[1].actor) is TrainingWorker


@pytest.mark.parametrize("micro", MICRO_BATCHES, ids=["fixed", "dynamic"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda mode: mode["loss_agg_mode"])
def test_an_update_without_the_others_is_the_whole_update(
    workers: tuple[Any, Any], aggregation: dict[str, Any], micro: dict[str, Any]
) -> None:
    update, data = Update(workers[0]), batch([0, 4, 5])
    *whole, plain = update(data, skip=False, **aggregation, **micro)
    *kept, metrics = update(data, skip=True, **aggregation, **micro)
    agree(tuple(kept), tuple(whole))
    # three rows are two fixed micro-batches of two
    assert metrics["skipped_response_fraction"] == [0.5 if micro["use_dynamic_bsz"] is False else 0.625]
    assert plain["skipped_response_fraction"] == [0]
    for name in ("loss", "grad_norm", "actor/pg_loss"):
        assert metrics[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name
    assert "actor/entropy_loss" in plain and "actor/entropy_loss" not in metrics


def test_packed_sequences(workers: tuple[Any, Any]) -> None:
    update, data = Update(workers[0]), batch([0, 4, 5])
    settings = {"use_remove_padding": True, **DYNAMIC}
    agree(update(data, skip=True, **settings)[:2], update(data, skip=False, **settings)[:2])


@pytest.mark.parametrize("live", [[1], [2, 7], [0, 2, 4, 6]])
def test_each_mini_batch_of_each_epoch_leaves_its_own_out(workers: tuple[Any, Any], live: list[int]) -> None:
    update, data = Update(workers[0]), batch(live)
    settings = {"mini_batches": 2, "epochs": 2, "dataloader_kwargs": {"shuffle": True}, **DYNAMIC}
    *whole, _ = update(data, skip=False, **settings)
    *kept, metrics = update(data, skip=True, **settings)
    agree(tuple(kept), tuple(whole))
    fractions = metrics["skipped_response_fraction"]
    # a mini-batch of four without an advantage keeps one row
    assert len(fractions) == 4 and sum(fractions) >= 4 - 2 * max(len(live), 2) / 4 - 1


@pytest.mark.parametrize("micro", MICRO_BATCHES, ids=["fixed", "dynamic"])
def test_without_any_advantage_the_optimizer_steps_all_the_same(
    workers: tuple[Any, Any], micro: dict[str, Any]
) -> None:
    update, moved, still = Update(workers[0]), batch([0, 4, 5]), batch([])
    *whole, _ = update(moved, still, skip=False, **micro)
    *kept, metrics = update(moved, still, skip=True, **micro)
    assert metrics["skipped_response_fraction"] == [0.875]
    assert metrics["loss"] == [0] and not kept[1].any() and not whole[1].any()
    agree(tuple(kept), tuple(whole))
    first = update(moved, skip=True, **micro)[0]
    assert (kept[0] - first).abs().max() > 0.1 * LEARNING_RATE  # moments and weight decay


@pytest.mark.parametrize("skip", [None, False, True])
def test_where_nothing_is_left_out_it_is_verls_own_update_to_the_bit(
    workers: tuple[Any, Any], skip: bool | None
) -> None:
    data = batch(list(range(8)) if skip else [0, 4])
    for aggregation in AGGREGATIONS:
        ours = Update(workers[0])(data, skip=skip, **aggregation, **DYNAMIC)
        theirs = Update(workers[1])(data, skip=None, **aggregation, **DYNAMIC)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and ours[0].any()
        assert ours[2]["loss"] == theirs[2]["loss"] and ours[2]["skipped_response_fraction"] == [0]


def test_a_row_that_is_not_a_number_is_kept(workers: tuple[Any, Any]) -> None:
    data = batch([0, 4])
    data["advantages"].values()[RESPONSES[0]] = float("nan")  # the one token of row 1
    update = Update(workers[0])
    *_, metrics = update(data, skip=True, **DYNAMIC)
    assert metrics["skipped_response_fraction"] == [0.625]
    assert all(value != value for value in metrics["loss"])


def test_the_flops_are_those_of_the_rows_that_are_computed(
    workers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[list[int]] = []

    def estimate(tokens: list[int], *_: Any, **__: Any) -> tuple[float, float]:
        counted.append(tokens)
        return 1.0, 1.0

    monkeypatch.setattr(workers[0].actor.flops_counter, "estimate_flops", estimate)
    Update(workers[0])(batch([2, 5]), skip=True, **DYNAMIC)
    assert counted == [[PROMPTS[row] + RESPONSES[row] for row in (2, 5)]]


def two_ranks(rank: int, port: int, model: Path, results: Path) -> None:
    """Update with and without, on two data-parallel ranks; write what each rank ends with."""
    import verl  # noqa: F401

    from distilled_rl import plugin
    from distilled_rl.worker import DistilledRLWorker

    plugin.ensure_loaded()
    torch.set_num_threads(1)
    os.environ.update(environment(rank, 2, port))
    worker = DistilledRLWorker(config=actor_node(model), role="actor")
    worker.init_model()
    update, written = Update(worker), {}
    for name, (live, aggregation, micro) in TWO_RANKS.items():
        data = [batch(live[rank], seed=2 + rank)]
        if not any(live):
            data.insert(0, batch([0, 4, 5], seed=rank))  # for moments that go on
        written[name] = [update(*data, skip=skip, ranks=2, **aggregation, **micro) for skip in (True, False)]
    torch.save(written, results / f"{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # taking the interpreter apart lasts longer than the updates


@pytest.fixture(scope="module")
def by_rank(verl_on_cpu: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each of two ranks, both updates of every case."""
    results = tmp_path_factory.mktemp("ranks")
    arguments = (free_port(), model, results)
    context: Any = spawn(two_ranks, args=arguments, nprocs=2, join=False)
    deadline = time.monotonic() + 240
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the two ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_ranks_with_unequal_shares_make_the_whole_update(by_rank: list[dict[str, Any]], case: str) -> None:
    live, _, micro = TWO_RANKS[case]
    most = max(1, *(len(rows) for rows in live))
    if micro is FIXED and most > 1:
        most += most % 2
    for written in by_rank:
        kept, whole = written[case]
        agree(kept[:2], whole[:2])
        assert kept[2]["skipped_response_fraction"] == [1 - most / 8]
        for name in ("loss", "grad_norm", "actor/pg_loss"):
            assert kept[2][name] == pytest.approx(whole[2][name], rel=1e-5, abs=1e-6), name
        assert whole[1].any() == any(live)


def test_has_advantage(verl_on_cpu: None) -> None:
    from distilled_rl.worker import has_advantage

    nan, inf = float("nan"), float("inf")
    rows = [[0, 0], [0, -0.0, 0], [0, 1e-30], [nan], [0, inf], [], [2, 0], [nan, 1]]
    masks = [[1, 1], [1, 1, 1], [1, 1], [1], [1, 1], [], [0, 1], [0, 0]]
    live = has_advantage(
        nested([torch.tensor(row, dtype=torch.float32) for row in rows]), nested(list(map(tensor, masks)))
    )
    assert live.tolist() == [False, False, True, True, True, False, False, False]


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)


@pytest.mark.parametrize(
    ("live", "wanted", "kept"),
    [("0101", 2, [1, 3]), ("0101", 3, [0, 1, 3]), ("0000", 1, [0]), ("1111", 4, [0, 1, 2, 3]), ("0010", 2, [0, 2])],
)
def test_kept_rows(verl_on_cpu: None, live: str, wanted: int, kept: list[int]) -> None:
    from distilled_rl.worker import kept_rows

    assert kept_rows([row == "1" for row in live], wanted) == kept


@pytest.mark.parametrize("limit", range(1, 9))
def test_whole_micro_batches(verl_on_cpu: None, limit: int) -> None:
    from distilled_rl.worker import whole_micro_batches

    for batch_size in (limit, 3 * limit):
        for rows in range(1, batch_size + 1):
            wanted, size = whole_micro_batches(rows, limit)
            assert rows <= wanted <= batch_size and size <= limit and wanted % size == 0
            assert (
                wanted // size == -(-rows // limit) and wanted - rows < wanted // size
            )  # no more of them, and few to fill up


def receivers_socket(monkeypatch: pytest.MonkeyPatch, rank: int, **base: str) -> str:
    """The name at which verl's extension of vLLM's worker waits."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    monkeypatch.setattr(os, "environ", {"VERL_RAY_JOB_ID": "01000000", "VERL_REPLICA_RANK": "0", **base})
    extension: Any = object.__new__(vLLMColocateWorkerExtension)
    extension.local_rank, extension.model_runner = rank, None
    return extension._get_zmq_handle()


def test_the_worker_and_vllm_meet_at_a_socket_of_their_own(
    workers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = workers[0].rollout.zmq_handle
    assert handle == receivers_socket(monkeypatch, 0, **{SOCKET_BASE: "7000"})
    assert handle != receivers_socket(monkeypatch, 0)
    assert handle != receivers_socket(monkeypatch, 0, **{SOCKET_BASE: "8000"})


def test_own_socket(verl_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from distilled_rl.worker import own_socket

    for base, rank in ((0, 0), (5000, 3), (1000 * (2**31 - 1), 7)):
        theirs = receivers_socket(monkeypatch, rank)
        mine = own_socket(theirs, base)
        assert mine == receivers_socket(monkeypatch, rank, **{SOCKET_BASE: str(base)})
        assert len(mine.removeprefix("ipc://")) < 107  # what a Unix socket's name may have
    for name in ("ipc:///tmp/a-rank-x.sock", "ipc:///tmp/a-rank-1", "ipc:///tmp/1.sock", "ipc:///tmp/a-rank-.sock"):
        with pytest.raises(ValueError, match="without a rank at its end"):
            own_socket(name, 1000)


def test_verl_names_and_offsets_its_sockets_nowhere_else(verl_on_cpu: None) -> None:
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    from distilled_rl.config import SOCKET_BASE as used

    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    rollout = "workers/rollout/vllm_rollout"
    assert used == SOCKET_BASE
    assert {name for name, text in sources.items() if used in text} == {
        f"{rollout}/utils.py",
        f"{rollout}/vllm_pd_replica.py",
    }
    names = re.compile(r'f"ipc:///tmp/rl-colocate-zmq-.*"')
    assert {name: names.findall(text) for name, text in sources.items() if names.search(text)} == {
        f"{rollout}/vllm_rollout.py": [
            'f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock"'
        ],
        f"{rollout}/utils.py": [
            'f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{replica_rank}-rank-{trainer_rank}.sock"'
        ],
    }
    # Ray's processes inherit it: verl sets it for none but the servers of a disaggregated rollout
    assert used not in get_ppo_ray_runtime_env()["env_vars"]
