"""The colocated teacher: a frozen FSDP model beside the actor in verl's hybrid worker, on the same devices.

It is the authors' setting. verl 0.9.1 has none: this worker is a subclass of verl's that builds one more forward-only engine,
as verl builds its reference policy, and scores through verl's own ``infer_batch``. On GPUs FSDP2's off-load policy keeps its
parameters in host memory between uses. It writes the fields that verl's teacher server writes, so nothing downstream can
tell them apart; its log-probs are at the rollout temperature, as the student's are. Several teachers are several engines.
"""

import copy

from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig

from distilled_rl.config import COLOCATED_MESH, COLOCATED_NODE
from distilled_rl.worker import DistilledRLWorker


class ColocatedTeacherWorker(DistilledRLWorker):
    """The hybrid worker of actor, rollout, and optionally reference policy, with teachers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def init_model(self) -> None:
        """Build what verl builds, then the teachers; ``RuntimeError`` names one that cannot be loaded."""
        config = copy.deepcopy(self.config)  # verl takes keys out of its `ref` node
        super().init_model()
        self.teachers = {}
        for name, node in config[COLOCATED_NODE].items():
            try:
                self.teachers[name] = self.ref_worker_cls(config=training_config(config, name))
                self.teachers[name].reset()
            except Exception as error:
                raise RuntimeError(f"the teacher {name} ({node.model}) could not be loaded: {error}") from error
        dispatch = next(iter(self.teachers.values())).get_dispatch_collect()
        self.set_dispatch_collect(mesh_name=COLOCATED_MESH, **dispatch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=COLOCATED_MESH))
    def compute_teacher_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Score prompt and response of each row by one teacher.

        ``data``: ``input_ids`` int64 nested [B, j] and what verl's ``compute_log_prob`` reads; its item ``teacher`` is the name.
        Returns ``log_probs`` float32 nested [B, j], shifted left by one.
        """
        output = self.teachers[tu.pop(data, "teacher")].infer_batch(data)
        return None if output is None else output.cpu()  # None: another rank of the sequence-parallel group returns it


def training_config(config: DictConfig, name: str) -> TrainingWorkerConfig:
    """Return the configuration of a teacher's engine: verl's ``ref`` node with the teacher's model and dtype.

    ``config``: ``actor_rollout_ref``, which is all that a worker is given; the trainer put the run's colocated teachers into it
    under ``COLOCATED_NODE``, by name. As verl/workers/engine_workers.py:518 does for the reference policy.
    """
    teacher = config[COLOCATED_NODE][name]
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))  # type: ignore[assignment]
    with open_dict(config):
        config.model.path = teacher.model
        for key in ("tokenizer_path", "hf_config_path", "lora_adapter_path"):
            config.model[key] = None
        config.model.lora_rank = 0
        if config.model.get("lora") is not None:
            config.model.lora.rank = 0
        config.model.enable_gradient_checkpointing = False
        ref = config.ref
        ref.fsdp_config.model_dtype = teacher.dtype
        ref.fsdp_config.mixed_precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), teacher.dtype)
        # as the actor's own scoring pass, so that the same weights give the same numbers
        dynamic, tokens, rows = (
            config.rollout[key]
            for key in (
                "log_prob_use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu",
                "log_prob_micro_batch_size_per_gpu",
            )
        )
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
            ref.pop(f"log_prob_{key}", None)
        ref.ppo_mini_batch_size = config.actor.ppo_mini_batch_size
        ref.ppo_micro_batch_size = None
        ref.ppo_micro_batch_size_per_gpu = rows
        ref.use_dynamic_bsz = dynamic
        ref.ppo_max_token_len_per_gpu = tokens
    typed = omega_conf_to_dataclass(ref)
    typed.model_config = omega_conf_to_dataclass(config.model)
    engine = typed.engine
    engine.use_dynamic_bsz = dynamic
    engine.infer_max_token_len_per_gpu = tokens
    engine.infer_micro_batch_size_per_gpu = rows
    engine.use_remove_padding = config.model.get("use_remove_padding", False)
    return TrainingWorkerConfig(
        model_type=typed.model_config.get("model_type", "language_model"),
        model_config=typed.model_config,
        engine_config=engine,
        optimizer_config=typed.optim,
        checkpoint_config=typed.checkpoint,
    )
