"""Two chat templates compared by the prompts that they write for a few probe conversations."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distilled_rl.config import ConfigError
from distilled_rl.teacher.model_files import ModelFiles

USER = {"role": "user", "content": "What is 1 + 1?"}
SYSTEM = {"role": "system", "content": "Please reason step by step."}
# What verl passes when nothing is configured comes first: one user message and no argument.
PROBES: tuple[tuple[str, Sequence[Mapping[str, str]], Mapping[str, bool]], ...] = (
    ("a user message", [USER], {}),
    ("a system and a user message", [SYSTEM, USER], {}),
    ("a user message with enable_thinking=true", [USER], {"enable_thinking": True}),
    ("a user message with enable_thinking=false", [USER], {"enable_thinking": False}),
)
THINKING_PROBES = (0, 2, 3)
TODAY = datetime.datetime(2025, 1, 1)  # for templates that write the date: both write the same one
EXCERPT = 24


@dataclass(frozen=True)
class Prompts:
    """The prompts of one model for the probes, None where its template refuses the conversation."""

    texts: tuple[str | None, ...]
    knows_thinking: bool

    def opening(self, probe: int) -> str:
        """Return the thinking block that the prompt ends with, open or closed; empty where there is none."""
        text = self.texts[probe] or ""
        return text[text.rfind("<think>") :] if "<think>" in text else ""


def prompts(model: ModelFiles) -> Prompts:
    """Return a model's prompts; a model without a template writes none.

    Raises :class:`ConfigError` for a template that is not valid or cannot render a single user message.
    """
    if model.template is None:
        return Prompts((None,) * len(PROBES), knows_thinking=False)
    import jinja2

    try:
        template = _environment().from_string(model.template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{model.template_file}: the chat template is not valid, line {error.lineno}: {error}"
        ) from error
    texts = []
    for position, (probe, messages, arguments) in enumerate(PROBES):
        values = {**model.roles, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            texts.append(template.render(**values, **arguments))
        # What an expression of a template may raise, beside its own refusals.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if position == 0:
                raise ConfigError(f"{model.template_file}: the chat template cannot render {probe}: {error}") from error
            texts.append(None)
    return Prompts(tuple(texts), knows_thinking="enable_thinking" in model.template)


def first_difference(student: Prompts, teacher: Prompts) -> str | None:
    """Return where the prompts of a probe first differ, in words; None where all are equal."""
    for (probe, _messages, _arguments), ours, theirs in zip(PROBES, student.texts, teacher.texts, strict=True):
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            return f"for {probe}, the {'student' if ours is None else 'teacher'}'s template refuses to write a prompt"
        equal = (left == right for left, right in zip(ours, theirs, strict=False))
        at = next((index for index, same in enumerate(equal) if not same), min(len(ours), len(theirs)))
        return (
            f"for {probe}, the prompts first differ at character {at}: {_excerpt(ours, at)} and {_excerpt(theirs, at)}"
        )
    return None


def thinking_differences(student: Prompts, teacher: Prompts) -> list[str]:
    """Return how two models differ in their thinking modes, in words."""
    differences = []
    if student.knows_thinking != teacher.knows_thinking:
        knows, not_knows = ("student", "teacher") if student.knows_thinking else ("teacher", "student")
        differences.append(f"the {knows}'s template knows enable_thinking, the {not_knows}'s does not")
    for probe in THINKING_PROBES:
        ours, theirs = student.opening(probe), teacher.opening(probe)
        if ours != theirs:
            ends = [repr(text) if text else "no thinking block" for text in (ours, theirs)]
            differences.append(
                f"for {PROBES[probe][0]}, the student's prompt ends with {ends[0]}, the teacher's with {ends[1]}"
            )
            break
    return differences


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + EXCERPT]) if at < len(text) else "the end"


def _environment() -> Any:
    """Return a sandbox with what transformers gives to chat templates (transformers/utils/chat_template_utils.py)."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant wrote; it changes nothing in the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment
