"""vLLM side of the plugin (entry point group ``vllm.general_plugins``: called in every vLLM process)."""

from distilled_rl.platforms import cpu


def register() -> None:
    """Prepare vLLM for weight updates on the CPU platform; does nothing on any other."""
    if cpu.is_selected():
        cpu.keep_vllm_weights_writable()
