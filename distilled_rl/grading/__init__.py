r"""The grader: one and the same for the training reward and for evaluation.

`compute_score` has the signature that verl's reward managers call; in a run's configuration:

    reward.custom_reward_function.path: pkg://distilled_rl.grading
    reward.custom_reward_function.name: compute_score
    reward.custom_reward_function.reward_kwargs: {verdict: any, seconds: 5.0}      # optional

The answer is the last `\boxed{}` of a response. `answers` finds it and brings it to one spelling, `rules` decides what needs no
algebra, `pool` asks mathruler and math-verify in a child process (`worker`) that is killed when one answer takes longer than
`seconds`. An answer that is killed scores 0 with `timeout` 1: count those before reading an accuracy. Importing this package
imports none of the mathematics libraries.
"""

import numbers
import os
from collections.abc import Mapping
from typing import Any

from distilled_rl.grading.answers import Answer, canonical, extract
from distilled_rl.grading.pool import DEFAULT_SECONDS, VERDICTS, Grader, GraderError, Verdicts, shared_grader
from distilled_rl.grading.rules import decide

__all__ = ["VERDICTS", "Answer", "Grader", "GraderError", "Verdicts", "canonical", "compute_score", "extract", "grade"]

DEFAULT_VERDICT = "any"  # right when one of the two libraries says so
VERDICT_ENV = "DISTILLED_RL_VERDICT"
SECONDS_ENV = "DISTILLED_RL_GRADER_SECONDS"
MINIATURE_PREFIX = "miniature/"
PRED_CHARS = 256  # of the answer that is reported back


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    verdict: str | None = None,
    seconds: float | None = None,
) -> dict[str, float | int | str]:
    r"""Grade one response. Thread-safe; returns the same keys with the same types for every input.

    `score`, `acc` (float, 0 or 1): right by `verdict`. `pred` (str): the answer in canonical spelling, `""` if there is none.
    `boxed`, `mathruler`, `math_verify`, `timeout`, `crash` (int, 0 or 1): an answer was found in the asked format; each
    library's verdict on the canonical texts; see `Verdicts`. Without an answer in the asked format the score is 0.

    data_source:  `miniature/...` is graded by `distilled_rl.miniature.task`, everything else as mathematics
    ground_truth: text or number; `\boxed{204}` is 204
    extra_info:   `answer_format` may be `boxed` (default) or `answer_line` (DAPO's `Answer: ...`)
    verdict:      `any` (default), `mathruler` or `math_verify`; default from DISTILLED_RL_VERDICT
    seconds:      limit per answer, default 5; default from DISTILLED_RL_GRADER_SECONDS

    Raises TypeError for a response that is no text or a gold that is neither text nor number, ValueError for an empty gold.
    """
    response = _response_text(solution_str)
    gold = _gold_text(ground_truth)
    verdict = verdict or os.environ.get(VERDICT_ENV) or DEFAULT_VERDICT
    if data_source.startswith(MINIATURE_PREFIX):
        return _miniature_score(response, gold, extra_info)
    answer_format = (extra_info or {}).get("answer_format") or "boxed"
    raw = extract(response, answer_format)
    if raw is None:
        return _score(Verdicts(), verdict, pred="", boxed=False)
    answer = canonical(raw)
    return _score(grade(answer, canonical(gold), seconds=seconds), verdict, pred=answer.text, boxed=True)


def grade(answer: Answer, gold: Answer, *, seconds: float | None = None, grader: "Grader | None" = None) -> Verdicts:
    """Compare two canonical answers, in this process if that is enough and in a child of `grader` (default: shared) if not."""
    decision = decide(answer, gold)
    if isinstance(decision, bool):
        return Verdicts(decision, decision)
    limit = seconds if seconds is not None else float(os.environ.get(SECONDS_ENV) or DEFAULT_SECONDS)
    return (grader or shared_grader()).judge(decision, limit)


def _score(verdicts: Verdicts, verdict: str, *, pred: str, boxed: bool) -> dict[str, float | int | str]:
    right = float(verdicts.says(verdict))
    return {
        "score": right,
        "acc": right,
        "pred": pred[:PRED_CHARS].encode("utf-8", "replace").decode(),  # verl writes it to a UTF-8 file
        "boxed": int(boxed),
        "mathruler": int(verdicts.mathruler),
        "math_verify": int(verdicts.math_verify),
        "timeout": int(verdicts.timeout),
        "crash": int(verdicts.crash),
    }


def _miniature_score(response: str, gold: str, extra_info: Mapping[str, Any] | None) -> dict[str, float | int | str]:
    from distilled_rl.miniature import task

    result = task.grade(response, gold, extra_info)
    right = bool(result["score"])
    pred = response.partition("#")[2].removesuffix(task.EOS)
    return _score(Verdicts(right, right), DEFAULT_VERDICT, pred=pred, boxed=bool(result["ended"]))


def _response_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"solution_str must be text, not {type(value).__name__}: the decoded response is expected")
    return str(value)


def _gold_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError(
            f"ground_truth must be text or a number, not {type(value).__name__}: look at reward_model.ground_truth"
        )
    text = str(value).strip()
    if not text:
        raise ValueError("ground_truth is empty: no answer can be right; scripts/prepare_data.py drops such rows")
    return text
