r"""What needs no algebra: right, wrong, or to be asked. No I/O.

`decide` refuses what the libraries are known to accept wrongly (math-verify 0.9.0, mathruler 0.1.0): brackets of
another kind, another base, other variables or capitals, other words, one of several values. Equal means exactly equal:
a decimal approximation of a fraction or of pi is wrong. The readings that this costs are the false negatives that
tests/unit/test_grading.py names.
"""

import re

from distilled_rl.grading.answers import MAX_ANSWER_CHARS, TEXT, Answer, canonical, is_closed, is_name, split_top

MAX_MEMBERS = 4  # `x = a = b = c`: equalities in one answer that are looked at
MAX_DEPTH = 20  # nested brackets; deeper texts are only compared as text

_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![A-Za-z])")
_MANY_VALUED = re.compile(r"\\(?:cup|cap|pm|mp)(?![A-Za-z])")
# Symbols that the libraries skip or read as something else: both sides have them or none.
_TELLING = (r"\ne", r"\dots", r"\ldots", r"\cdots", "'", r"\mod", r"\pmod", r"\equiv", r"\approx", r"\sim")


def decide(answer: Answer, gold: Answer) -> bool | list[tuple[str, str]]:
    """Right, wrong, or the (answer, gold) pairs of canonical texts of which a library must call every one equal."""
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if not answer.text:
        return False
    if any(len(text) > MAX_ANSWER_CHARS or _depth(text) > MAX_DEPTH for text in (answer.text, gold.text)):
        return answer.text == gold.text
    if _flat(answer.text) == _flat(gold.text):
        return True
    pairs = _pair_up(answer, gold)
    open_pairs: list[tuple[str, str]] = []
    for left, right in pairs:
        verdict = _flat(left.text) == _flat(right.text) or _decide_pair(left, right)
        if verdict is False:
            return False
        open_pairs += verdict if isinstance(verdict, list) else []
    return open_pairs or bool(pairs)


def _pair_up(answer: Answer, gold: Answer) -> list[tuple[Answer, Answer]]:
    """What must be equal for `answer` to be right; [] if it is wrong. Of `x = 1/2 = 0.5` every member but the name."""
    members, gold_members = _members(answer.text), _members(gold.text)
    if len(members) == len(gold_members) == 1:
        return [(answer, gold)]
    if len(gold_members) == 1:
        if is_name(members[0]) or (_is_label(members[0]) and not _variables(gold.text)):
            members = members[1:]
        return [(canonical(member), gold) for member in members] if len(members) <= MAX_MEMBERS else []
    if len(members) == 1:
        given = len(gold_members) == 2 and is_name(gold_members[0])
        return [(answer, canonical(gold_members[1]))] if given else []
    if len(members) == len(gold_members) == 2 and _flat(members[0]) == _flat(gold_members[0]):
        return [(canonical(members[1]), canonical(gold_members[1]))]
    both_give_values = is_name(members[0]) and is_name(gold_members[0])
    return [] if both_give_values else [(answer, gold)]


def _decide_pair(answer: Answer, gold: Answer) -> bool | list[tuple[str, str]]:
    if answer.number is not None and gold.number is not None:
        if answer.percent == gold.percent:
            return answer.number == gold.number
        return answer.number == gold.number * 100 if answer.percent else answer.number * 100 == gold.number
    a, g = answer.text, gold.text
    if not a or _words(a) != _words(g) or _differs_in_kind(a, g):
        return False
    if _variables(a) != _variables(g) and not _is_inequality_for_interval(a, g):
        return False
    if any(re.search(r"[0-9] +[0-9]|[0-9]\s*_", text) for text in (a, g)):  # side by side, or in a base: only as text
        return False
    if any((symbol in a) != (symbol in g) for symbol in _TELLING) or _repeats(a) != _repeats(g):
        return False
    return [(a, g)]


def _differs_in_kind(a: str, g: str) -> bool:
    """Whether one is a tuple, an interval, a set or a list and the other is something else, or has more entries."""
    (a_kind, a_entries), (g_kind, g_entries) = _brackets(a), _brackets(g)
    if any(_RELATION.search(text) or _MANY_VALUED.search(text) for text in (a, g)):
        return bool(a_kind and g_kind and a_kind != g_kind)
    if a_kind != g_kind and {a_kind, g_kind} != {"", r"\{\}"}:
        return True
    return a_entries != g_entries


def _repeats(text: str) -> list[str]:
    """The entries of a list or set, sorted, if one is there twice. The libraries make sets: 1,1,2 is 1,2,2 to them."""
    kind = _brackets(text)[0]
    if kind not in ("", r"\{\}"):
        return []
    entries = sorted(_flat(canonical(entry).text) for entry in split_top(text[2:-2] if kind else text, ","))
    return entries if len(set(entries)) < len(entries) else []


def _is_inequality_for_interval(a: str, g: str) -> bool:
    """`1 < x < 2` where the gold is `(1, 2)`."""
    return bool(_RELATION.search(a)) and len(_variables(a)) == 1 and not _variables(g) and bool(_brackets(g)[0])


def _brackets(text: str) -> tuple[str, int]:
    r"""Kind of the brackets around a whole list (`()`, `(]`, `\{\}`, ... or none) and its number of entries."""
    for opening in (r"\{", "(", "["):
        closing = next((c for c in (r"\}", ")", "]") if text.endswith(c)), "")
        if text.startswith(opening) and closing and (opening == r"\{") == (closing == r"\}"):
            body = text[len(opening) : len(text) - len(closing)]
            entries = len(split_top(body, ","))
            if is_closed(body) and (opening == r"\{" or entries > 1):
                return opening + closing, entries
    return "", len(split_top(text, ","))


def _members(text: str) -> list[str]:
    """The sides of `a = b = c`; the whole text where it is a list of equations or an inequality."""
    if len(split_top(text, ",")) > 1 or re.search(r"[<>!:]=|=[<>]", text):
        return [text]
    return split_top(text, "=")


def _is_label(text: str) -> bool:
    """Whether it names what is asked for, such as `m+n` or `|AB|`; not a multiple such as `2x`."""
    return bool(_variables(text)) and re.match(r"[-0-9.]|\\frac", text) is None


def _words(text: str) -> set[str]:
    r"""Words of prose, lower case: all text in `\text{}`, and elsewhere words of four letters or more."""
    inside = " ".join(re.findall(TEXT, text))
    outside = re.sub(rf"{TEXT}|\\[A-Za-z]+", " ", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", inside) + re.findall(r"[A-Za-z]{4,}", outside)}


def _variables(text: str) -> set[str]:
    r"""Letters that stand for something, capitals told apart. `e` and `i` may come and go: `e^{i\pi}` is -1."""
    outside = re.sub(rf"{TEXT}|\\[A-Za-z]+|[A-Za-z]{{4,}}", " ", text)
    return set(re.findall(r"[A-Za-z]", outside)) - {"e", "i"}


def _flat(text: str) -> str:
    """Text for an exact match: no spaces except between digits; prose in lower case."""
    if re.fullmatch(r"[A-Za-z ]{4,}", text):
        return text.lower()
    return re.sub(r"(?<![0-9]) +| +(?![0-9])", "", re.sub(r"\\(?:times|cdot)(?![A-Za-z])", "*", text))


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest
