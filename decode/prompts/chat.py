"""A chat through the tokenizer's template: what the model reads before it answers."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]

THINKING = ("enable_thinking", "thinking")  # the switch of Qwen3's and GLM's templates, DeepSeek's
THOUGHT = "</think>"
SERVED = "chat_template_kwargs"  # as servers call what a request says to the template
GENERATION_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# What every template is given, whoever asks.
GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "raise_exception", "strftime_now"),
}


def chat_prompt(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools = (),
    more: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens an assistant answers to: `before_answer` with the template's generation prompt.
    more: for the template, over what `set_template` set. ValueError: no template, nothing to
    answer, names that the template doesn't read, or a template that refuses the chat.
    """
    more = _read_by(tokenizer, more or {}, SERVED)
    text = render(before_answer(messages), tokenizer, prompt=True, tools=tools, more=more)
    return encode(text, tokenizer)


def before_answer(messages: Messages) -> Messages:
    """The chat up to its last turn by somebody else than the assistant; ValueError without one."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("a chat without a user's message has nothing to answer")
    return messages[:end]


def set_template(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, template_kwargs: str = ""
) -> None:
    """What every chat through this tokenizer is rendered with from here on, wherever it is.

    Args:
        tokenizer: gets an attribute of its own, which no saved folder keeps.
        thinking: the value of the template's switch; None: as the template does by itself.
        template_kwargs: a JSON object of other names that the template reads.

    ValueError: no template, a template without switch, or one that doesn't read these names.
    """
    try:
        more = json.loads(template_kwargs or "{}")
    except json.JSONDecodeError:
        more = None
    if not isinstance(more, dict):
        raise ValueError(
            f"template_kwargs: got {template_kwargs!r:.80}, expected a JSON object such as "
            '{"reasoning_effort": "low"}'
        )
    if thinking is not None:
        names = [name for name in THINKING if name in _names(template_of(tokenizer))]
        if not names:
            raise ValueError(
                f"thinking: got {str(thinking).lower()}, but the chat template of "
                f"{tokenizer.name_or_path!r} has no switch ({' or '.join(THINKING)}); leave it out"
            )
        more[names[0]] = thinking
    vars(tokenizer)["template_settings"] = _read_by(tokenizer, more, "template_kwargs")


def template_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What `set_template` set."""
    return dict(vars(tokenizer).get("template_settings", {}))


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether answers begin with thinking: as the template's switch is set, else wherever the
    template knows of thinking and its prompt for an answer doesn't end it.
    """
    settings = template_settings(tokenizer)
    for name in THINKING:
        if name in settings:
            return bool(settings[name])
    if tokenizer.chat_template is None or THOUGHT not in template_of(tokenizer):
        return False
    return THOUGHT not in render([{"role": "user", "content": "?"}], tokenizer, prompt=True)


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template; ValueError without one."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set its "
            'chat_template, or give {"prompt", "completion"} or {"text"} rows'
        )
    return tokenizer.get_chat_template()


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: bool = False,
    tools: Tools = (),
    more: Mapping[str, Any] | None = None,
) -> str:
    """The chat as text; `prompt`: with the beginning of the assistant's turn. ValueError: no
    template, or one that refuses the chat, or would leave its tools out.
    """
    how = {"tokenize": False, "add_generation_prompt": prompt, **(more or {})}
    return str(apply(messages, tokenizer, tools, **how))


def apply(messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: Tools, **how: Any) -> Any:
    """transformers' `apply_chat_template` with our settings; errors of `render`."""
    template = template_of(tokenizer)
    called = "tool_calls" not in template and any(m.get("tool_calls") for m in messages)
    if called or (tools and "tools" not in template):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} leaves out tools and calls of them, "
            "which this chat has; set a template that shows them, or take the row away"
        )
    settings = template_settings(tokenizer) | how
    try:
        chat = list(messages)
        return tokenizer.apply_chat_template(chat, tools=list(tools) or None, **settings)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this chat: {error}") from error


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a rendered text, which holds its special tokens already."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _read_by(
    tokenizer: PreTrainedTokenizerBase, more: Mapping[str, Any], key: str
) -> Mapping[str, Any]:
    """The same `more`; ValueError for names that the template doesn't read."""
    if more:
        known = _names(template_of(tokenizer)) - set(tokenizer.special_tokens_map)
        if unknown := sorted(set(more) - known):
            raise ValueError(
                f"{key}: got {', '.join(unknown)}, which the chat template doesn't read; "
                f"expected {', '.join(sorted(known)) or 'none: it reads none'}"
            )
    return more


@lru_cache(maxsize=32)
def _names(template: str) -> frozenset[str]:
    """The names that a template looks up and that a chat doesn't give it."""
    made = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        found = meta.find_undeclared_variables(made.parse(GENERATION_MARK.sub("", template)))
    except TemplateError as error:
        raise ValueError(f"the chat template is none that jinja can read: {error}") from error
    return frozenset(found - GIVEN - set(made.globals))
