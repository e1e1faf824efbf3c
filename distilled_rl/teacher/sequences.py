"""What a teacher reads: the student's prompt and response, or its own prompt, and its own end-of-text token."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distilled_rl.teacher.specs import TeacherSpec


class Reader:
    """Writes prompt and response as one teacher reads them.

    ``template_arguments``: what the student's chat template is given beside the messages (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, spec: TeacherSpec, template_arguments: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.template_arguments = dict(template_arguments or {})

    def responses(self, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the responses, int [j] each, with the student's end-of-text ids as the teacher's (``eos_map``)."""
        return [with_ends(response, self.spec.eos_map) for response in responses]

    def prompts(self, prompts: Sequence[torch.Tensor], messages: Sequence[Any] | None) -> list[torch.Tensor]:
        """Return the prompts, int [j] each: the student's, or the same ``messages`` through the teacher's chat template.

        Raises ``ValueError`` when the teacher's template refuses a conversation.
        """
        if self.spec.prompt == "student":
            return list(prompts)
        assert messages is not None
        return [self._own_prompt(conversation) for conversation in messages]

    def _own_prompt(self, messages: Any) -> torch.Tensor:
        import jinja2

        plain = [{str(key): value for key, value in dict(message).items()} for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=True, return_dict=False, **self.template_arguments
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of the teacher {self.spec.name} ({self.spec.model}) refuses a prompt: {error}"
            ) from error
        return torch.tensor(ids, dtype=torch.int64)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.spec.model)


def with_ends(ids: torch.Tensor, eos_map: Mapping[int, int]) -> torch.Tensor:
    """Return int ``ids`` of any shape with each key of ``eos_map`` replaced by its value, all at once."""
    mapped = ids
    for student, teacher in eos_map.items():
        mapped = torch.where(ids == student, teacher, mapped)
    return mapped
