"""Whether a teacher can score a student's responses, told from the small files of both models, before weights load.

A teacher is asked for the log-probability of the student's token ids. :func:`compare` looks at everything that makes those
numbers wrong (other tokens under the same ids, another end of text, another prompt, too short a context) and says of each
topic whether it is the same, harmless, or a reason to refuse, and what to do.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from distilled_rl.config import ConfigError
from distilled_rl.teacher import chat_template, tokens
from distilled_rl.teacher.model_files import read_model
from distilled_rl.teacher.verdicts import NOTHING, Line, Pair, Report, Verdict

ALLOWABLE = ("eos", "special_tokens", "template")
PROMPTS = ("student", "own")


def compare(
    student: Path,
    teacher: Path,
    *,
    student_tokenizer: Path | None = None,
    prompt_length: int | None = None,
    response_length: int | None = None,
    allow: Collection[str] = (),
    eos_map: Mapping[int, int] | None = None,
    prompt: str = "student",
) -> Report:
    """Compare the folders of two models.

    ``student_tokenizer``: the folder of the student's tokenizer where that is another. ``prompt_length``,
    ``response_length``: the longest, in tokens; None leaves the length open. ``allow``: names of :data:`ALLOWABLE`.
    ``eos_map``: end-of-text id of the student -> the teacher's id that it is scored as. ``prompt``: whether the teacher
    reads the student's prompt, or the same messages through its own template.

    Raises :class:`ConfigError` for a missing or broken file, and for a choice that does not exist.
    """
    check_choices(allow, prompt)
    needed = None if prompt_length is None or response_length is None else prompt_length + response_length + 1
    pair = Pair(read_model(student, student_tokenizer), read_model(teacher), needed, allow, eos_map or {}, prompt)
    return Report(tuple(topic(pair) for topic in TOPICS))


def check_choices(allow: Collection[str], prompt: str) -> None:
    """Raise :class:`ConfigError` for an unknown name in ``allow`` and an unknown ``prompt``."""
    unknown = [str(name) for name in allow if name not in ALLOWABLE]
    if unknown:
        raise ConfigError(
            f"teacher.allow names {', '.join(unknown)}: only {', '.join(ALLOWABLE)} can be allowed, each by its name"
        )
    if prompt not in PROMPTS:
        raise ConfigError(f"teacher.prompt is {prompt!r}: must be {' or '.join(PROMPTS)}")


def template(pair: Pair) -> Line:
    """Both chat templates write the same prompt."""
    student, teacher = pair.student, pair.teacher
    if student.template == teacher.template and (student.template is None or student.roles == teacher.roles):
        found = "neither has a chat template" if student.template is None else "the texts are equal"
        return Line("template", Verdict.SAME, found)
    if student.template is None or teacher.template is None:
        who = "student" if student.template is None else "teacher"
        found = f"the {who} has no chat template, the other has one"
        if pair.prompt == "own" and who == "teacher":
            advice = "it cannot read the messages through its own: copy a template to it, or set teacher.prompt=student"
            return Line("template", Verdict.REFUSE, found, advice)
    else:
        difference = chat_template.first_difference(chat_template.prompts(student), chat_template.prompts(teacher))
        if difference is None:
            what = "texts differ" if student.template != teacher.template else "special tokens differ"
            found = f"the {what}, but the prompts of {len(chat_template.PROBES)} probe conversations are equal"
            return Line("template", Verdict.HARMLESS, found, NOTHING)
        found = difference
    if pair.prompt == "own":
        advice = f"{NOTHING}: the teacher reads the messages through its own template"
        return Line("template", Verdict.HARMLESS, found, advice)
    return pair.refusal(
        "template",
        found,
        "give the student the teacher's template if it is not trained on one of its own, or use a teacher with the "
        "student's template",
        "the teacher reads a prompt in a format that it may not have been trained on",
    )


def thinking(pair: Pair) -> Line:
    """Both templates have the same thinking modes and open a thinking block alike."""
    if pair.student.template == pair.teacher.template:
        return Line("thinking", Verdict.SAME, "the templates are equal")
    differences = chat_template.thinking_differences(
        chat_template.prompts(pair.student), chat_template.prompts(pair.teacher)
    )
    if not differences:
        return Line("thinking", Verdict.SAME, "the templates open a thinking block alike, or none does")
    return pair.refusal(
        "thinking",
        "; ".join(differences),
        "use two models of the same thinking mode",
        "the two may disagree from the first token on, one thinking and the other not",
        name="template",
    )


def length(pair: Pair) -> Line:
    """The teacher reads the longest prompt with the longest response, and generates one token (verl's server does)."""
    positions = pair.teacher.number("max_position_embeddings")
    if positions is None:
        advice = "make sure that it reads prompt + response + 1 tokens"
        return Line("length", Verdict.HARMLESS, "the teacher's config.json names no max_position_embeddings", advice)
    if pair.needed is None:
        advice = "keep prompt + response + 1 generated token within it"
        return Line("length", Verdict.HARMLESS, f"the teacher reads up to {positions} tokens", advice)
    found = f"prompt + response + 1 generated token is {pair.needed}, the teacher's max_position_embeddings {positions}"
    if positions < pair.needed:
        advice = f"shorten prompt or response by {pair.needed - positions}, or use a teacher with a longer context"
        return Line("length", Verdict.REFUSE, found, advice)
    return Line("length", Verdict.SAME, found)


def architecture(pair: Pair) -> Line:
    """For information: a teacher of another architecture scores as well."""
    different = []
    for keys in (("model_type",), ("dtype", "torch_dtype"), ("tie_word_embeddings",)):
        ours, theirs = (
            next((model.config[key] for key in keys if key in model.config), None)
            for model in (pair.student, pair.teacher)
        )
        if ours != theirs:
            different.append(f"{keys[0]} is {ours} for the student, {theirs} for the teacher")
    if not different:
        found = f"{pair.student.config.get('model_type')} of the same dtype, embeddings tied alike"
        return Line("architecture", Verdict.SAME, found)
    return Line("architecture", Verdict.HARMLESS, "; ".join(different), f"{NOTHING}: the token ids alone must agree")


TOPICS: tuple[Callable[[Pair], Line], ...] = (
    tokens.tokens,
    tokens.special_tokens,
    tokens.eos,
    tokens.vocab_size,
    template,
    thinking,
    length,
    architecture,
)
