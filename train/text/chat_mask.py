"""Chat template -> tokens, and which of them the assistant wrote.

The template's own `{% generation %}` marks come first. Without them the mask is derived: the chat
is rendered up to each assistant turn, with and without it, and both must be prefixes, token by
token, of the whole chat's rendering. What does not check is refused, never guessed. So thinking is
trained where the template shows it after its prompt for an answer, and nowhere else.
"""

from functools import partial
from typing import NamedTuple

from transformers import BatchEncoding, PreTrainedTokenizerBase

from draftsmith.decode.prompts.chat import (
    GENERATION_MARK,
    THOUGHT,
    Messages,
    Tools,
    apply,
    encode,
    render,
    template_of,
)
from draftsmith.models.tokenizer import special_ids

ADVICE = "mark the assistant's words with {% generation %} ... {% endgeneration %} in the template"
OTHER_THINKING = (
    "the template's prompt begins or ends the thinking otherwise than this answer; set thinking= "
    "as the rows are, or let train/prepare.py write the answers"
)


class ChatTokens(NamedTuple):
    """A rendered chat: `trained[i]` where the assistant wrote token i, its end token included.

    `rewritten` counts earlier assistant turns that the template shows otherwise than they were
    written (thinking removed, say); the model never wrote that, so they are not trained.
    """

    ids: list[int]
    trained: list[bool]
    rewritten: int


def chat_tokens(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()
) -> ChatTokens:
    """The tokens of a chat up to its last assistant turn, and those that the assistant wrote.
    ValueError: no assistant turn, no template, or a mask that can't be known for certain.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(
            "a chat without an assistant's message has nothing to learn from; let "
            "train/prepare.py write answers, or take the row away"
        )
    messages = messages[: turns[-1] + 1]
    if GENERATION_MARK.search(template_of(tokenizer)):
        return _marked(messages, turns, tokenizer, tools)
    return _derived(messages, turns, tokenizer, tools)


def _marked(
    messages: Messages, turns: list[int], tokenizer: PreTrainedTokenizerBase, tools: Tools
) -> ChatTokens:
    if not tokenizer.is_fast:
        raise ValueError("generation marks need a fast tokenizer (tokenizer.json)")
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = apply(messages, tokenizer, tools, **how)
    assert isinstance(encoded, BatchEncoding), type(encoded)
    ids, trained = list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
    if not any(trained):
        raise ValueError("the template's {% generation %} marks cover no token of this chat")
    for i in range(1, len(ids)):
        # Some templates close the mark before the end token; the assistant writes it all the same.
        if ids[i] == tokenizer.eos_token_id and trained[i - 1]:
            trained[i] = True
    for turn in filter(None, turns if THOUGHT in template_of(tokenizer) else ()):
        # What the prompt already holds (thinking that is off, say) nobody writes, marked or not.
        told = [render(messages[:turn], tokenizer, prompt=p, tools=tools) for p in (False, True)]
        before, asked = (encode(text, tokenizer) for text in told)
        if ids[: len(asked)] == asked:
            trained[len(before) : len(asked)] = [False] * (len(asked) - len(before))
    return ChatTokens(ids, trained, 0)


def _derived(
    messages: Messages, turns: list[int], tokenizer: PreTrainedTokenizerBase, tools: Tools
) -> ChatTokens:
    shown = partial(render, tokenizer=tokenizer, tools=tools)
    whole = shown(messages)
    ids = encode(whole, tokenizer)
    trained = [False] * len(ids)
    rewritten = 0
    for turn in turns:
        before = shown(messages[:turn], prompt=True) if turn else ""
        through = shown(messages[: turn + 1])
        if not whole.startswith(through) and turn != turns[-1]:
            rewritten += 1
            continue
        if not turn or not through.startswith(before):
            raise ValueError(
                f"message {turn}: the template's prompt for the assistant is no beginning of the "
                f"rendered chat, so its words can't be told; "
                f"{OTHER_THINKING if 'think>' in before[-40:] else ADVICE}"
            )
        before_ids, through_ids = encode(before, tokenizer), encode(through, tokenizer)
        if ids[: len(before_ids)] != before_ids or ids[: len(through_ids)] != through_ids:
            raise ValueError(
                f"message {turn}: a token spans the border of the assistant's words, so prompt and "
                "answer can't be told apart; remove white space around the content"
            )
        span = through[len(before) :]
        if before == shown(messages[:turn]):
            # A template may have no header before an answer, or may ignore add_generation_prompt;
            # then it may also begin another answer after each chat, a finished one included.
            if not span.lstrip().startswith(messages[turn]["content"].strip()):
                raise ValueError(
                    f"message {turn}: the template ignores add_generation_prompt, so the "
                    f"assistant's header {span[:20]!r} can't be told from its words; {ADVICE}"
                )
            more = [*messages[: turn + 1], {"role": "user", "content": "?"}]
            if span not in shown(more):
                raise ValueError(
                    f"message {turn}: the template begins another answer after it, whatever "
                    f"add_generation_prompt says, so the end of {span[-40:]!r} would be taken for "
                    f"the assistant's words; {ADVICE}"
                )
        end = _end_token(ids, len(before_ids), len(through_ids), tokenizer)
        trained[len(before_ids) : end] = [True] * (end - len(before_ids))
    return ChatTokens(ids, trained, rewritten)


def _end_token(ids: list[int], start: int, stop: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """One past the end token of the turn ids[start:stop]; only white space may follow it."""
    special = special_ids(tokenizer)
    ends = [i for i in range(start, stop) if ids[i] in special]
    if not ends or str(tokenizer.decode(ids[ends[-1] + 1 : stop])).strip():
        raise ValueError(
            f"the template writes no end token after an assistant's turn (it ends in "
            f"{tokenizer.decode(ids[max(start, stop - 8) : stop])!r}), so a draft could not learn "
            f"to stop; {ADVICE}"
        )
    return ends[-1] + 1
