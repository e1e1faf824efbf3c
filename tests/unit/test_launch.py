"""Starting a run: patience with a slow Ray, and the environment of a CPU run."""

import os

import pytest
from omegaconf import OmegaConf

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
