"""The task: a chain of five operations modulo 10, worked left to right. Pure Python, no torch.

    prompt     9-0+1-0-6-5=
    response   9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#9$

One character is one token; `$` ends the response. A *textbook* writes worked solutions and may be sloppy: some of the
300 table entries (a, op, b) are written down wrong, and the chain then goes on from the wrong value. A model that
learns from a sloppy textbook makes that book's errors, which a teacher with another book can point out.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

DATA_SOURCE = "miniature/chain"
OPERATORS = "+-*"
CHAIN_LENGTH = 5
PROMPT_TOKENS = 12
RESPONSE_TOKENS = 34  # the longest response that may be sampled; a right one has 32, `$` included
EOS = "$"
SEPARATORS = ",;"

RL_PROBLEMS = 2000
HELD_OUT_PROBLEMS = 1000

Entry = tuple[int, str, int]
TABLE: tuple[Entry, ...] = tuple((a, op, b) for a in range(10) for op in OPERATORS for b in range(10))


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain `first op digit op digit ...`: `digits` has one more entry than `operators`."""

    digits: tuple[int, ...]
    operators: str

    @property
    def text(self) -> str:
        """The chain without its equals sign, such as `9-0+1-0-6-5`."""
        return str(self.digits[0]) + "".join(f"{op}{b}" for op, b in zip(self.operators, self.digits[1:], strict=True))

    @property
    def prompt(self) -> str:
        """What the model reads: 12 characters, ending in `=`."""
        return self.text + "="

    @property
    def answer(self) -> str:
        """The digit that ends a right solution."""
        value = self.digits[0]
        for op, b in zip(self.operators, self.digits[1:], strict=True):
            value = apply_operator(value, op, b)
        return str(value)

    @classmethod
    def parse(cls, text: str) -> "Problem":
        """Read a chain back from its `text` or `prompt`; ValueError if it is not one."""
        chain = text.removesuffix("=")
        digits, operators = chain[0::2], chain[1::2]
        if len(digits) != len(operators) + 1 or not _are_digits(digits) or not set(operators) <= set(OPERATORS):
            raise ValueError(f"not a chain of digits and {OPERATORS}: {text!r}")
        return cls(tuple(map(int, digits)), operators)


def apply_operator(a: int, op: str, b: int) -> int:
    """`a op b` modulo 10, for `op` one of `+`, `-`, `*`."""
    match op:
        case "+":
            return (a + b) % 10
        case "-":
            return (a - b) % 10
        case "*":
            return (a * b) % 10
    raise ValueError(f"unknown operator {op!r}: one of {OPERATORS} is expected")


# ---- problem sets ----


def draw_problems(count: int, seed: str, exclude: Iterable[Problem] = ()) -> list[Problem]:
    """Draw `count` different problems, uniformly, none of them in `exclude`. The same `seed` gives the same list."""
    rng = random.Random(seed)
    taken = set(exclude)
    drawn: list[Problem] = []
    while len(drawn) < count:
        digits = tuple(rng.randrange(10) for _ in range(CHAIN_LENGTH + 1))
        problem = Problem(digits, "".join(rng.choice(OPERATORS) for _ in range(CHAIN_LENGTH)))
        if problem not in taken:
            taken.add(problem)
            drawn.append(problem)
    return drawn


@cache
def rl_problems() -> tuple[Problem, ...]:
    """The 2000 problems that reinforcement learning trains on."""
    return tuple(draw_problems(RL_PROBLEMS, "miniature/rl"))


@cache
def held_out_problems() -> tuple[Problem, ...]:
    """The 1000 problems that are only ever evaluated."""
    return tuple(draw_problems(HELD_OUT_PROBLEMS, "miniature/held-out", exclude=rl_problems()))


def sft_problems(count: int, seed: str) -> list[Problem]:
    """`count` problems for a textbook, disjoint from the RL set and from the held-out set."""
    return draw_problems(count, f"miniature/sft/{seed}", exclude={*rl_problems(), *held_out_problems()})


def verl_row(problem: Problem, index: int, split: str) -> dict[str, object]:
    """`problem` as one row of verl's RLHFDataset; `extra_info["problem"]` lets the grader check the steps."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "problem": problem.text},
    }


# ---- textbooks ----


@dataclass(frozen=True)
class Textbook:
    """How worked solutions are written.

    bad:        the table entries that are mostly written wrong, each with its wrong value
    bad_rate:   probability that a bad entry is written wrong
    slips:      the wrong value of every other entry (empty: they are never wrong)
    slip_rate:  probability that one of those is written wrong
    separator:  the character between two steps
    """

    bad: Mapping[Entry, int]
    bad_rate: float = 0.8
    slips: Mapping[Entry, int] | None = None
    slip_rate: float = 0.0
    separator: str = ","

    def solve(self, problem: Problem, rng: random.Random) -> str:
        """Write one worked solution of `problem`, `$` included, with this book's errors drawn from `rng`."""
        value = problem.digits[0]
        steps = []
        for op, b in zip(problem.operators, problem.digits[1:], strict=True):
            result = self._look_up((value, op, b), rng)
            steps.append(f"{value}{op}{b}={result}")
            value = result
        return f"{self.separator.join(steps)}#{value}{EOS}"

    def _look_up(self, entry: Entry, rng: random.Random) -> int:
        if entry in self.bad:
            wrong, rate = self.bad[entry], self.bad_rate
        elif self.slips:
            wrong, rate = self.slips[entry], self.slip_rate
        else:
            return apply_operator(*entry)
        return wrong if rng.random() < rate else apply_operator(*entry)


CLEAN = Textbook(bad={})


def right_solution(problem: Problem) -> str:
    """The one right response to `problem`, `$` included."""
    return CLEAN.solve(problem, random.Random(0))


def wrong_values(seed: str) -> dict[Entry, int]:
    """One wrong value for each of the 300 table entries: it is always this one that a sloppy book writes."""
    rng = random.Random(f"miniature/wrong/{seed}")
    return {entry: (apply_operator(*entry) + rng.randrange(1, 10)) % 10 for entry in TABLE}


def bad_entries(seed: str, fraction: float, among: Iterable[Entry] = TABLE) -> list[Entry]:
    """A fixed `fraction` (rounded down) of the entries in `among`, in a fixed order."""
    pool = list(among)
    return random.Random(f"miniature/bad/{seed}").sample(pool, int(fraction * len(pool)))


def sloppy_textbook(
    seed: str, *, fraction: float, bad_rate: float, slip_rate: float, share_seed: str | None = None
) -> Textbook:
    """A book with `fraction` of the table bad.

    With `share_seed` the bad entries and their wrong values are those of the book of that seed, which must have been
    written with twice this `fraction`: half of its bad entries are taken.
    """
    if share_seed is None:
        wrong = wrong_values(seed)
        chosen = bad_entries(seed, fraction)
    else:
        wrong = wrong_values(share_seed)
        chosen = bad_entries(seed, 0.5, among=bad_entries(share_seed, 2 * fraction))
    slips = {entry: value for entry, value in wrong.items() if entry not in set(chosen)} if slip_rate > 0 else None
    return Textbook({entry: wrong[entry] for entry in chosen}, bad_rate, slips, slip_rate)


# ---- grading ----


def grade(solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None) -> dict[str, float]:
    """Grade one decoded response.

    score, acc:   1.0 when the digit after the first `#` is `ground_truth` and the response ends there with `$`
    ended:        1.0 when `$` was reached
    steps_right:  1.0 when the worked steps before `#` are exactly the right ones, with either separator. With
                  `extra_info["problem"]`, the chain's text, they must be those of that problem; without it they must be
                  five right sums, each starting from the last result, that lead to `ground_truth`

    verl decodes with `skip_special_tokens=True` (experimental/reward_loop/reward_manager/naive.py:55), which takes `$`
    away: transformers 5 flags the eos token as special whatever the tokenizer says. A response without `$` therefore
    counts as ended when it has at most 33 characters: one that was cut has all of its 34 tokens, each a character. This
    needs `data.max_response_length >= 34`. The one hole is `<pad>`, which vanishes too; no model learns to write it.
    """
    ended = solution_str.endswith(EOS) or len(solution_str) < RESPONSE_TOKENS
    body = solution_str.removesuffix(EOS)
    worked, _, answer = body.partition("#")
    score = float(ended and answer == ground_truth)
    problem = (extra_info or {}).get("problem")
    steps = worked.replace(SEPARATORS[1], SEPARATORS[0]).split(SEPARATORS[0])
    right = _right_steps(str(problem)) if problem is not None else _follow(steps, ground_truth)
    return {"score": score, "acc": score, "ended": float(ended), "steps_right": float(steps == right)}


def _right_steps(problem: str) -> list[str]:
    return right_solution(Problem.parse(problem)).partition("#")[0].split(SEPARATORS[0])


def _follow(steps: list[str], ground_truth: str) -> list[str] | None:
    """The right steps of the problem that `steps` themselves pose; None if they pose none or miss `ground_truth`."""
    if len(steps) != CHAIN_LENGTH or any(len(step) != 5 for step in steps):
        return None
    posed = steps[0][0] + "".join(step[1:3] for step in steps)
    try:
        problem = Problem.parse(posed)
    except ValueError:
        return None
    return _right_steps(posed) if problem.answer == ground_truth else None


def _are_digits(text: str) -> bool:
    return bool(text) and set(text) <= set("0123456789")
