"""Which tokens of a chat the assistant wrote, under templates of many habits."""

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.train.text.chat_mask import chat_tokens

CHAT = [
    {"role": "user", "content": "def f?"},
    {"role": "assistant", "content": "return 1"},
    {"role": "user", "content": "and g?"},
    {"role": "assistant", "content": "return 2"},
]
TURN = "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}\n{% else %}"
END = "{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    TURN + "<|assistant|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{{ '\\n' }}"
)
MARK_BEFORE_END = (
    TURN + "<|assistant|>{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>\n"
)
UNMARKED = TURN + "<|assistant|>{{ m['content'] }}<|end|>\n"
# Like Mistral's: the answer follows the user's turn without a header.
HEADERLESS = TURN + "{{ m['content'] }}<|end|>"
# Like Qwen3's: the last answer is shown with its thinking, earlier ones without.
THINKING = (
    TURN
    + "<|assistant|>{% if loop.last %}<think>\n\n</think>\n{% endif %}"
    + ("{{ m['content'] }}<|end|>\n")
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def trained_stretches(tokenizer: PreTrainedTokenizerFast, messages: list = CHAT) -> list[str]:
    ids, trained, _ = chat_tokens(messages, tokenizer)
    stretches, current = [], []
    for token, is_trained in [*zip(ids, trained, strict=True), (0, False)]:
        if is_trained:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


@pytest.mark.parametrize(
    "template",
    [
        MARKED + END + PROMPT,
        MARK_BEFORE_END + END + PROMPT,
        UNMARKED + END + PROMPT,
        HEADERLESS + END,
    ],
    ids=["marked", "mark before end", "derived", "headerless"],
)
def test_what_the_assistant_wrote_is_trained(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    assert trained_stretches(tokenizer) == ["return 1<|end|>", "return 2<|end|>"]
    ids, _, rewritten = chat_tokens(CHAT, tokenizer)
    assert rewritten == 0
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_the_last_special_token_of_a_turn_ends_it(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """As where an answer calls a tool between special tokens."""
    chat = [CHAT[0], {"role": "assistant", "content": "call <|user|>f<|user|> now"}]
    for template in (MARKED, MARK_BEFORE_END, UNMARKED):
        tokenizer = with_template(tiny_tokenizer, template + END + PROMPT)
        assert trained_stretches(tokenizer, chat) == ["call <|user|>f<|user|> now<|end|>"]


def test_the_derived_mask_is_the_marked_one(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    marked = chat_tokens(CHAT, with_template(tiny_tokenizer, MARKED + END + PROMPT))
    derived = chat_tokens(CHAT, with_template(tiny_tokenizer, UNMARKED + END + PROMPT))
    assert marked == derived


def test_turns_that_the_template_rewrites_are_not_trained(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(tiny_tokenizer, THINKING + END + PROMPT)
    assert trained_stretches(tokenizer) == ["<think>\n\n</think>\nreturn 2<|end|>"]
    assert chat_tokens(CHAT, tokenizer).rewritten == 1
    assert chat_tokens(CHAT[:2], tokenizer).rewritten == 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The header would be taken for the assistant's words.
        (UNMARKED + END, "ignores add_generation_prompt"),
        (TURN + "<|assistant|>{{ m['content'] }}\n" + END + PROMPT, "no end token"),
        # "A: " and "return" are other tokens than "A: return".
        (TURN + "A: {{ m['content'] }}<|end|>\n" + END + PROMPT.replace("<|assistant|>", "A: "),
         "a token spans the border"),
        # The whole chat is rendered otherwise than its beginnings.
        ("{{ messages | length }}" + UNMARKED + END + PROMPT, "no beginning of the rendered chat"),
        ("{{ raise_exception('no system turn') }}", "refuses this chat: no system turn"),
        (None, "has no chat template"),
        # The header of the next answer would be taken for the end of this one.
        (UNMARKED + END + "<|assistant|>", "begins another answer after it"),
        ("{% if false %}{% generation %}x{% endgeneration %}{% endif %}" + UNMARKED + END,
         "cover no token"),
    ],
    ids=["ignored prompt", "no end", "border", "not a prefix", "refused", "none", "always asks",
         "empty marks"],
)  # fmt: skip
def test_a_mask_that_cannot_be_known_is_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chat_tokens(CHAT, with_template(tiny_tokenizer, template))


def test_the_prompt_is_the_chat_before_the_last_answer(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    for template in (MARKED, UNMARKED):
        tokenizer = with_template(tiny_tokenizer, template + END + PROMPT)
        prompt = chat_prompt(CHAT, tokenizer)
        ids, trained, _ = chat_tokens(CHAT, tokenizer)
        assert prompt == ids[: len(prompt)]
        assert trained[len(prompt)] and not trained[len(prompt) - 1]
        assert chat_prompt(CHAT[:3], tokenizer) == prompt
    assert tokenizer.decode(prompt).endswith("and g?\n<|assistant|>")


def test_what_follows_the_last_answer_is_left_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for template in (MARKED, UNMARKED, THINKING):
        tokenizer = with_template(tiny_tokenizer, template + END + PROMPT)
        assert chat_tokens(CHAT[:3], tokenizer) == chat_tokens(CHAT[:2], tokenizer)


def test_chats_without_a_turn_to_learn_or_to_answer(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ValueError, match="nothing to learn from"):
        chat_tokens(CHAT[:1], tiny_tokenizer)
    with pytest.raises(ValueError, match="nothing to answer"):
        chat_prompt(CHAT[1:2], tiny_tokenizer)
