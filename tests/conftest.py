"""What all tests share: no network, the rule for GPU tests, and the real data."""

import os
from pathlib import Path

import pytest

# Before any test module imports a Hugging Face library.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: DISTILLED_RL_SHARED/data, or shared/data beside the repository; skips where there is none."""
    shared = Path(os.environ.get("DISTILLED_RL_SHARED", ROOT.parent / "shared"))
    folder = shared / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set DISTILLED_RL_SHARED to the folder that holds data/")
    return folder
