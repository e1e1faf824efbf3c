"""Agent loops for stock verl runs that must repeat: a sampling seed per response from its place in the data."""

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class SeededWorker(_Worker):
    """verl's worker with sampling seeds."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        seed = 1000 * int(kwargs["index"]) + int(kwargs["session_id"])
        return await super()._run_agent_loop({**sampling_params, "seed": seed}, trajectory, **kwargs)


class SeededManager(AgentLoopManagerTQ):
    """verl's manager with :class:`SeededWorker` workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededWorker)
