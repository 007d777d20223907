"""Thinking models: the switch of their chat templates, what is trained, how long they answer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from thinking_template import TEMPLATE
from tiny_llama import build_llama
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.evaluate.arms import Evaluation, load
from draftsmith.decode.prompts.chat import chat_prompt, set_template, thinks
from draftsmith.decode.prompts.prompts import Prompt, next_turn
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import stand_in_tokenizer
from draftsmith.train.prepare import main as prepare
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.show import Show, show
from draftsmith.train.text.chat_mask import chat_tokens
from draftsmith.train.text.on_policy import Text
from draftsmith.train.text.prepared import read_answers, read_identity

ASKED = {"role": "user", "content": "f?"}
SAID = {"role": "assistant", "content": "one"}
THOUGHT = {"role": "assistant", "content": "two", "reasoning_content": "hm"}
INLINE = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"}
MARKED = TEMPLATE.replace(
    "{{- '<|assistant|>' }}\n{%- if loop", "{{- '<|assistant|>' }}{% generation %}\n{%- if loop"
).replace("{{- '<|end|>' }}\n{%- else", "{{- '<|end|>' }}{% endgeneration %}\n{%- else")


def tokenizer_with(template: str = TEMPLATE, thinking: bool | None = None) -> Any:
    tokenizer = stand_in_tokenizer(320)
    tokenizer.chat_template = template
    set_template(tokenizer, thinking)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "target"
    tokenizer = tokenizer_with()
    build_llama(len(tokenizer), layers=1, hidden=16, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"messages": [ASKED, SAID]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any]) -> str:
    ids, mask, _ = chat_tokens(messages, tokenizer)
    return str(tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept]))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["derived", "marked"])
def test_thinking_is_trained_where_the_template_keeps_it(template: str) -> None:
    assert (template == MARKED) == ("{% generation %}" in template)
    by_itself, on, off = (tokenizer_with(template, value) for value in (None, True, False))
    for tokenizer in (by_itself, on):
        for answer in (THOUGHT, INLINE):
            assert trained(tokenizer, ASKED, answer) == "<think>\nhm\n</think>\ntwo<|end|>"
    # Off, the prompt holds the empty block, which so is nobody's words.
    assert trained(off, ASKED, SAID) == "one<|end|>"
    assert off.decode(chat_prompt([ASKED], off)).endswith("<|assistant|><think>\n\n</think>\n")
    assert by_itself.decode(chat_prompt([ASKED], by_itself)).endswith("f?<|end|><|assistant|>")


def test_thinking_that_the_template_drops_is_not_trained() -> None:
    tokenizer = tokenizer_with()
    more = {"role": "user", "content": "g?"}
    found = chat_tokens([ASKED, THOUGHT, more, THOUGHT], tokenizer)
    assert found.rewritten == 1
    assert trained(tokenizer, ASKED, THOUGHT, more, THOUGHT).count("hm") == 1
    assert tokenizer.decode(found.ids).count("hm") == 1


def test_an_answer_that_thinks_is_refused_with_thinking_off() -> None:
    with pytest.raises(
        ValueError, match=r"ends the thinking otherwise .* set thinking= as the row"
    ):
        trained(tokenizer_with(thinking=False), ASKED, THOUGHT)


def test_later_turns_are_asked_as_the_first(folder: Path) -> None:
    tokenizer = tokenizer_with(thinking=False)
    prompt = Prompt([], "", 0, "", ("f?", "g?"))
    text = tokenizer.decode(next_turn(prompt, ["<think>\nhm\n</think>\n\none"], tokenizer))
    assert text == "<|user|>f?<|end|><|assistant|>one<|end|><|user|>g?<|end|>" + (
        "<|assistant|><think>\n\n</think>\n"
    )


def test_settings_that_the_template_does_not_read_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = tokenizer_with()
    set_template(tokenizer, None, '{"effort": "low", "enable_thinking": false}')
    assert tokenizer.decode(chat_prompt([ASKED], tokenizer)).endswith("</think>\nlow")
    asked = chat_prompt([ASKED], tokenizer, more={"effort": "high"})
    assert tokenizer.decode(asked).endswith("</think>\nhigh"), "a request's own comes first"
    for more in ('{"efort": 1}', '{"chat_template": "x"}', '{"messages": []}', '{"bos_token": ""}'):
        with pytest.raises(ValueError, match=r"template_kwargs: got .*expected effort, enable_th"):
            set_template(tokenizer, None, more)
    for more in ("[1]", "{effort: low}"):
        with pytest.raises(ValueError, match=r"template_kwargs: got .*expected a JSON object"):
            set_template(tokenizer, None, more)
    with pytest.raises(ValueError, match=r"thinking: got false, but .* has no switch"):
        set_template(tiny_tokenizer, False)
    other = tokenizer_with(TEMPLATE.replace("enable_thinking", "thinking"), thinking=False)
    assert not thinks(other)


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [
        (TEMPLATE, None, True),
        (TEMPLATE, True, True),
        (TEMPLATE, False, False),
        # Like DeepSeek's: the prompt ends the thinking unless it is asked for.
        (TEMPLATE.replace("enable_thinking is defined and enable_thinking is false",
                          "not thinking"), None, False),
        # Like R1's: the prompt begins the thinking.
        (TEMPLATE.replace("<think>\\n\\n</think>\\n", "<think>\\n"), None, True),
    ],
    ids=["by itself", "on", "off", "ended", "begun"],
)  # fmt: skip
def test_which_models_think(template: str, thinking: bool | None, expected: bool) -> None:
    assert thinks(tokenizer_with(template, thinking)) is expected


def test_models_without_a_template_do_not_think(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert not thinks(tiny_tokenizer)
    bare = stand_in_tokenizer(320)
    bare.chat_template = None
    set_template(bare, None)
    assert not thinks(bare)


@pytest.mark.parametrize(
    ("said", "tokens"),
    [([], 2048), (["thinking=false"], 256), (["max_new_tokens=5"], 5)],
    ids=["by default", "off", "given"],
)
def test_who_thinks_is_given_room(
    folder: Path, tmp_path: Path, said: list[str], tokens: int
) -> None:
    asked = f"prompts={folder / 'rows.jsonl'}"
    prepare([f"target={folder}", asked, "split=all", "device=cpu", f"out={tmp_path}", *said])
    assert read_identity(tmp_path)["sampling"]["max_new_tokens"] == tokens
    [answer] = read_answers(tmp_path)
    asked = tokenizer_with().decode(answer["prompt_ids"])
    assert asked.endswith("</think>\n") == (said == ["thinking=false"])


def test_each_entry_renders_as_it_is_told(folder: Path) -> None:
    """Training, evaluation and the inspector; other commands share their one line."""
    text = Text(thinking=False, template_kwargs='{"effort": "!"}')
    config = SimpleNamespace(
        target=TargetSpec(str(folder)), dtype="float32", shard_target=False, text=text
    )
    accelerator: Any = SimpleNamespace(num_processes=1, device="cpu")
    _, tokenizer = open_target(config, accelerator)
    evaluation = Evaluation(
        target=str(folder), drafter="ngram", thinking=False, template_kwargs='{"effort": "!"}'
    )
    pair = load(evaluation, {"ngram": "ngram"}, "float32")
    for one in (tokenizer, pair.tokenizer):
        assert one.decode(chat_prompt([ASKED], one)).endswith("<think>\n\n</think>\n!")
    console = Console(record=True, width=200)
    shown = {"data": str(folder / "rows.jsonl"), "tokenizer": str(folder), "split": "all"}
    show(Show(**shown, thinking=False), console)
    assert "</think>\n⟦one<|end|>⟧" in console.export_text()
