r"""The grader: one and the same for the training reward and for evaluation.

`compute_score` has the signature that verl's reward managers call; in a run's configuration:

    reward.custom_reward_function.path: pkg://distilled_rl.grading
    reward.custom_reward_function.name: compute_score
    reward.custom_reward_function.reward_kwargs: {verdict: any, seconds: 5.0}      # optional

`answers` finds the last `\boxed{}` of a response and brings it to one spelling, `rules` decides what needs no algebra,
`pool` asks mathruler and math-verify in a child process (`worker`) that is killed when one answer takes too long. A
killed answer scores 0 with `timeout` 1: count those before reading an accuracy. Importing this imports no mathematics.
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

Score = dict[str, float | int | str]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    verdict: str | None = None,
    seconds: float | None = None,
) -> Score:
    r"""Grade one response. Thread-safe; returns the same keys with values of the same types for every input.

    score, acc (float, 0 or 1):   right by `verdict`
    pred (str):                   the answer in canonical spelling, cut to 256 characters; `""` if there is none
    boxed (int, 0 or 1):          an answer was found in the asked format; without one the score is 0
    mathruler, math_verify (int): each library's verdict on the canonical texts
    timeout, crash (int):         see `Verdicts`

    data_source:  `miniature/...` is graded by `distilled_rl.miniature.task`, everything else as mathematics
    ground_truth: text or number; `\boxed{204}` is 204
    extra_info:   `answer_format` may be `boxed` (default) or `answer_line` (DAPO's `Answer: ...`)
    verdict:      `any`, `mathruler` or `math_verify`; default DISTILLED_RL_VERDICT, else `any`
    seconds:      processor time per answer; default DISTILLED_RL_GRADER_SECONDS, else 5

    Raises TypeError for a response that is no text and for a gold that is neither text nor a number, ValueError for an
    empty gold and for an unknown verdict or answer format.
    """
    response = _response_text(solution_str)
    gold = _gold_text(ground_truth)
    verdict = verdict or os.environ.get(VERDICT_ENV) or DEFAULT_VERDICT
    if data_source.startswith(MINIATURE_PREFIX):
        return _score_miniature(response, gold, extra_info, verdict)
    raw = extract(response, (extra_info or {}).get("answer_format") or "boxed")
    if raw is None:
        return _score(Verdicts(), verdict, pred="", boxed=False)
    answer = canonical(raw)
    return _score(grade(answer, canonical(gold), seconds=seconds), verdict, pred=answer.text, boxed=True)


def grade(answer: Answer, gold: Answer, *, seconds: float | None = None, grader: Grader | None = None) -> Verdicts:
    """Compare two canonical answers: here if text and arithmetic are enough, else in a child of `grader` (shared one).

    What is decided here is the verdict of both libraries: on the canonical texts they could only say the same.
    """
    decision = decide(answer, gold)
    if isinstance(decision, bool):
        return Verdicts(decision, decision)
    limit = seconds if seconds is not None else float(os.environ.get(SECONDS_ENV) or DEFAULT_SECONDS)
    return (grader or shared_grader()).judge(decision, limit)


def _score(verdicts: Verdicts, verdict: str, *, pred: str, boxed: bool) -> Score:
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


def _score_miniature(response: str, gold: str, extra_info: Mapping[str, Any] | None, verdict: str) -> Score:
    from distilled_rl.miniature import task

    result = task.grade(response, gold, extra_info)
    right = result["score"] == 1.0
    pred = response.partition("#")[2].removesuffix(task.EOS)
    return _score(Verdicts(right, right), verdict, pred=pred, boxed=result["ended"] == 1.0)


def _response_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"solution_str must be the decoded response, a text, not {type(value).__name__}")
    return str(value)


def _gold_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError(
            f"ground_truth must be a text or a number, not {type(value).__name__}: see the data's reward_model"
        )
    text = str(value).strip()
    if not text:
        raise ValueError("ground_truth is empty, so that no answer can be right: drop such rows from the data")
    return text
