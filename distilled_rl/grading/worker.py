"""The child process of the grader: reads pairs of answers, asks mathruler and math-verify, writes the verdicts.

Run as a script by `distilled_rl.grading.pool`; imports nothing of this package, so that a child costs what sympy costs. One JSON
object per line, both ways:

    -> {"pairs": [[answer, gold], ...], "seconds": 5.0}     canonical texts (`distilled_rl.grading.answers`)
    <- {"mathruler": 0 | 1, "math_verify": 0 | 1}           1: equal for every pair
    <- {"exhausted": "MemoryError"}                         an answer needed more than the memory limit

The first line it writes is {"ready": true} or {"ready": false, "error": ...}. The parent kills it when an answer takes too
long; should the parent die, the end of stdin ends an idle child and SIGALRM, left to the kernel, a busy one.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30  # address space
GRACE_SECONDS = 2.0  # the parent's kill comes first
PRECISION = 30  # digits when two numbers that math-verify calls equal are looked at again

# LaTeX that mathruler reads without a loss; it drops what else it meets ("\binom{5}{2}" becomes 52)
_MATHRULER_COMMANDS = frozenset(
    "frac sqrt pi cdot times infty theta alpha beta gamma lambda mu omega sin cos tan ln".split()
)


def mathruler_text(text: str) -> str | None:
    r"""`text` such that mathruler's flattening keeps its meaning; None where it cannot.

    mathruler 0.1.0 writes `\frac{a+b}{c}` as `a+b/c` and `e^{2t}` as `e^2t`, so that `a+\frac{b}{c}` and `e^{2}t` equal them.
    """
    if not set(re.findall(r"\\([A-Za-z]+|.)", text)) <= _MATHRULER_COMMANDS or re.search(
        r"\\sqrt\s*\[|[=<>&!'_|]", text
    ):
        return None
    if re.search(r"[A-Za-z]\s*\(", re.sub(r"\\[a-z]+", "", text)):
        return None  # "f(2)" is 2f to it
    text = re.sub(r"\^\{([0-9]+)\}(?=\s*[0-9])", r"^{\1}\\cdot ", text)
    for _ in range(text.count("\\frac") + text.count("\\sqrt") + text.count("^{")):
        changed = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", _inline_fraction, text, count=1)
        if changed == text:
            changed = re.sub(r"\^\{([^{}]*)\}", lambda m: "^" + _atom(m[1]), text, count=1)
        if changed == text:
            changed = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text, count=1)
        if changed == text:
            break
        text = changed
    text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
    return None if "\\frac" in text or re.search(r"\^\{|\\sqrt", text) else text


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[0-9]+|[A-Za-z]", text.strip()) else f"({text})"


def _inline_fraction(match: re.Match[str]) -> str:
    above, below = _atom(match[1]), _atom(match[2])
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
    alone = before[-1:] in ("", "(", "[", "{", ",", "+", "-") and after[:1] in ("", ")", "]", "}", ",", "+", "-")
    return f"{above}/{below}" if alone else f"({above}/{below})"


def ask_mathruler(answer: str, gold: str) -> bool:
    """mathruler's verdict on two canonical texts; False where it would have to drop part of one."""
    from mathruler.grader import grade_answer

    left, right = mathruler_text(answer), mathruler_text(gold)
    return left is not None and right is not None and bool(grade_answer(left, right))


def ask_math_verify(answer: str, gold: str) -> bool:
    """math-verify's verdict on two canonical texts, each parsed as LaTeX as a whole, and looked at again where it says equal."""
    from math_verify import verify
    from math_verify.parser import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_normalization())]
    parsed: list[list[Any]] = [
        parse(rf"\boxed{{{_separate(text)}}}", config, fallback_mode="first_match", parsing_timeout=0)
        for text in (gold, answer)
    ]
    if not all(len(result) == 2 and not isinstance(result[0], str) for result in parsed):
        return False  # one of them is not read as mathematics; equal texts never get here
    (left, left_text), (right, right_text) = parsed
    equal = verify(left, right, timeout_seconds=0, allow_set_relation_comp=True)
    return bool(equal) and _is_read_whole(left_text) and _is_read_whole(right_text) and _is_really_equal(left, right)


def _separate(text: str) -> str:
    r"""math-verify reads `e^{2}t` as `e^{2}` and stops: write the product out."""
    return re.sub(r"(e\^\{[^{}]*\})(?=\s*(?:[A-Za-z0-9(]|\\(?:sin|cos|sqrt|frac|pi|left)))", r"\1 \\cdot ", text)


def _normalization() -> Any:
    from latex2sympy2_extended.math_normalization import NormalizationConfig

    return NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last")


def _is_read_whole(latex: str) -> bool:
    """Whether the grammar takes the text to its end: its start rule may stop early and say nothing."""
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    parser = _Latex2Sympy(None, True, False).create_parser(latex)
    parser.math()
    return parser.getTokenStream().LA(1) == -1  # antlr's Token.EOF


def _is_really_equal(left: Any, right: Any) -> bool:
    """Look again at what math-verify compares loosely: numbers to 15 digits after chopping, equations by their solutions."""
    import sympy

    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        ratio = sympy.simplify((left.lhs - left.rhs) / (right.lhs - right.rhs))
        return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) and left.is_number and right.is_number:
        a, b = (sympy.N(side.doit(), PRECISION) for side in (left, right))
        difference, size = abs(a - b), max(abs(a), abs(b))
        return bool(difference <= size * sympy.Float(10) ** (10 - PRECISION))
    return True


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Grade all pairs of one request. A library that raises has not found the pair equal: its verdict is 0."""
    verdicts = {}
    for name, ask in (("mathruler", ask_mathruler), ("math_verify", ask_math_verify)):
        try:
            verdicts[name] = int(all(ask(answer, gold) for answer, gold in request["pairs"]))
        except MemoryError:
            return {"exhausted": "MemoryError"}
        except Exception:  # whatever a parser meets in a model's text; nothing of ours runs in there
            verdicts[name] = 0
    return verdicts


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write((json.dumps(message) + "\n").encode("ascii"))
    stream.flush()


def main() -> None:
    """Answer requests from stdin until it ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes stdin
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
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
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_SECONDS)
        reply = answer_request(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(out, reply)


if __name__ == "__main__":
    main()
