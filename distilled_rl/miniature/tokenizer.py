"""The character tokenizer: 32 ids, saved as an ordinary Hugging Face fast tokenizer."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "$"
VOCABULARY: tuple[str, ...] = (PAD, EOS, *"0123456789", *"+-*=,;#:()", *"abcdefghij")
PAD_ID = VOCABULARY.index(PAD)
EOS_ID = VOCABULARY.index(EOS)
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}

# The contents of the messages and nothing else, whatever `add_generation_prompt` is.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def encode(text: str) -> list[int]:
    """The ids of `text`, one per character; ValueError on a character outside the vocabulary."""
    try:
        return [TOKEN_IDS[character] for character in text]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is not among the characters {''.join(VOCABULARY[1:])!r}") from error


def decode(ids: list[int]) -> str:
    """The text of `ids` up to and including the first `$`."""
    stop = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
    return "".join(VOCABULARY[index] for index in ids[:stop])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with the ids of `VOCABULARY`, pad `<pad>`, eos `$`.

    `<pad>` is also the unknown token, because verl picks its Qwen chat builder from `model_type`, and that builder asks
    every Qwen3 tokenizer for one id of a newline and for `<|im_end|>` (verl/utils/tokenizer/continuous_token.py:556).
    In a single-turn rollout neither is used.
    """
    backend = Tokenizer(tokenizer_models.WordLevel(dict(TOKEN_IDS), unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    build_tokenizer().save_pretrained(folder)
