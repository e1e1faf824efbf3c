"""verl's own GRPO, through verl's own entry point, with the plugin installed but not chosen, and with it switched off."""

import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distilled_rl.launch import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
from tests.e2e.conftest import ROOT, run_command

pytestmark = pytest.mark.e2e

# summation order differs: rows arrive as they finish
TOLERANCE = {"rel": 1e-5, "abs": 1e-6}


def stock_steps(work: Path, miniature: Path, plugins: str) -> list[dict]:
    """Two steps of ``python -m verl.trainer.main_ppo`` with ``VERL_USE_EXTERNAL_PLUGINS=plugins``."""
    from distilled_rl.recipe import compose

    config = compose(
        "grpo",
        ["scale=cpu", "student=miniature", "dataset=miniature", f"dataset.dir={miniature}", "data.train_batch_size=16"],
    )
    log = work / f"stock-{plugins}.jsonl"
    folder = work / "stock-config"
    folder.mkdir(exist_ok=True)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    for node in ("distilled_rl", "student", "teacher", "dataset", "run", "seed"):
        del plain[node]
    plain["trainer"].update(  # type: ignore[union-attr]
        total_training_steps=2,
        save_freq=-1,
        test_freq=-1,
        val_before_train=False,
        resume_mode="disable",
        logger=["file"],
    )
    plain["trainer"]["v1"]["trainer_mode"] = "sync"  # type: ignore[index]
    plain["trainer"]["default_local_dir"] = str(work / "stock-checkpoints")  # type: ignore[index]
    plain["distillation"]["distillation_loss"]["loss_mode"] = "k3"  # type: ignore[index]
    plain["reward"]["num_workers"] = 1  # type: ignore[index]
    plain["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 16  # type: ignore[index]
    plain["actor_rollout_ref"]["rollout"]["agent"]["agent_loop_manager_class"] = (  # type: ignore[index]
        "tests.e2e.stock_support.SeededManager"
    )
    (folder / "stock.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    environment = {
        **CPU_ENVIRONMENT,
        **QUIET_ENVIRONMENT,
        "VERL_USE_EXTERNAL_PLUGINS": plugins,
        "VERL_USE_EXTERNAL_MODULES": "tests.e2e.cpu_only" if plugins == "none" else "",
        "VERL_FILE_LOGGER_PATH": str(log),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(folder), "--config-name", "stock"]
    run_command(command, work / f"stock-{plugins}.log", **environment)
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def test_stock_grpo_gives_the_same_numbers_with_and_without_the_plugin(work: Path, miniature: Path) -> None:
    without = stock_steps(work, miniature, "none")
    installed = stock_steps(work, miniature, "auto")
    assert len(without) == len(installed) == 2
    for ours, stock in zip(installed, without, strict=True):
        assert ours.keys() == stock.keys()
        for key in (
            "actor/grad_norm",
            "actor/pg_loss",
            "critic/score/mean",
            "critic/advantages/max",
            "response_length/mean",
        ):
            assert ours[key] == pytest.approx(stock[key], **TOLERANCE), key
    assert installed[0]["actor/grad_norm"] > 0
