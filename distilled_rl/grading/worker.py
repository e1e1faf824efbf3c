r"""The child process of the grader: reads pairs of answers, asks mathruler and math-verify, writes the verdicts.

Run as a script by `distilled_rl.grading.pool`; imports nothing of this package, so that a child costs what sympy costs.
One JSON object per line, both ways:

    -> {"pairs": [[answer, gold], ...], "seconds": 5.0}     canonical texts (`distilled_rl.grading.answers`)
    <- {"mathruler": 0 | 1, "math_verify": 0 | 1}           1: equal for every pair
    <- {"exhausted": "MemoryError"}                         an answer needed more than the memory limit

The first line it writes is {"ready": true} or {"ready": false, "error": ...}. A kernel timer (SIGPROF) ends it when one
request has taken `seconds` of processor time, whatever it is doing; the end of stdin ends it while it waits.

Neither library is asked about two expressions whose values differ, and what they get is written so that they drop none
of it. That keeps their false positives out: mathruler 0.1.0 takes `\frac{a+b}{c}` for `a+\frac{b}{c}` and
`\binom{5}{2}` for 52; math-verify 0.9.0 takes `10^{-20}\sqrt{2}` for `10^{-20}` and `x^2=-1` for `x^2=-4`.
"""

import functools
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30  # address space
PRECISION = 30  # digits when two numbers that math-verify calls equal are looked at again
REFUTING = 1e-6  # relative difference of two values, computed to 15 digits, from which they are not the same

# LaTeX that mathruler's flattening keeps the meaning of
_MATHRULER_COMMANDS = frozenset(
    ("frac", "sqrt", "pi", "cdot", "times", "infty", "alpha", "beta", "gamma", "theta", "lambda", "mu", "omega")
)


# ---- mathruler ----


def ask_mathruler(answer: str, gold: str) -> bool:
    """mathruler's verdict on two canonical texts; False where it would have to drop part of one."""
    from mathruler.grader import grade_answer

    left, right = mathruler_text(answer), mathruler_text(gold)
    return left is not None and right is not None and bool(grade_answer(left, right))


def mathruler_text(text: str) -> str | None:
    r"""`text` with parentheses for the braces of fractions, powers and roots: mathruler drops braces.

    None if it cannot be written so, or has a letter before a parenthesis: to mathruler `f(2)` is `2f`.
    """
    if not set(re.findall(r"\\([A-Za-z]+|.)", text)) <= _MATHRULER_COMMANDS or re.search(r"sqrt\s*\[|[=<>&!'_|]", text):
        return None
    if re.search(r"[A-Za-z]\s*\(", re.sub(r"\\[a-z]+", "", text)):
        return None
    text = re.sub(r"\^\{([0-9]+)\}(?=\s*[0-9])", r"^{\1}\\cdot ", text)
    rewrites: list[tuple[str, Any]] = [
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", _inline_fraction),
        (r"\^\{([^{}]*)\}", lambda m: "^" + _atom(m[1])),
        (r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)"),
    ]
    changed = True
    while changed:  # from the innermost braces outwards; each round removes some
        before = text
        for pattern, replacement in rewrites:
            text = re.sub(pattern, replacement, text)
        changed = text != before
    return None if re.search(r"\\frac|\\sqrt|\^\{", text) else text


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[0-9]+|[A-Za-z]", text.strip()) else f"({text})"


def _inline_fraction(match: re.Match[str]) -> str:
    fraction = f"{_atom(match[1])}/{_atom(match[2])}"
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
    alone = before[-1:] in ("", "(", "[", "{", ",", "+", "-") and after[:1] in ("", ")", "]", "}", ",", "+", "-")
    return fraction if alone else f"({fraction})"


# ---- math-verify ----


def ask_math_verify(answer: str, gold: str) -> bool:
    """math-verify's verdict on two canonical texts; equations and numbers that it calls equal are looked at again."""
    import sympy
    from math_verify import verify

    left, right = parse_whole(gold), parse_whole(answer)
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        # math-verify would solve both, for minutes at times, and compare the solutions
        return _are_proportional(left, right)
    if not verify(left, right, timeout_seconds=0, allow_set_relation_comp=True):
        return False
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) and left.is_number and right.is_number:
        a, b = (sympy.N(side.doit(), PRECISION) for side in (left, right))
        return bool(abs(a - b) <= max(abs(a), abs(b)) * sympy.Float(10) ** (10 - PRECISION))
    return True


@functools.lru_cache(maxsize=256)
def parse_whole(text: str) -> Any:
    r"""A canonical text as math-verify's parser reads it; raises if any of it is not mathematics to that parser.

    Not `math_verify.parse`: of `\frac{1}{3} E_3+\frac{2}{3} E_2`, which it cannot read, it takes `\frac{2}{3}`.
    """
    import sympy
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # Units are set apart before (`answers`); math-verify would take the t of e^{2}t for one.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    latex = normalize_latex(text, spelling)
    is_real = not should_treat_as_complex(latex)
    found = latex2sympy(latex, is_real=is_real, convert_degrees=False, normalization_config=None)
    # In c^{2}(\gamma^{2}-7) it sees a pole of the gamma function, which then equals every other pole.
    if isinstance(found, sympy.Basic) and found.has(sympy.zoo, sympy.nan):
        raise ValueError(f"misread: {text}")
    return found


def have_other_values(answer: str, gold: str) -> bool:
    """Whether both are expressions whose values, at one fixed point for their variables, differ beyond doubt."""
    import sympy

    left, right = parse_whole(gold), parse_whole(answer)
    unfinished = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    if not all(isinstance(side, sympy.Expr) and not side.has(*unfinished) for side in (left, right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: sympy.Float(0.7310585786 + 0.2718281828 * index) for index, symbol in enumerate(symbols)}
    a, b = (side.evalf(15, subs=point) for side in (left, right))
    if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
        return False
    size = max(abs(a), abs(b))
    return bool(size > 1e-9 and abs(a - b) > REFUTING * size)


def _are_proportional(left: Any, right: Any) -> bool:
    import sympy

    ratio = sympy.simplify((left.lhs - left.rhs) / (right.lhs - right.rhs))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


# ---- requests ----


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Grade all pairs of one request. A library that raises has not found the pair equal: its verdict is 0."""
    pairs = request["pairs"]
    try:
        if any(_attempt(have_other_values, pair) for pair in pairs):
            return {"mathruler": 0, "math_verify": 0}
        asked = {"mathruler": ask_mathruler, "math_verify": ask_math_verify}
        return {name: int(all(_attempt(ask, pair) for pair in pairs)) for name, ask in asked.items()}
    except MemoryError:
        return {"exhausted": "MemoryError"}


def _attempt(ask: Any, pair: list[str]) -> bool:
    try:
        return ask(*pair)
    except MemoryError:
        raise
    except Exception:  # whatever a parser meets in a model's text
        return False


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write((json.dumps(message) + "\n").encode("ascii"))
    stream.flush()


def main() -> None:
    """Answer requests from stdin until it ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    try:
        import latex2sympy2_extended  # noqa: F401
        import math_verify  # noqa: F401
        import mathruler.grader  # noqa: F401
    except ImportError as error:
        _send(out, {"ready": False, "error": str(error)})
        return
    _send(out, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = answer_request(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(out, reply)


if __name__ == "__main__":
    main()
