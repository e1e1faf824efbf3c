"""The trainer ``distilled_rl_sweep``: several runs, one after another, on one set of Ray workers and vLLM servers.

On small models a run is mostly start-up: Ray, imports, and two vLLM engines. A sweep starts them once. Between two runs it
goes through verl's own resume path: every run begins by loading a checkpoint, its own latest one or the one that the sweep
saves before the first update, and by syncing those weights to the rollout engine. Student, teacher, data, loss and scale
are those of the sweep's configuration; the runs differ in the ``distilled_rl`` node and the seed.

With ``distilled_rl.reproducible`` a run in a sweep equals the same run on its own: sampling seeds come from the response's
name, not from the state of the engine.
"""

import logging
import os
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from distilled_rl.config import SweepRun, sweep_runs
from distilled_rl.launch import last_step, log_files
from distilled_rl.methods import get_method
from distilled_rl.trainer import DistilledRLTrainer

logger = logging.getLogger(__name__)

TRAINER_MODE = "distilled_rl_sweep"


@register_trainer(TRAINER_MODE)
class DistilledRLSweepTrainer(DistilledRLTrainer):
    """Train every run of ``sweep.runs`` that has not reached ``trainer.total_training_steps`` yet."""

    def __init__(self, config: DictConfig) -> None:
        self.runs = sweep_runs(config)
        self.initial_checkpoint = Path(config.run.dir).resolve() / "initial"
        with open_dict(config):
            config.trainer.max_actor_ckpt_to_keep = None  # see _save_checkpoint
        super().__init__(config)

    def on_init_end(self) -> None:
        """Save the state before the first update; each run starts from it. The weights are synced at the start of a run."""
        with open_dict(self.config):
            self.config.trainer.default_local_dir = str(self.initial_checkpoint)
        if find_latest_ckpt_path(str(self.initial_checkpoint)) is None:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """Save, then remove the run's older checkpoints.

        verl's own rotation (``trainer.max_actor_ckpt_to_keep``) counts every path that the workers saved, whichever run it
        belongs to, and would delete the last checkpoint of the run before.
        """
        super()._save_checkpoint()
        directory = Path(self.config.trainer.default_local_dir)
        for older in directory.glob("global_step_*"):
            if older.name != f"global_step_{self.global_steps}":
                shutil.rmtree(older)

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Train the runs in order. A run whose last checkpoint stands at the last step is left alone."""
        for number, run in enumerate(self.runs, 1):
            directory = run.directory
            if last_step(directory) >= self.total_training_steps:
                print(f"sweep {number}/{len(self.runs)}: {run.name} is finished, left alone", flush=True)
                continue
            print(f"sweep {number}/{len(self.runs)}: {run.name}", flush=True)
            self._begin(run)
            try:
                super().fit(agent_loop_manager)
            finally:
                tracking = getattr(self, "logger", None)
                if tracking is not None:
                    tracking.finish()

    def _begin(self, run: SweepRun) -> None:
        """Make this trainer the trainer of ``run``: settings, data, weights, optimizer, logs."""
        self.settings = run.settings
        self.method = get_method(run.settings.mode)
        directory = run.directory
        directory.mkdir(parents=True, exist_ok=True)
        checkpoints = directory / "checkpoints"
        latest = find_latest_ckpt_path(str(checkpoints))
        with open_dict(self.config):
            self.config.distilled_rl = OmegaConf.create(run.node)
            self.config.seed = run.settings.seed
            self.config.run.name, self.config.run.dir = run.name, str(directory)
            self.config.data.seed = run.settings.seed
            self.config.actor_rollout_ref.actor.data_loader_seed = run.settings.seed
            self.config.trainer.experiment_name = run.name
            self.config.trainer.default_local_dir = str(checkpoints)
            self.config.trainer.validation_data_dir = str(directory / "validation")
            self.config.trainer.resume_mode = "resume_path"
            self.config.trainer.resume_from_path = latest or find_latest_ckpt_path(str(self.initial_checkpoint))
        OmegaConf.save(self.config, directory / "config.yaml", resolve=True)
        os.environ["VERL_FILE_LOGGER_PATH"] = str(directory / f"metrics-{len(log_files(directory)):03d}.jsonl")
        self._init_dataloader()
        self._init_dump_executor()
        # both run to their end here: verl decorates them with auto_await
        self.checkpoint_manager.sleep_replicas()  # type: ignore[unused-coroutine]
        self._load_checkpoint()
        self.checkpoint_manager.update_weights(self.global_steps)  # type: ignore[unused-coroutine]
