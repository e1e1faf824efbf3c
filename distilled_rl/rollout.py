"""Agent loops with reproducible sampling, with teacher scoring only for a method that uses it, and with less work per response.

Selected by ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``; the agent loops themselves are verl's. On short
responses the Python around the engine dominates, so what does not differ between two responses is done once.
"""

import gc
import zlib
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.rollout_trace import rollout_trace_attr
from verl.workers.rollout.llm_server import LLMServerClient

# Keys that travel with a batch of prompts from the trainer (DistilledRLTrainer.fit) to the workers.
SEED_KEY = "distilled_rl_seed"
TEACHER_KEY = "distilled_rl_needs_teacher"


def sampling_seed(seed: int, uid: str, session: int) -> int:
    """Return the sampling seed of one response, in [0, 2^31), a pure function of the run's seed and the response's name."""
    return zlib.crc32(f"{seed}/{uid}/{session}".encode()) & 0x7FFFFFFF


class OneServerClient(LLMServerClient):
    """verl's client of a pool of one server: it asks the load balancer once, not twice per response."""

    def __init__(self, client: LLMServerClient) -> None:
        super().__init__(client.config, client._load_balancer)
        self._server: tuple[str, Any] | None = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        if self._server is None:
            self._server = await super()._acquire_server(request_id, **extra)
        return self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Keep it: it is the only one."""


def one_server_clients(config: DictConfig, clients: dict[str, LLMServerClient]) -> dict[str, LLMServerClient]:
    """Return the teachers' clients, as :class:`OneServerClient` where the pool is one GPU and so one server."""
    if config.distillation.n_gpus_per_node * config.distillation.nnodes != 1:
        return clients
    return {key: OneServerClient(client) for key, client in clients.items()}


class LocalRewardWorker(RewardLoopWorker):
    """verl's reward worker, called as the Ray actor is (``worker.compute_score.remote(data)``) but in this process."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.compute_score = SimpleNamespace(remote=super().compute_score)  # type: ignore[assignment]


# The class that verl decorates with ray.remote (verl/trainer/ppo/v1/agent_loop_tq.py:51), undecorated.
_AgentLoopWorkerTQ: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class DistilledRLAgentLoopWorker(_AgentLoopWorkerTQ):
    """verl's TransferQueue agent-loop worker with a seed per response and optional teacher scoring.

    With ``reward.num_workers=0`` it grades in its own process.
    """

    def __init__(
        self,
        config: DictConfig,
        llm_client: LLMServerClient,
        teacher_client: dict[str, LLMServerClient] | None = None,
        reward_loop_worker_handles: list[Any] | None = None,
    ) -> None:
        if config.trainer.n_gpus_per_node * config.trainer.nnodes == 1 and type(llm_client) is LLMServerClient:
            llm_client = OneServerClient(llm_client)  # a pool of one GPU has one server
        if teacher_client:
            teacher_client = one_server_clients(config, teacher_client)
        super().__init__(config, llm_client, teacher_client, reward_loop_worker_handles)
        self._single_turn: SingleTurnAgentLoop | None = None
        # verl uses the token ids of a finished response only.
        self._engine_params: dict[str, Any] = {}
        if config.actor_rollout_ref.rollout.name == "vllm":
            from vllm.sampling_params import RequestOutputKind

            self._engine_params = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        # A response allocates thousands of small objects, and each full garbage collection walks everything that the
        # imports of verl and transformers left. What is alive now lives as long as the process: leave it out.
        gc.collect()
        gc.freeze()

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        sampling_params = {**self._engine_params, **sampling_params}
        seed = kwargs.pop(SEED_KEY, None)
        if seed is not None:
            # A validation prompt has a random uid; its row in the file names it.
            name = f"val-{kwargs['index']}" if trajectory["validate"] else str(kwargs["uid"])
            sampling_params["seed"] = sampling_seed(int(seed), name, int(kwargs["session_id"]))
        if agent_name != "single_turn_agent":
            return await super()._run_agent_loop(
                sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs
            )
        # As verl/experimental/agent_loop/agent_loop.py:661, which makes a new agent loop for each response through Hydra;
        # this one keeps nothing of a response.
        if self._single_turn is None:
            self._single_turn = SingleTurnAgentLoop(
                trainer_config=DictConfigWrap(self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self.tools),
            )
        with rollout_trace_attr(
            step=trajectory["step"],
            sample_index=trajectory["sample_index"],
            rollout_n=trajectory["rollout_n"],
            validate=trajectory["validate"],
            name="agent_loop",
            trace=trace,
        ):
            output = await self._single_turn.run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        if self.reward_loop_worker_handles == []:
            self.reward_loop_worker_handles = [LocalRewardWorker(self.config)]
        await super()._compute_score(outputs, kwargs)

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
