"""The colocated teacher: a frozen FSDP model beside the actor in verl's hybrid worker, on the same devices.

It is the authors' setting. verl 0.9.1 has none: this worker is a subclass of verl's that builds one more forward-only engine,
as verl builds its reference policy, and scores through verl's own ``infer_batch``. On GPUs FSDP2's off-load policy keeps its
parameters in host memory between uses. It writes the fields that verl's teacher server writes, so nothing downstream can
tell them apart; its log-probs are at the rollout temperature, as the student's are.
"""

import copy
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from distilled_rl.config import COLOCATED_MESH, COLOCATED_NODE


class ColocatedTeacherWorker(ActorRolloutRefWorker):
    """verl's hybrid worker of actor, rollout, and optionally reference policy, with a teacher."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def init_model(self) -> None:
        """Build what verl builds, then the teacher; ``RuntimeError`` names a teacher that cannot be loaded."""
        config = copy.deepcopy(self.config)  # verl takes keys out of its `ref` node
        super().init_model()
        node = config[COLOCATED_NODE]
        try:
            self.teacher = self.ref_worker_cls(config=training_config(config))
            self.teacher.reset()
        except Exception as error:
            raise RuntimeError(f"the teacher {node.name} ({node.model}) could not be loaded: {error}") from error
        self.set_dispatch_collect(mesh_name=COLOCATED_MESH, **self.teacher.get_dispatch_collect())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=COLOCATED_MESH))
    def compute_teacher_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Score prompt and response of each row.

        ``data``: ``input_ids`` int64 nested [B, j] and what verl's ``compute_log_prob`` reads. Returns ``teacher_logprobs``
        float32 and ``teacher_ids`` int32, nested [B, j, 1], shifted left by one, the last entry of a row a dummy 0.
        """
        ids: Any = data["input_ids"]
        output = self.teacher.infer_batch(data)
        if output is None:  # another rank of the same sequence-parallel group returns it
            return None
        return server_fields(output["log_probs"].cpu(), ids.cpu())


def server_fields(log_probs: torch.Tensor, input_ids: torch.Tensor) -> TensorDict:
    """Return an engine's log-probs, nested [B, j], as verl's teacher server writes them.

    Entry p of a row is the log-prob of token p + 1 in both; the engine's last entry is that of a token that is not there.
    """
    nested: Any = log_probs
    offsets = nested.offsets()
    ids = input_ids.values().roll(-1).int()
    values = nested.values().float().clone()
    last = offsets[1:] - 1
    ids[last], values[last] = 0, 0.0
    lengths = {"min_seqlen": nested._get_min_seqlen(), "max_seqlen": nested._get_max_seqlen()}
    fields = {"teacher_logprobs": values, "teacher_ids": ids}
    return TensorDict(
        {
            name: torch.nested.nested_tensor_from_jagged(field[:, None], offsets=offsets, **lengths)
            for name, field in fields.items()
        },
        batch_size=len(offsets) - 1,
    )


def training_config(config: DictConfig) -> TrainingWorkerConfig:
    """Return the configuration of the teacher's engine: verl's ``ref`` node with the teacher's model and dtype.

    ``config``: ``actor_rollout_ref``, which is all that a worker is given; the trainer put the run's ``teacher`` node into it under
    ``COLOCATED_NODE``. As verl/workers/engine_workers.py:518 does for
    the reference policy.
    """
    teacher = config[COLOCATED_NODE]
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
