r"""Math answers as text: find the answer in a response and bring it to one spelling. No I/O, no algebra.

`canonical` leaves LaTeX that means the same: spacing and `\left`/`\right` gone, one spelling of `\frac`, mixed numbers
as fractions, plain numbers as reduced fractions (`0.5`, `8.7e8`, `1\frac{1}{2}`, `1,000`), a trailing unit set apart.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from distilled_rl.grading.plain_numbers import plain_number, spell

MAX_ANSWER_CHARS = 1024  # longer ones are only compared as text; the longest gold of the eleven benchmarks has 210

_BOX = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)


def extract(response: str, answer_format: str = "boxed") -> str | None:
    r"""The raw answer of a response; None if it has none. Linear in the length of `response`.

    `boxed`: content of the `\boxed{...}` (or `\fbox`) that starts last among those that are closed and not empty.
    `answer_line`: the rest of the last line that has `Answer:`, and what is boxed in it if anything is (DAPO's prompt).
    Raises ValueError for another format.
    """
    if answer_format == "boxed":
        return _last_boxed(response)
    if answer_format == "answer_line":
        lines = _ANSWER_LINE.findall(response)
        return (_last_boxed(lines[-1]) or lines[-1].strip() or None) if lines else None
    raise ValueError(f"unknown answer format {answer_format!r}: boxed or answer_line is expected")


def _last_boxed(text: str) -> str | None:
    first = re.search(r"\\(?:boxed|fbox)", text)
    if first is None:
        return None
    open_braces: list[tuple[int, bool]] = []  # where the content starts, and whether it is a box
    start, end = -1, -1
    for match in _BOX.finditer(text, first.start()):
        token = match.group()
        if token == "}":
            if open_braces:
                position, boxed = open_braces.pop()
                if boxed and position > start and text[position : match.start()].strip():
                    start, end = position, match.start()
        elif token[-1] == "{" and token != r"\{":
            open_braces.append((match.end(), token != "{"))
    return text[start:end].strip() if start >= 0 else None


# ---- one spelling ----


@dataclass(frozen=True)
class Answer:
    """An answer in canonical spelling.

    text:    LaTeX without the unit
    number:  its value, if it is a plain number
    percent: it had a percent sign
    unit:    a short name; empty if none was given
    """

    text: str
    number: Fraction | None = None
    percent: bool = False
    unit: str = ""


_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u00b0": r"^\circ", "\u00b2": "^2", "\u00b3": "^3", "\u00a0": " ", "\u2009": " ", "\uff0c": ",",
}  # fmt: skip

TEXT = r"\\text\{([^{}]*)\}"
_END = r"(?![A-Za-z])"  # of a command's name

# Applied in this order; each maps spellings of one thing to one spelling.
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$|\$|\\[()]|^\\\[|\\\]$", ""),  # delimiters of mathematics, and the currency sign
        (rf"\\(?:left|right|[bB]igg?[lr]?){_END}\.?", ""),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\\%", "%"),
        (r"np\.arc", r"\\arc"),  # one gold of Minerva
        (r"\\(?:textbf|textit|mathbf|mathit|boldsymbol|bm|bf)\s*\{([^{}]*)\}", r"\1"),
        (r"\\operatorname\*?\s*\{([A-Za-z]+)\}", r"\\\1 "),
        (r"\\mathrm\s*\{\s*([deij])\s*\}", r" \1 "),  # constants and differentials, not units
        (r"\\(?:text|mathrm|mbox|hbox|textrm|textnormal)\s*\{", r"\\text{"),
        (r"\{bmatrix\}", "{pmatrix}"),
        (r"(\\\\)|\\[,;: \n]|\\(?:quad|qquad|displaystyle|textstyle|limits)" + _END + r"|~|\s", r"\1 "),  # rows stay
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9])", r"\\frac\1{\2}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (rf"\\le(?:q|qslant)?{_END}", r"\\le "),
        (rf"\\ge(?:q|qslant)?{_END}", r"\\ge "),
        (rf"\\neq{_END}", r"\\ne "),
        (rf"\^\s*(?:\\circ{_END}|\{{\s*\\circ\s*\}})|\\degree{_END}", ""),
        (r"_\s*\{\s*\\text\{\s*([^{}]*?)\s*\}\s*\}", r"_{\1}"),
        (r"_\s*\\text\{\s*([^{}]*?)\s*\}", r"_{\1}"),
        (r"_\{\s*(\w)\s*\}", r"_\1"),
        (r"\^\s*(-?[0-9]+|[A-Za-z])", r"^{\1}"),
        (r",?\s*\\text\{\s*,?\s*(?:or|and)\s*\}\s*", ","),
        (r",?(?<![A-Za-z\\])\s*(?:or|and)(?![A-Za-z])\s*", ","),
        (r"\s+", " "),
        (rf"^ ?[A-Za-z](?:_\{{?\w+\}}?)?\s*\\in{_END}\s*", ""),  # x \in [0, 1]
    )
]


def canonical(raw: str) -> Answer:
    """Bring one answer, of a model or of a data set, to the spelling that the rules and the libraries compare."""
    text = raw.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return Answer(text)
    inner = _last_boxed(text)
    if inner is not None and re.match(r"\\+(?:boxed|fbox)", text):
        text = inner
    for symbol, latex in _UNICODE.items():
        text = text.replace(symbol, latex)
    currency = r"\$" in text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text[:1] == "{" and text[-1:] == "}" and is_closed(text[1:-1]):
        text = text[1:-1].strip()
    whole = re.fullmatch(TEXT, text)
    text = (whole[1] if whole else text).strip().rstrip(".").rstrip()
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    text, unit, percent, scale = _split_unit(_values_of_one_name(_ungroup(text)))
    number = plain_number(text)
    if number is not None:
        number *= 10**scale
        text = spell(number)
    elif scale:
        text, unit = raw.strip(), ""
    return Answer(text, number, percent, unit or ("$" if currency else ""))


def _ungroup(text: str) -> str:
    """Drop the thousands separators of `1,000` and `1 000`, if every comma is one and there is no bracket."""
    grouped = r"(?<![0-9.,])([0-9]{1,3})((?:[ ,][0-9]{3})+)(?![0-9])"
    joined = re.sub(grouped, lambda m: m[1] + re.sub("[ ,]", "", m[2]), text)
    return text if re.search(r"[(\[,]|\\\{", joined) else joined


def _values_of_one_name(text: str) -> str:
    """`x=2, x=3` as `2, 3`."""
    items = [item.split("=") for item in split_top(text, ",")]
    if len(items) < 2 or any(len(item) != 2 or item[0].strip() != items[0][0].strip() for item in items):
        return text
    return ", ".join(item[1].strip() for item in items) if is_name(items[0][0]) else text


# ---- units ----

_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "pound": "lb",
    "dollar": "$", "degree": "", "deg": "", "unit": "", "squareunit": "^2", "cubicunit": "^3",
}  # fmt: skip
_SHORT_UNITS = frozenset(
    ("mm", "cm", "km", "ft", "in", "yd", "mi", "lb", "kg", "mg", "sec", "min", "hr", "hrs", "mph", "mL", "ml", "Hz")
)  # fmt: skip
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words after a value that change what it says.
_NOT_A_UNIT = frozenset(
    ("or", "and", "not", "no", "if", "when", "where", "for", "is", "are", "be", "to", "but", "with", "than", "about",
     "nearly", "roughly", "approximately", "more", "less", "fewer", "at", "least", "most", "only", "over", "under",
     "above", "below", "minus", "plus", "times", "squared", "cubed", "factorial", "half", "halves", "third", "thirds",
     "quarter", "quarters", "tenths", "hundredths", "thousandths", "dozen", "pair", "pairs", "score", "base", "modulo",
     "mod", "remainder", "except", "undefined")
)  # fmt: skip
_UNIT_TAIL = re.compile(rf"(?:(?:\s|\\cdot|\\times|/)*{TEXT}(?:\^\{{?-?[0-9]+\}}?)?)+$")
_PLAIN_UNIT = re.compile(r"(-?[0-9][0-9.]*|-?\\frac\{[0-9]+\}\{[0-9]+\}) ?((?:[A-Za-z]+ ?){1,3}(?:\^\{?[23]\}?)?)")


def _split_unit(text: str) -> tuple[str, str, bool, int]:
    """Text without its unit, the unit's short name, whether that was a percent sign, a power of ten (`million`: 6)."""
    as_it_is = text, "", False, 0
    if text.endswith("%"):
        return text[:-1].rstrip(), "", True, 0
    tail = _UNIT_TAIL.search(text)
    if tail and tail.start() > 0 and text[tail.start() - 1] not in "=+-*/^_({[,<>":
        words = " ".join(re.findall(TEXT, tail[0])).replace("/", " ").split()
        head, unit = text[: tail.start()].rstrip(), tail[0]
    else:
        plain = _PLAIN_UNIT.fullmatch(text)
        if plain is None:
            return as_it_is
        head, unit = plain[1], plain[2]
        words = re.findall("[A-Za-z]+", unit)
        if not all(word in _SHORT_UNITS or len(word) >= 4 for word in words):
            return as_it_is
    if "," in unit or any(word.lower() in _NOT_A_UNIT for word in words):
        return as_it_is
    first = words[0].lower() if words else ""
    if first == "percent":
        return head, "", True, 0
    return head, _unit_name(unit, skip=words[0] if first in _SCALES else ""), False, _SCALES.get(first, 0)


def _unit_name(unit: str, skip: str) -> str:
    name = re.sub(r"\\text|\\cdot|\\times|[{}\s.]", "", unit).removeprefix(skip)
    name = re.sub(r"^(?:cubic|cu)(?!units?$)(.*)", r"\1^3", name)
    name = re.sub(r"^(?:square|sq)(?!units?$)(.*)", r"\1^2", name)
    word, power, exponent = name.partition("^")
    if len(word) > 3:
        word = word.lower().removesuffix("s")
    return _UNITS.get(word, word) + power + exponent


# ---- structure ----


def is_closed(body: str) -> bool:
    """Whether every bracket and brace that `body` opens or closes has its partner in `body`."""
    depth = 0
    for char in body:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` characters that stand outside all brackets and braces."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth <= 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def is_name(text: str) -> bool:
    r"""Whether it is a variable or function that a value is given to: `x`, `x_1`, `\theta`, `f(n)`, `\text{Area}`."""
    name = r"(?:\\text\{[^{}]*\}|\\?[A-Za-z]+)(?:_(?:\{\w+\}|\w+))?'?(?:\(\w(?:,\w)*\))?"
    return re.fullmatch(name, text.replace(" ", "")) is not None
