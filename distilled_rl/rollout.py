"""Agent loops with reproducible sampling, and with teacher scoring only for a method that uses it.

Selected by ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``; the agent loops themselves are verl's.
"""

import gc
import zlib
from typing import Any

import ray
from tensordict import TensorDict
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

# Keys that travel with a batch of prompts from the trainer (DistilledRLTrainer.fit) to the workers.
SEED_KEY = "distilled_rl_seed"
TEACHER_KEY = "distilled_rl_needs_teacher"


def sampling_seed(seed: int, uid: str, session: int) -> int:
    """Return the sampling seed of one response, in [0, 2^31), a pure function of the run's seed and the response's name."""
    return zlib.crc32(f"{seed}/{uid}/{session}".encode()) & 0x7FFFFFFF


# The class that verl decorates with ray.remote (verl/trainer/ppo/v1/agent_loop_tq.py:51), undecorated.
_AgentLoopWorkerTQ: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class DistilledRLAgentLoopWorker(_AgentLoopWorkerTQ):
    """verl's TransferQueue agent-loop worker with a seed per response and optional teacher scoring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A response allocates thousands of small objects, and each full garbage collection walks everything that the
        # imports of verl and transformers left. What is alive now lives as long as the process: leave it out.
        gc.collect()
        gc.freeze()

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        seed = kwargs.pop(SEED_KEY, None)
        if seed is not None:
            # A validation prompt has a random uid; its row in the file names it.
            name = f"val-{kwargs['index']}" if trajectory["validate"] else str(kwargs["uid"])
            sampling_params = {**sampling_params, "seed": sampling_seed(int(seed), name, int(kwargs["session_id"]))}
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)

    async def _compute_teacher_logprobs(
        self,
        output: AgentLoopOutput,
        prompt_ids: list[int],
        response_ids: list[int],
        validate: bool,
        sample_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if sample_kwargs is not None and not sample_kwargs.get(TEACHER_KEY, True):
            return
        await super()._compute_teacher_logprobs(output, prompt_ids, response_ids, validate, sample_kwargs)


class DistilledRLAgentLoopManager(AgentLoopManagerTQ):
    """verl's TransferQueue agent-loop manager with :class:`DistilledRLAgentLoopWorker` workers.

    ``marks``: values that accompany every prompt to the workers, for training and validation alike.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(DistilledRLAgentLoopWorker)
        self.marks: dict[str, Any] = {}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Attach ``marks`` to the prompts, then dispatch them as verl does."""
        for key, value in self.marks.items():
            tu.assign_non_tensor_data(prompts, key, value)
        super().generate_sequences(prompts)
