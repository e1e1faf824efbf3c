"""Evaluate a checkpoint of the miniature on the held-out problems, as the report wants it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distilled_rl.miniature import generate, task
from distilled_rl.miniature.models import load_model
from distilled_rl.report import Evaluation

SAMPLES = 4
SAMPLING_SEED = 0
PROBLEM_SET = "miniature/held-out-1000"


def evaluate(name: str, role: Any, model_dir: Path, identity: Mapping[str, Any] | None = None) -> Evaluation:
    """Sample four responses per held-out problem at temperature 1 and one greedily, and grade them.

    ``identity``: mode, teacher, seed, and step of a trained model. Sampling is the same for every model: seed 0.
    """
    problems = task.held_out_problems()
    model = load_model(model_dir)
    greedy = generate.respond(model, problems)
    generator = torch.Generator().manual_seed(SAMPLING_SEED)
    rounds = [generate.respond(model, problems, generator) for _ in range(SAMPLES)]
    grades = [[_grade(text, problem) for text, problem in zip(texts, problems, strict=True)] for texts in rounds]
    rewarded = [grade for texts in grades for grade in texts if grade["score"] == 1.0]
    return Evaluation(
        name=name,
        role=role,
        model=str(model_dir),
        samples=SAMPLES,
        temperature=1.0,
        correct=tuple(sum(int(texts[row]["score"]) for texts in grades) for row in range(len(problems))),
        greedy=tuple(int(_grade(text, problem)["score"]) for text, problem in zip(greedy, problems, strict=True)),
        # a character is a token
        mean_length=sum(len(text) for texts in rounds for text in texts) / (SAMPLES * len(problems)),
        truncated=sum(not grade["ended"] for texts in grades for grade in texts),
        problem_set=PROBLEM_SET,
        extras={"steps_right": sum(grade["steps_right"] for grade in rewarded) / max(1, len(rewarded))},
        **(identity or {}),
    )


def _grade(text: str, problem: task.Problem) -> dict[str, float]:
    return task.grade(text, problem.answer, {"problem": problem.text})
