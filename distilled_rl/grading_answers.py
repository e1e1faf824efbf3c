r"""Math answers as text: find the answer in a response, bring it to one spelling, decide what needs no algebra. No I/O.

    response --extract--> answer --canonical--> Answer --decide--> right | wrong | pairs that need a computer algebra system

`canonical` leaves LaTeX that means the same: spacing and `\left`/`\right` gone, one spelling of `\frac`, mixed numbers as
fractions, plain numbers as reduced fractions (`0.5`, `8.7e8`, `1\frac{1}{2}`, `1,000`), a trailing unit set apart.
`decide` refuses what the libraries are known to accept wrongly (math-verify 0.9.0, mathruler 0.1.0): brackets of another
kind, another base, other variables or capitals, other words, one of several values. Equal means exactly equal: a decimal
approximation of a fraction or of pi is wrong. The readings that this costs are the false negatives in tests/unit/test_grading.py.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 1024  # longer ones are only compared as text; the longest gold of the eleven benchmarks has 210
MAX_EXPONENT = 400  # 10^k is written out up to this |k|
MAX_MEMBERS = 4  # `x = a = b = c`: equalities in one answer that are looked at

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
    open_braces: list[tuple[int, bool]] = []
    start, end = -1, -1
    for match in _BOX.finditer(text):
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
    """`text`: canonical LaTeX without unit. `number`: its value if it is a plain number. `percent`: it had a percent sign."""

    text: str
    number: Fraction | None = None
    percent: bool = False
    unit: str = ""


_UNICODE = {
    "−": "-", "–": "-", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ", "²": "^2", "³": "^3",
    "\u00a0": " ", "\u2009": " ", "，": ",",
}  # fmt: skip
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "pound": "lb",
    "dollar": "$", "degree": "", "deg": "", "unit": "", "squareunit": "^2", "cubicunit": "^3",
}  # fmt: skip
_SHORT_UNITS = frozenset("mm cm km ft in yd mi lb kg mg sec min hr hrs mph mL ml Hz kHz eV keV MeV".split())
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_A_UNIT = frozenset(
    "or and not no if when where for is are be to but with than about nearly roughly approximately more less fewer at "
    "least most only over under above below minus plus times squared cubed factorial half halves third thirds quarter "
    "quarters tenths hundredths thousandths dozen pair pairs score base modulo mod remainder except undefined".split()
)
_TEXT = r"\\text\{([^{}]*)\}"
_UNIT_TAIL = re.compile(rf"(?:(?:\s|\\cdot|\\times|/)*{_TEXT}(?:\^\{{?-?[0-9]+\}}?)?)+$")
_SPACE = re.compile(r"\\(?:[,;:! \n]|quad\b|qquad\b|displaystyle\b|textstyle\b|limits\b)|~|\s")
_GROUPED = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:[ ,][0-9]{3})+)(?![0-9])(?!,)")

_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![A-Za-z])")
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_INT = r"(?:[0-9]+)"
_NUMBER_FORMS = [
    (re.compile(rf"({_DECIMAL})"), lambda m: _decimal(m[1])),
    (re.compile(rf"({_DECIMAL})[eE]([-+]?[0-9]+)"), lambda m: _scaled(m[1], m[2])),
    (re.compile(rf"({_DECIMAL})(?:\\times|\\cdot|\*)10\^\{{?([-+]?[0-9]+)\}}?"), lambda m: _scaled(m[1], m[2])),
    (re.compile(r"10\^\{([-+]?[0-9]+)\}|10\^([0-9])"), lambda m: _scaled("1", m[1] or m[2])),
    (re.compile(rf"([0-9]*)\.([0-9]*)\\overline\{{?({_INT})\}}?"), lambda m: _repeating(m[1], m[2], m[3])),
    (re.compile(rf"\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}}"), lambda m: _ratio(m[1], m[2])),
    (re.compile(rf"({_DECIMAL})/({_DECIMAL})"), lambda m: _ratio(m[1], m[2])),
    (re.compile(rf"({_INT})\\frac\{{({_INT})\}}\{{({_INT})\}}"), lambda m: _mixed(m[1], m[2], m[3])),
    (re.compile(rf"({_INT})_({_INT})/({_INT})"), lambda m: _mixed(m[1], m[2], m[3])),
]


def canonical(raw: str) -> Answer:
    """Bring one answer, of a model or of a data set, to the spelling that `decide` and the libraries compare."""
    text = raw.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return Answer(text)
    inner = _last_boxed(text)
    if inner is not None and re.match(r"\\+(boxed|fbox)", text):
        text = inner
    for symbol, latex in _UNICODE.items():
        text = text.replace(symbol, latex)
    currency = r"\$" in text
    text = re.sub(r"\\\$|\$|\\[()]|^\\\[|\\\]$", "", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", "", text)
    text = text.replace("{,}", ",").replace(r"\!", "").replace(r"\%", "%").replace("np.arc", r"\arc")
    text = re.sub(r"\\(?:textbf|textit|mathbf|mathit|boldsymbol|bm|bf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\mathrm\s*\{\s*([deij])\s*\}", r" \1 ", re.sub(r"\\operatorname\*?\s*\{([A-Za-z]+)\}", r"\\\1 ", text))
    text = re.sub(r"\\(?:text|mathrm|mbox|hbox|textrm|textnormal)\s*\{", r"\\text{", text).replace("{bmatrix}", "{pmatrix}")
    text = _SPACE.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9])", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\le(?:q|qslant)?(?![A-Za-z])", r"\\le ", re.sub(r"\\ge(?:q|qslant)?(?![A-Za-z])", r"\\ge ", text))
    text = re.sub(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", "", text)
    text = re.sub(r"_\s*(?:\{\s*\\text\{([^{}]*)\}\s*\}|\\text\{([^{}]*)\})", _subscript, text)
    text = re.sub(r"_\{\s*(\w)\s*\}", r"_\1", re.sub(r"\^\s*(-?[0-9]+|[A-Za-z])", r"^{\1}", text))
    text = re.sub(r",?\s*\\text\{\s*,?\s*(?:or|and)\s*\}\s*|,?(?<![A-Za-z\\])\s*(?:or|and)(?![A-Za-z])\s*", ",", text)
    text = re.sub(r"^[A-Za-z](?:_\{?\w+\}?)?\s*\\in(?![A-Za-z])\s*", "", re.sub(r"\s+", " ", text).strip())
    if text[:1] == "{" and text[-1:] == "}" and _is_closed(text[1:-1]):
        text = text[1:-1]
    whole = re.fullmatch(_TEXT, text)
    text = (whole[1] if whole else text).strip().rstrip(".").rstrip()
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    text, unit, percent, scale = _split_unit(_values_of_one_name(_ungroup(text)))
    number = _number(text)
    if number is not None:
        number *= 10**scale
        text = _spell(number)
    elif scale:
        text, unit = raw.strip(), ""
    return Answer(text, number, percent, unit or ("$" if currency else ""))


def _subscript(match: re.Match[str]) -> str:
    return f"_{{{(match[1] or match[2] or '').strip()}}}"


def _ungroup(text: str) -> str:
    """Drop the thousands separators of `1,000` and `1 000`, if every comma is one and there is no bracket."""
    joined = _GROUPED.sub(lambda m: m[1] + re.sub("[ ,]", "", m[2]), text)
    return text if re.search(r"[(\[,]|\\\{", joined) else joined


def _values_of_one_name(text: str) -> str:
    """`x=2, x=3` as `2, 3`."""
    items = [item.split("=") for item in split_top(text, ",")]
    one_name = len(items) > 1 and all(len(item) == 2 and item[0].strip() == items[0][0].strip() for item in items)
    return ", ".join(item[1].strip() for item in items) if one_name and _is_name(items[0][0]) else text


def _split_unit(text: str) -> tuple[str, str, bool, int]:
    """Text without its unit, the unit's short name, whether that was a percent sign, and a power of ten (`million`)."""
    if text.endswith("%"):
        return text[:-1].rstrip(), "", True, 0
    tail = _UNIT_TAIL.search(text)
    if tail and tail.start() > 0 and text[tail.start() - 1] not in "=+-*/^_({[,<>":
        words = " ".join(re.findall(_TEXT, tail[0])).replace("/", " ").split()
        head, unit = text[: tail.start()].rstrip(), tail[0]
    else:
        plain = re.fullmatch(r"(-?[0-9][0-9.]*|-?\\frac\{[0-9]+\}\{[0-9]+\}) ?((?:[A-Za-z]+ ?){1,3}(?:\^\{?[23]\}?)?)", text)
        if plain is None:
            return text, "", False, 0
        head, unit = plain[1], plain[2]
        words = re.findall("[A-Za-z]+", unit)
        if not all(word in _SHORT_UNITS or len(word) >= 4 for word in words):
            return text, "", False, 0
    if any(word.lower() in _NOT_A_UNIT for word in words):
        return text, "", False, 0
    if words and words[0].lower() == "percent":
        return head, "", True, 0
    scale = _SCALES.get(words[0].lower(), 0) if words else 0
    return head, _unit_name(unit, skip=words[0] if scale else ""), False, scale


def _unit_name(unit: str, skip: str) -> str:
    name = re.sub(r"\\text|\\cdot|\\times|[{}\s.]", "", unit).removeprefix(skip)
    name = re.sub(r"^(?:square|sq)(?!units?$)(.*)", r"\1^2", re.sub(r"^(?:cubic|cu)(?!units?$)(.*)", r"\1^3", name))
    word, power, exponent = name.partition("^")
    if len(word) > 3:
        word = word.lower().removesuffix("s") if word.lower() != "inches" else "inch"
    word = _UNITS.get(word, word)
    return word + power + exponent


def _number(text: str) -> Fraction | None:
    text = re.sub(r"(?<=[0-9]) (?=[0-9]+/)", "_", text.strip())
    if re.search(r"[0-9] [0-9]", text):
        return None
    text = text.replace(" ", "")
    sign = -1 if text.startswith("-") else 1
    body = text[1:] if text[:1] in ("-", "+") else text
    for pattern, value in _NUMBER_FORMS:
        match = pattern.fullmatch(body)
        if match:
            number = value(match)
            return None if number is None else sign * number
    return None


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.rstrip(".") if digits.startswith(".") else "0" + digits.rstrip("."))


def _scaled(digits: str, exponent: str) -> Fraction | None:
    return _decimal(digits) * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_EXPONENT else None


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    tail = Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    return Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed)) + tail


def _ratio(above: str, below: str) -> Fraction | None:
    numerator = -_decimal(above[1:]) if above.startswith("-") else _decimal(above)
    return numerator / _decimal(below) if _decimal(below) else None


def _mixed(whole: str, above: str, below: str) -> Fraction | None:
    return int(whole) + Fraction(int(above), int(below)) if 0 < int(above) < int(below) else None


def _spell(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    return f"{'-' if number < 0 else ''}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


# ---- what needs no algebra ----


def decide(answer: Answer, gold: Answer) -> bool | list[tuple[str, str]]:
    """Right, wrong, or the (answer, gold) pairs of canonical texts of which a library must call every one equal."""
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if not answer.text or max(len(answer.text), len(gold.text)) > MAX_ANSWER_CHARS:
        return bool(answer.text) and answer.text == gold.text
    if _flat(answer.text) == _flat(gold.text):
        return True
    members, gold_members = _members(answer.text), _members(gold.text)
    if len(members) == 1 and len(gold_members) == 1:
        return _decide_pair(answer, gold)
    if len(gold_members) == 1:
        if _is_name(members[0]) or (_is_label(members[0]) and not _variables(gold.text)):
            members = members[1:]
        pairs = [(canonical(member), gold) for member in members]
    elif len(members) == 1:
        if len(gold_members) != 2 or not _is_name(gold_members[0]):
            return False
        pairs = [(answer, canonical(gold_members[1]))]
    elif len(members) == len(gold_members) == 2 and _flat(members[0]) == _flat(gold_members[0]):
        pairs = [(canonical(members[1]), canonical(gold_members[1]))]
    else:
        both_assign = _is_name(members[0]) and _is_name(gold_members[0])
        return False if both_assign else _decide_pair(answer, gold)
    if not 0 < len(pairs) <= MAX_MEMBERS:
        return False
    open_pairs: list[tuple[str, str]] = []
    for left, right in pairs:
        verdict = _flat(left.text) == _flat(right.text) or _decide_pair(left, right)
        if verdict is False:
            return False
        open_pairs += verdict if isinstance(verdict, list) else []
    return open_pairs or True


def _decide_pair(answer: Answer, gold: Answer) -> bool | list[tuple[str, str]]:
    if answer.number is not None and gold.number is not None:
        shift = 100 if answer.percent != gold.percent else 1
        return answer.number == gold.number * shift if answer.percent else answer.number * shift == gold.number
    a, g = answer.text, gold.text
    if not a or _differs_in_kind(a, g) or _words(a) != _words(g):
        return False
    inequality_for_interval = _RELATION.search(a) and not _RELATION.search(g) and len(_variables(a)) == 1 and _brackets(g)[0]
    if _variables(a) != _variables(g) and not (inequality_for_interval and not _variables(g)):
        return False
    if any(re.search(r"[0-9] +[0-9]", text) or _number_in_a_base(text) for text in (a, g)):
        return False
    if any((symbol in a) != (symbol in g) for symbol in (r"\ne", r"\dots", r"\ldots", r"\cdots", "'", r"\mod", r"\pmod")):
        return False
    return [(a, g)]


def _differs_in_kind(a: str, g: str) -> bool:
    """Whether one is a tuple or interval, a set or a list and the other is something else or has other entries in number."""
    (left, a_items), (right, g_items) = _brackets(a), _brackets(g)
    relation = any(_RELATION.search(text) or re.search(r"\\(?:cup|cap|pm|mp)(?![A-Za-z])", text) for text in (a, g))
    if left != right and not relation and not {left, right} <= {"", r"\{\}"}:
        return True
    if left and right and left != right:
        return True
    return not relation and a_items != g_items


def _brackets(text: str) -> tuple[str, int]:
    r"""Kind of the brackets around a whole list (`()`, `(]`, `\{\}`, ... or none) and its number of entries."""
    inner, kind = text, ""
    for opening in (r"\{", "(", "["):
        closing = next((c for c in (r"\}", ")", "]") if text.endswith(c)), "")
        if text.startswith(opening) and closing and (opening == r"\{") == (closing == r"\}"):
            body = text[len(opening) : len(text) - len(closing)]
            if _is_closed(body) and (opening == r"\{" or len(split_top(body, ",")) > 1):
                inner, kind = body, opening + closing
    return kind, len(split_top(inner, ","))


def _is_closed(body: str) -> bool:
    depth = 0
    for char in body.replace("\\{", "(").replace("\\}", ")"):
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


def _members(text: str) -> list[str]:
    """The sides of `a = b = c`; the whole text where it is a list of equations or an inequality."""
    if len(split_top(text, ",")) > 1 or re.search(r"[<>!:]=|=[<>]", text):
        return [text]
    return split_top(text, "=")


def _is_name(text: str) -> bool:
    name = r"(?:\\text\{[^{}]*\}|\\?[A-Za-z]+)(?:_(?:\{\w+\}|\w+))?'?(?:\(\w(?:,\w)*\))?"
    return re.fullmatch(name, text.replace(" ", "")) is not None


def _is_label(text: str) -> bool:
    """Whether it names what is asked for, such as `m+n` or `|AB|`; not a multiple such as `2x`."""
    return bool(_variables(text)) and re.match(r"[-0-9.]|\\frac", text) is None


def _number_in_a_base(text: str) -> bool:
    return re.search(r"[0-9]\s*_", text) is not None


def _words(text: str) -> set[str]:
    r"""Words of prose, lower case: all text in `\text{}`, and outside it words of four letters and more that are no command."""
    inside = " ".join(re.findall(_TEXT, text))
    outside = re.sub(rf"{_TEXT}|\\[A-Za-z]+", " ", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", inside) + re.findall(r"[A-Za-z]{4,}", outside)}


def _variables(text: str) -> set[str]:
    """Letters that stand for something, capitals told apart; `e` and `i` may come and go (`e^{i\\pi}` is -1), words aside."""
    outside = re.sub(rf"{_TEXT}|\\[A-Za-z]+|[A-Za-z]{{4,}}", " ", text)
    return set(re.findall(r"[A-Za-z]", outside)) - {"e", "i"}


def _flat(text: str) -> str:
    """Text for an exact match: without spaces, words in lower case."""
    prose = re.fullmatch(r"[A-Za-z ]{4,}", text)
    return text.lower() if prose else re.sub(r"(?<![0-9]) +| +(?![0-9])", "", re.sub(r"\\(?:times|cdot)(?![A-Za-z])", "*", text))
