"""The topics of a compatibility report that are about token ids: vocabulary, special tokens, end of text, padding."""

from collections.abc import Collection, Iterable, Iterator

from distilled_rl.config import ConfigError
from distilled_rl.teacher.model_files import ModelFiles
from distilled_rl.teacher.verdicts import NOTHING, Line, Pair, Verdict

SHOWN = 3  # examples in a message
# DeepSeek-R1-Distill-Qwen took Qwen's tokenizer and gave these ids (and 151646) another meaning.
R1_DISTILL = {151648: "<think>", 151649: "</think>"}
QWEN = {151648: "<|box_start|>", 151649: "<|box_end|>"}


def tokens(pair: Pair) -> Line:
    """Each token of the student's vocabulary has the same id for the teacher, and a row in the teacher's embedding."""
    ours, theirs = pair.student.vocabulary, pair.teacher.vocabulary
    regular = {token: number for token, number in ours.items() if token not in pair.student.added}
    different = sorted((number, token) for token, number in regular.items() if theirs.get(token) != number)
    if different:
        return Line(
            "tokens",
            Verdict.REFUSE,
            f"{len(different)} of the student's {len(ours)} tokens have another id, or none, for the teacher "
            f"({_examples(f'{token!r}: {number} and {theirs.get(token)}' for number, token in different)})",
            "its log-probs would belong to other tokens: use a teacher with the student's tokenizer",
        )
    rows = pair.teacher.number("vocab_size")
    if rows is None:
        raise ConfigError(
            f"{pair.teacher.config_file} has no vocab_size, so nothing shows that the teacher's embedding holds the "
            "student's tokens: write the number of its rows there"
        )
    if (highest := max(ours.values())) >= rows:
        return Line(
            "tokens",
            Verdict.REFUSE,
            f"the student's highest token id is {highest}, the teacher's vocab_size {rows}",
            "it cannot score every token: use a teacher with the student's tokenizer",
        )
    found = f"{len(regular)} regular tokens have the same ids; the highest id is {highest}, below {rows}"
    more = len(theirs.keys() - pair.teacher.added - ours.keys())
    if more:
        found, advice = f"{found}; the teacher knows {more} more", f"{NOTHING}: the student never samples those"
        return Line("tokens", Verdict.HARMLESS, found, advice)
    return Line("tokens", Verdict.SAME, found)


def special_tokens(pair: Pair) -> Line:
    """The tokens added to the student's vocabulary mean the same to the teacher, by id and by text."""
    student, teacher = pair.student, pair.teacher
    at = {number: token for token, number in teacher.vocabulary.items() if token not in teacher.added}
    at |= {teacher.vocabulary[token]: token for token in teacher.added}
    different = []
    for token in sorted(student.added, key=student.vocabulary.__getitem__):
        number, other = student.vocabulary[token], teacher.vocabulary.get(token)
        if other == number:
            continue
        meaning = f"{at[number]!r} for the teacher" if number in at else "unknown to the teacher"
        moved = "" if other is None else f" (whose {token!r} is {other})"
        different.append(f"{number} is {token!r} for the student, {meaning}{moved}")
    if different:
        found = f"{len(different)} special or added token(s) differ: {_examples(different, '; ')}"
        if who := _r1_distill(student, teacher):
            found = (
                f"DeepSeek-R1-Distill-Qwen re-uses ids 151646, 151648 and 151649 of Qwen's tokenizer, and the {who} is "
                f"such a model: {found}"
            )
        return pair.refusal(
            "special_tokens",
            found,
            "use a teacher with the student's special tokens",
            "the teacher scores the student's tokens of these ids as its own",
        )
    if more := teacher.added - student.vocabulary.keys():
        found = f"{len(student.added)} are the same; the teacher knows {len(more)} more"
        return Line("special_tokens", Verdict.HARMLESS, found, f"{NOTHING}: the student never samples those")
    return Line("special_tokens", Verdict.SAME, f"{len(student.added)} have the same ids and texts")


def _r1_distill(student: ModelFiles, teacher: ModelFiles) -> str | None:
    """Return which of the two is DeepSeek-R1-Distill-Qwen while the other has Qwen's tokenizer, None elsewhere."""
    for who, model, other in (("student", student, teacher), ("teacher", teacher, student)):
        if all(model.token(number) == token for number, token in R1_DISTILL.items()) and all(
            other.token(number) == token for number, token in QWEN.items()
        ):
            return who
    return None


def eos(pair: Pair) -> Line:
    """The student ends a text as the teacher does; pads and beginnings of text do not matter."""
    student, teacher, eos_map = pair.student, pair.teacher, pair.eos_map
    if stray := [number for number in eos_map if number not in student.stops]:
        known = _numbers(sorted(student.stops)) or "no known id"
        raise ConfigError(f"eos_map maps {_numbers(stray)}, but the student ends a text with {known}")
    if not student.ends or not teacher.ends:
        who = "student" if not student.ends else "teacher"
        return Line(
            "eos",
            Verdict.HARMLESS,
            f"the {who}'s files name no end of text, so nothing is compared",
            f"make sure that the {who} ends a text as the other does, and write eos_token into tokenizer_config.json",
        )
    wrong = [f"{number}:{target}" for number, target in eos_map.items() if target not in teacher.ends]
    if wrong:
        found = f"eos_map has {', '.join(wrong)}, but the teacher ends a text with {_named(teacher, teacher.ends)}"
        return Line("eos", Verdict.REFUSE, found, "map the student's id to the one that the teacher ends a text with")
    lost = [number for number in student.ends if number not in eos_map and number not in teacher.ends]
    if lost:
        found = (
            f"the student ends a text with {_named(student, lost)}, the teacher with {_named(teacher, teacher.ends)}"
        )
        if known := [number for number in lost if number in teacher.stops]:
            found += f" (it may stop at {_numbers(known)} too, but that is not what it writes)"
        return pair.refusal(
            "eos",
            found,
            "the teacher would teach it never to stop: set the same eos_token in both tokenizer_config.json, or use a "
            "teacher of the student's family",
            "the student's end tokens get the teacher's low log-probs, so watch the response lengths",
        )
    scored = [f"{number} is scored as {target}" for number, target in eos_map.items()]
    notes = [*scored, *_other_roles(pair)]
    extra = sorted(student.stops - set(student.ends) - teacher.stops - eos_map.keys())
    if extra:
        notes.append(f"the student may stop at {_numbers(extra)} too, which the teacher does not")
    found = f"both end a text with {_named(student, student.ends)}"
    if scored:
        found = f"the student ends a text with {_named(student, student.ends)}"
    if not notes:
        return Line("eos", Verdict.SAME, found)
    advice = f"{NOTHING}: pads and beginnings of text are not scored"
    if extra:
        advice = "the teacher disfavours those ids; take them out of the student's generation_config.json if that hurts"
    elif scored:
        advice = f"{NOTHING}: the map does it"
    return Line("eos", Verdict.HARMLESS, "; ".join([found, *notes]), advice)


def _other_roles(pair: Pair) -> Iterator[str]:
    """Yield how the two differ in the tokens that are never scored."""
    for role in ("bos_token", "pad_token"):
        ours, theirs = pair.student.roles.get(role), pair.teacher.roles.get(role)
        if ours != theirs:
            ours, theirs = (repr(token) if token else "none" for token in (ours, theirs))
            yield f"{role} is {ours} for the student, {theirs} for the teacher"


def vocab_size(pair: Pair) -> Line:
    """The embeddings may be padded to different sizes."""
    ours, theirs = pair.student.number("vocab_size"), pair.teacher.number("vocab_size")
    if ours == theirs:
        return Line("vocab_size", Verdict.SAME, f"{ours} rows")
    return Line(
        "vocab_size",
        Verdict.HARMLESS,
        f"the student's embedding has {ours} rows, the teacher's {theirs}",
        f"{NOTHING}: only log-probs of sampled tokens are compared; a KL over the full vocabulary needs the common rows",
    )


def _examples(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    return separator.join(items[:SHOWN]) + (f"{separator}..." if len(items) > SHOWN else "")


def _numbers(ids: Collection[int]) -> str:
    return " and ".join(map(str, ids))


def _named(model: ModelFiles, ids: Collection[int]) -> str:
    """Return token ids with their texts."""
    return "token id " + " and ".join(f"{number} ({model.token(number)!r})" for number in ids)
