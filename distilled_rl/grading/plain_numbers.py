r"""Exact values of numbers that need no algebra: `0.5`, `8.7e8`, `0.\overline{3}`, `1\frac{1}{2}`, `3/4`."""

import re
from fractions import Fraction

MAX_EXPONENT = 400  # 10^k is written out up to this |k|

_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_SCALED = re.compile(rf"({_DECIMAL})(?:[eE]([-+]?[0-9]+)|(?:\\times|\\cdot|\*)10\^\{{?([-+]?[0-9]+)\}}?)")
_POWER_OF_TEN = re.compile(r"10\^\{([-+]?[0-9]+)\}")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?")
_RATIO = re.compile(rf"\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}}|(-?{_DECIMAL})/({_DECIMAL})")
_MIXED = re.compile(r"([0-9]+)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|_([0-9]+)/([0-9]+))")


def plain_number(text: str) -> Fraction | None:
    """The exact value of a plain number, None for anything else."""
    text = re.sub(r"(?<=[0-9]) (?=[0-9]+/)", "_", text.strip())  # 1 1/2
    if re.search(r"[0-9] [0-9]", text):
        return None
    text = text.replace(" ", "")
    value = _magnitude(text[1:] if text[:1] in ("-", "+") else text)
    return -value if value is not None and text.startswith("-") else value


def _magnitude(text: str) -> Fraction | None:
    if re.fullmatch(_DECIMAL, text):
        return _decimal(text)
    if match := _SCALED.fullmatch(text):
        return _times_ten_to(_decimal(match[1]), int(match[2] or match[3]))
    if match := _POWER_OF_TEN.fullmatch(text):
        return _times_ten_to(Fraction(1), int(match[1]))
    if match := _REPEATING.fullmatch(text):
        whole, fixed, period = match.groups()
        scale = 10 ** len(fixed)
        return (
            int(whole or "0")
            + Fraction(int(fixed or "0"), scale)
            + Fraction(int(period), scale * (10 ** len(period) - 1))
        )
    if match := _RATIO.fullmatch(text):
        above, below = match[1] or match[3], _decimal(match[2] or match[4])
        sign = -1 if above.startswith("-") else 1
        return sign * _decimal(above.removeprefix("-")) / below if below else None
    if match := _MIXED.fullmatch(text):
        above, below = int(match[2] or match[4]), int(match[3] or match[5])
        return int(match[1]) + Fraction(above, below) if 0 < above < below else None  # 2\frac{3}{2} is a product
    return None


def _decimal(digits: str) -> Fraction:
    return Fraction("0" + digits.rstrip("."))


def _times_ten_to(value: Fraction, exponent: int) -> Fraction | None:
    return value * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None


def spell(number: Fraction) -> str:
    """Canonical LaTeX of an exact value: an integer or a reduced fraction."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{'-' if number < 0 else ''}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"
