"""A chat through the tokenizer's template: what the model reads before it answers."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, str]]


def chat_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens an assistant answers to: `before_answer` with the template's generation prompt.
    ValueError: no template, nothing to answer, or a template that refuses the chat.
    """
    return encode(render(before_answer(messages), tokenizer, prompt=True), tokenizer)


def before_answer(messages: Messages) -> Messages:
    """The chat up to its last turn by somebody else than the assistant; ValueError without one."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("a chat without a user's message has nothing to answer")
    return messages[:end]


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template; ValueError without one."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set its "
            'chat_template, or give {"prompt", "completion"} or {"text"} rows'
        )
    return tokenizer.get_chat_template()


def render(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False) -> str:
    """The chat as text; `prompt`: with the beginning of the assistant's turn. ValueError: no
    template, or one that refuses the chat.
    """
    template_of(tokenizer)
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **how))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this chat: {error}") from error


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a rendered text, which holds its special tokens already."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
