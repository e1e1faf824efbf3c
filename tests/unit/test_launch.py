"""Starting a run: patience with a slow Ray, and the environment of a CPU run."""

import os

import pytest
from omegaconf import OmegaConf

from distilled_rl.config import SOCKET_BASE
from distilled_rl.launch import prepare_environment, with_patience

TOO_SLOW = "The current node timed out during startup. This could happen because ..."


def failing(messages: list[str], calls: list[str]):
    def run() -> None:
        calls.append("run")
        if messages:
            raise RuntimeError(messages.pop(0))

    return run


def test_a_slow_start_of_ray_is_tried_again():
    calls: list[str] = []
    with_patience(failing([TOO_SLOW, TOO_SLOW], calls), lambda: calls.append("shut down"))
    assert calls == ["run", "shut down", "run", "shut down", "run"]


def test_patience_ends_and_any_other_error_passes_at_once():
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="timed out during startup"):
        with_patience(failing([TOO_SLOW] * 5, calls), lambda: None)
    assert calls == ["run"] * 3
    with pytest.raises(RuntimeError, match="out of memory"):
        with_patience(failing(["out of memory"], calls), lambda: None)
    assert calls == ["run"] * 4


@pytest.mark.parametrize(
    ("device", "given", "threads"), [("cpu", None, True), ("cpu", "7", False), ("cuda", None, False)]
)
def test_environment_of_a_run(monkeypatch, tmp_path, device, given, threads):
    monkeypatch.setattr(os, "environ", {"VERL_PLATFORM": "cpu"} | ({"OMP_NUM_THREADS": given} if given else {}))
    prepare_environment(OmegaConf.create({"trainer": {"device": device}, "run": {"dir": str(tmp_path)}}))
    half = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert os.environ.get("OMP_NUM_THREADS") == (half if threads else given)
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "metrics-000.jsonl")


def run_config(tmp_path, **ray_init):
    run = {"trainer": {"device": "cuda"}, "run": {"dir": str(tmp_path)}}
    return OmegaConf.create(run | ({"ray_kwargs": {"ray_init": ray_init}} if ray_init else {}))


@pytest.mark.parametrize("ray_init", [{}, {"num_cpus": 2}, {"address": None}])
def test_each_run_with_a_ray_of_its_own_has_sockets_of_its_own(monkeypatch, tmp_path, ray_init):
    # the second run is started by a process of the first
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": ""})
    bases = []
    for _ in range(2):
        prepare_environment(run_config(tmp_path, **ray_init))
        bases.append(int(os.environ[SOCKET_BASE]))
    assert bases[0] != bases[1]
    # a machine's ranks are counted up from the base: fewer than 1000 of them never meet another run's
    assert all(base >= 0 and base % 1000 == 0 for base in bases)


@pytest.mark.parametrize("given", [None, "5000"])
@pytest.mark.parametrize(
    ("environment", "ray_init"),
    [({"RAY_ADDRESS": "10.0.0.1:6379"}, {}), ({}, {"address": "auto"}), ({}, {"address": "10.0.0.1:6379"})],
)
def test_in_a_cluster_that_is_there_the_sockets_are_left_alone(monkeypatch, tmp_path, given, environment, ray_init):
    monkeypatch.setattr(os, "environ", environment | ({SOCKET_BASE: given} if given else {}))
    prepare_environment(run_config(tmp_path, **ray_init))
    assert os.environ.get(SOCKET_BASE) == given
