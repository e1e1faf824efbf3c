"""What the tables do not show, worded for exactly these runs."""

from collections.abc import Sequence

from distilled_rl.report.evaluations import Evaluation
from distilled_rl.report.groups import Group


def caveats(
    groups: Sequence[Group], evaluated: Sequence[dict[int, Evaluation]], evaluations: Sequence[Evaluation]
) -> list[str]:
    """Sentences for the reader. `evaluated`: per group, the evaluations by seed that its row averages."""
    lines = []
    counts = {len(by_seed) for by_seed in evaluated if by_seed}
    if 1 in counts:
        lines.append(
            "Rows with one seed: the interval is over problems only. It does not contain the randomness of the RL run "
            "itself; another seed may well land outside it. An order of the modes needs several seeds."
        )
    if 2 in counts:
        lines.append(
            "Rows with two seeds: too few for an interval over seeds, so their scores are averaged per problem and the "
            "interval is over problems; it does not contain the randomness of the RL runs."
        )
    if any(count >= 3 for count in counts):
        lines.append(
            "Rows with three seeds or more: a t-interval over RL seeds, for one student, one checkpoint per teacher, "
            "and this one set of problems."
        )
    finished = [run for group in groups for run in group.runs if run.finished]
    rollouts = {run.rollouts for run in finished}
    if len(finished) > 1 and len(rollouts) == 1:
        lines.append(
            f"Equal rollouts ({rollouts.pop():,} per run), not equal time: a teacher costs forward passes of its own, "
            "and what it cost to train the teacher is not counted."
        )
    elif len(finished) > 1:
        lines.append("The runs differ in rollouts as well as in minutes: the scores are not at an equal budget.")
    if finished:
        lines.append(
            "Minutes are those in training steps, on the machine at hand: without start-up, validation, and steps "
            "that a restart repeated. The first run of a training process bears its warm-up. Teacher tokens are the "
            "prompt and response tokens of the rollouts that the teacher scored."
        )
    if any(len(set(e.correct)) == 1 for e in evaluations):
        lines.append(
            '"All alike": every problem has the same score, so there is no spread to resample; the interval is exact '
            "(Clopper-Pearson) on the number of problems."
        )
    return lines
