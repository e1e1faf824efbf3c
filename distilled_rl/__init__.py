"""Distilled Reinforcement Learning (arXiv 2607.17247) as a plugin for verl 0.9.1.

Importing this package is cheap: no torch, no verl, no vLLM. The parts that need them are imported on use.
"""

__version__ = "0.1.0"
