"""Every line and private name of verl and vLLM that this package relies on. A failure here names what changed upstream."""

import importlib.util
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# (file inside the installed package, text that must stand there, what relies on it)
LINES = [
    ("verl/__init__.py", "_ep.load()", "plugin.py: entry points are imported, not called"),
    ("verl/__init__.py", 'debug("Failed to load plugin', "plugin.py: a failing plugin is hidden at DEBUG"),
    ("verl/utils/distributed.py", 'backend or f"cpu:gloo,{get_device_name()}', "cpu.use_gloo_once"),
    ("verl/workers/engine/fsdp/transformer_impl.py", 'device=["cuda", "npu"]', "cpu.activate: VERL_ENGINE_DEVICE"),
    (
        "verl/workers/engine/fsdp/transformer_impl.py",
        "offload_policy = CPUOffloadPolicy(pin_memory=True)",
        "cpu.keep_parameters_resident",
    ),
    ("verl/third_party/vllm/__init__.py", 'package_name = "vllm"', "cpu.alias_vllm_distribution"),
    (
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
        "get_accelerator_ids()[",
        "cpu platform: Ray resource GPU",
    ),
    ("vllm/model_executor/layers/utils.py", "ops._supports_onednn", "cpu.keep_vllm_weights_writable"),
    ("verl/utils/tracking.py", 'self.fp = open(self.filepath, "wb"', "launch.next_log_file: the file logger truncates"),
    ("verl/utils/tracking.py", 'os.getenv("VERL_FILE_LOGGER_PATH"', "launch.prepare_environment"),
    ("verl/trainer/main_ppo.py", "ray.get(runner.run.remote(config))", "launch.LocalTaskRunner"),
    ("verl/trainer/ppo/v1/replay_buffer.py", "time.sleep(self.poll_interval)", "trainer.py: poll interval"),
    (
        "verl/trainer/ppo/v1/trainer_base.py",
        'if self.trainer_mode == "sync" else ReplayBufferAsync',
        "trainer.py: mode",
    ),
    ("verl/trainer/ppo/v1/trainer_base.py", '"latest_checkpointed_iteration.txt"', "launch.last_step"),
    ("verl/trainer/ppo/v1/agent_loop_tq.py", 'keys.append(f"{uid}_{session_id}_{i}")', "trainer._row_order"),
    (
        "verl/trainer/ppo/v1/utils.py",
        "if adv_estimator != core_algos.AdvantageEstimator.GRPO",
        "estimator.py: the name grpo",
    ),
    (
        "verl/experimental/agent_loop/agent_loop.py",
        "if self.distillation_enabled and not validate",
        "validation never asks the teacher",
    ),
    (
        "verl/experimental/agent_loop/agent_loop.py",
        "output: AgentLoopOutput = await agent_loop.run(sampling_params, **kwargs)\n"
        '            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)',
        "rollout.py: _run_agent_loop without a new agent loop per response",
    ),
    (
        "verl/experimental/agent_loop/agent_loop.py",
        "await selected_reward_loop_worker_handle.compute_score.remote(data)",
        "rollout.LocalRewardWorker",
    ),
    (
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
        "SamplingParams(max_tokens=max_tokens, **sampling_params)",
        "rollout.py: output_kind and detokenize reach the engine",
    ),
    (
        "verl/experimental/teacher_loop/teacher_manager.py",
        '"temperature": 1.0',
        "checks: a server scores at temperature 1",
    ),
]


@pytest.mark.parametrize(("file", "text", "reliance"), LINES, ids=[line[2] for line in LINES])
def test_line_is_still_there(file: str, text: str, reliance: str) -> None:
    spec = importlib.util.find_spec(file.split("/")[0])
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]).parent / file).read_text(encoding="utf-8")
    assert text in source, f"{file} no longer contains {text!r}; revisit {reliance}"


def test_verl_version_is_the_one_that_was_read() -> None:
    assert version("verl") == "0.9.1"


def test_six_places_compare_the_mode_with_sync() -> None:
    # 153, 731, 902, 912, 1004, 1499: a name of our own would fall on the asynchronous side of each
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "trainer/ppo/v1/trainer_base.py").read_text(encoding="utf-8")
    assert source.count('trainer_mode == "sync"') + source.count('trainer_mode != "sync"') == 6


def test_private_names_keep_their_signatures(verl_on_cpu: None) -> None:
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert list(inspect.signature(PPOTrainer._compute_advantage).parameters) == ["self", "batch", "metrics"]
    assert list(inspect.signature(PPOTrainer._next_train_batch).parameters) == ["self", "num_prompts"]
    assert list(inspect.signature(PPOTrainer._balance_batch).parameters)[:3] == ["self", "batch", "metrics"]
    assert list(inspect.signature(PPOTrainer.fit).parameters) == ["self", "agent_loop_manager"]
    for name in ("_init_dataloader", "_init_dump_executor", "_load_checkpoint", "_save_checkpoint", "on_init_end"):
        assert list(inspect.signature(getattr(PPOTrainer, name)).parameters) == ["self"]
    worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert "session_id=i" in inspect.getsource(worker._run_prompt)
    teacher = inspect.signature(worker._compute_teacher_logprobs).parameters
    assert list(teacher)[:6] == ["self", "output", "prompt_ids", "response_ids", "validate", "sample_kwargs"]
    assert callable(TaskRunnerV1.__ray_metadata__.modified_class.run)


def test_the_shared_agent_loop_and_client_keep_nothing_of_a_response(verl_on_cpu: None) -> None:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
    from verl.workers.rollout.llm_server import LLMServerClient

    for base in SingleTurnAgentLoop.__mro__[:2]:
        for name, function in inspect.getmembers(base, inspect.isfunction):
            if name != "__init__":
                assert "self." not in re.sub(r"self\.\w+[\w.]*(?! *=[^=])", "", inspect.getsource(function)), name
    assert list(inspect.signature(LLMServerClient._acquire_server).parameters) == ["self", "request_id", "extra"]
    assert list(inspect.signature(LLMServerClient._release_server).parameters) == ["self", "server_id", "request_id"]
    assert list(inspect.signature(RewardLoopWorker.__init__).parameters)[:2] == ["self", "config"]


def test_trainer_is_verls_synchronous_one(verl_on_cpu: None) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    for name in ("distilled_rl", "distilled_rl_sweep"):
        assert issubclass(get_trainer_cls(name), PPOTrainerSync)


def test_trainer_sets_sync_and_gets_the_synchronous_buffer(verl_on_cpu: None, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from distilled_rl.recipe import compose

    config = compose(
        "grpo",
        [
            "scale=cpu",
            "student=local",
            f"student.model={tmp_path}",
            "dataset=miniature",
            "distilled_rl.poll_interval=0.07",
        ],
    )
    trainer = get_trainer_cls("distilled_rl")(config)
    assert trainer.trainer_mode == "sync"
    assert config.trainer.v1.trainer_mode == "sync"
    assert type(trainer.replay_buffer) is ReplayBuffer
    assert trainer.replay_buffer.poll_interval == 0.07


def test_plugin_changes_nothing_but_registries_off_the_cpu_platform() -> None:
    # In a fresh process without VERL_PLATFORM: everything the plugin adds is a registry entry.
    import subprocess
    import sys

    code = """
import verl, inspect, importlib.metadata, torch
from distilled_rl import plugin
plugin.ensure_loaded()
import verl.trainer.ppo.core_algos as algos, verl.utils.distributed as dist
import verl.trainer.ppo.v1 as v1
foreign = [name for module in (algos, dist, v1.trainer_base, v1.trainer_sync, v1.replay_buffer)
           for name, value in vars(module).items()
           if getattr(value, "__module__", "").startswith("distilled_rl")]
assert not foreign, foreign
assert not hasattr(torch.cpu, "mem_get_info")
assert not getattr(importlib.metadata.version, "_distilled_rl_alias", False)
assert v1.trainer_base.TRAINER_REGISTRY["sync"].__module__ == "verl.trainer.ppo.v1.trainer_sync"
assert set(algos.ADV_ESTIMATOR_REGISTRY) - {"distilled_rl"} == {
    member.value for member in algos.AdvantageEstimator if member.value in algos.ADV_ESTIMATOR_REGISTRY}
print("unchanged")
"""
    import os

    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    # the CUDA build of vLLM is not here: answer for its distribution as an installed one would
    code = (
        "import importlib.metadata as m\n"
        "_v = m.version\n"
        "m.version = lambda name: '0.24.0' if name == 'vllm' else _v(name)\n" + code
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unchanged" in done.stdout
