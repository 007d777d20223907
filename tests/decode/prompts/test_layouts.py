"""Rows in the layouts that people have: ShareGPT, Alpaca, tools, one array a file, the hub."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thinking_template import TEMPLATE
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.prompts.prompts import load_prompts, prompt_ids
from draftsmith.decode.prompts.rows import parse
from draftsmith.decode.prompts.sources import PRESETS
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.models.tokenizer import stand_in_tokenizer
from draftsmith.train.answers.asks import from_rows
from draftsmith.train.text.shards import ShardReader, shards_of
from draftsmith.train.text.tokenise import tokenise

SHARED_CHAT = {
    "id": "x_0",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "f?"},
        {"from": "gpt", "value": "one", "markdown": None},
        {"from": "human", "value": "g?"},
        {"from": "gpt", "value": "two"},
    ],
}
OF_SHARED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "f?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "g?"},
    {"role": "assistant", "content": "two"},
]
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is ..."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = stand_in_tokenizer(320)
    made.chat_template = TEMPLATE
    return made


def written(path: Path, rows: list[Any]) -> str:
    """As one array in a .json file, else a row a line."""
    lines = [json.dumps(row) for row in rows]
    text = "[\n" + ",\n".join(lines) + "\n]\n" if path.suffix == ".json" else "\n".join(lines)
    path.write_text(text)
    return str(path)


def test_sharegpt_rows_are_chats() -> None:
    row = parse(SHARED_CHAT, "x:1")
    assert row.kind == "chat" and list(row.messages[:2]) == OF_SHARED[:2]
    assert [(m["role"], m["content"]) for m in row.messages] == [
        (m["role"], m["content"]) for m in OF_SHARED
    ]
    assert row.text == parse({"messages": OF_SHARED}, "x:1").text
    tool = {"from": "tool", "value": "3"}
    assert parse({"conversations": [*SHARED_CHAT["conversations"], tool]}, "x:1").messages[-1] == {
        "role": "tool",
        "content": "3",
    }


def test_a_chat_cut_to_size_begins_where_somebody_asks(tmp_path: Path) -> None:
    """Of logs, what precedes the first question and what follows a turn without words is left."""
    _, ask, said, more, end = SHARED_CHAT["conversations"]  # type: ignore[misc]
    silent = {"from": "gpt", "value": " "}
    rows = [
        {"conversations": [said, ask, end]},
        {"conversations": [ask, said, more, silent, ask, said]},
        {"conversations": []},
        {"conversations": [said]},
        {"conversations": [ask, silent]},
    ]
    source = written(tmp_path / "logs.jsonl", rows)
    with pytest.warns(UserWarning, match=r"2 of 5 rows .* are left out: .*logs.jsonl:3 for one"):
        found = load_rows(source, "all")
    assert [[m["content"] for m in row.messages] for row in found] == [
        ["f?", "two"],
        ["f?", "one", "g?"],
        ["f?"],
    ]


def test_alpaca_rows_are_asked_and_trained(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    row = parse(ALPACA, "x:1")
    examples = tokenise([row], tiny_tokenizer)
    ids, trained = examples.example(0)
    assert tiny_tokenizer.decode(ids[~trained]) == "<|user|>Add.\n\n1 and 2\n<|assistant|>"
    assert tiny_tokenizer.decode(ids[trained]) == "3<|end|>"
    assert prompt_ids(row, tiny_tokenizer) == examples.prompt(0)
    bare = stand_in_tokenizer(320)
    bare.chat_template = None
    assert bare.decode(tokenise([row], bare).example(0)[0]) == "Add.\n\n1 and 2\n3<|end|>"
    # Without an output it is a prompt; with an empty one, as published rows have, nothing.
    asked = parse({"instruction": "Add.", "input": ""}, "x:2")
    assert tiny_tokenizer.decode(prompt_ids(asked, tiny_tokenizer)) == "<|user|>Add.\n<|assistant|>"
    with pytest.raises(ValueError, match="x:2: a prompt without an answer"):
        tokenise([asked], tiny_tokenizer)
    source = written(tmp_path / "rows.jsonl", [ALPACA, ALPACA | {"output": ""}])
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        [prompt] = load_prompts(source, tiny_tokenizer, limit=None, split="all")
    assert prompt.category == "instructions"


def test_tools_and_their_calls_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    row = parse(TOOLS, "x:1")
    with pytest.warns(UserWarning, match="1 earlier assistant turns are rewritten"):
        ids, trained = tokenise([row], tokenizer).example(0)  # the call, as if it had been thought
    text = tokenizer.decode(ids)
    assert text.startswith('<|system|>{"type": "function", "function": {"name": "add"')
    # The arguments, a text of JSON with OpenAI, are the object that templates spell.
    assert '<call>{"name": "add", "arguments": {"a": 1}}<|end|>' in text
    assert "<|user|>tool: 3<|end|>" in text
    assert tokenizer.decode(ids[trained]).endswith("It is 3.<|end|>")
    assert text.startswith(str(tokenizer.decode(prompt_ids(row, tokenizer))))
    # Tables have unlike objects as texts.
    texts = {"messages": list(map(json.dumps, TOOLS["messages"])), "tools": json.dumps([TOOL])}
    assert parse(texts, "x:1") == row
    [ask] = from_rows([row], tokenizer, limit=None, window=8, samples=1, seed=0)
    assert ask.tools == (TOOL,) and ask.messages[-1]["content"] == "3"
    other = parse(TOOLS | {"tools": []}, "x:1")
    assert other.text == row.text != parse({"messages": TOOLS["messages"][2:]}, "x:1").text


def test_a_template_without_tools_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for row in (TOOLS, {"messages": TOOLS["messages"]}):
        with pytest.raises(ValueError, match=r"x:1: the chat template of .* leaves out tools"):
            tokenise([parse(row, "x:1")], tiny_tokenizer)


@pytest.mark.parametrize("lines", [True, False])
def test_a_json_file_holds_an_array(tmp_path: Path, lines: bool) -> None:
    rows = [SHARED_CHAT, ALPACA, {"text": "[a, b]"}]
    source = written(tmp_path / "rows.json", rows)
    if not lines:
        Path(source).write_text(json.dumps(rows))
    found = load_rows(source, "all")
    assert [row.kind for row in found] == ["chat", "instruction", "text"]
    assert len({row.where for row in found}) == 3, "sides of a split are told by it"
    assert found[2].where == f"{source}:{4 if lines else 1}, row 3"
    assert [row.text for row in load_rows(str(tmp_path), "all")] == [row.text for row in found]


def test_a_json_file_may_hold_a_row_a_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    rows = load_rows(str(tmp_path / "rows.json"), "all")
    assert [row.where[-2:] for row in rows] == [":1", ":2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"text": "a"},\n{"txt": 1, "b": 2}\n]', r":3, row 2: got the fields \['b', 'txt'\]"),
        ('[\n{"text": "a"},\n{"text": \n]', r":3, row 2: not JSON .*expected an array of rows"),
        ('[{"text": "a"}', r":1, row 2: not JSON"),
        ('[{"text": "a"}]\n[{"text": "b"}]', ":1: got more after the array, expected one alone"),
        ('["a"]', r":1, row 1: got a str, expected an object: {\"messages\"}, {\"conversations\"}"),
        ('{"text": "a"', r":1: not JSON .*expected one array of objects, or one object a line"),
        ('[{"conversations": [{"from": "dog", "value": "a"}]}]', "row 1: message 0 .* human, user"),
        ('[{"conversations": [{"from": "gpt"}]}]', "row 1: message 0 is .*'value'"),
        ('[{"conversations": "a"}]', "row 1: 'conversations' is 'a'"),
        ('[{"instruction": "a", "output": 3}]', "row 1: 'input' is '' and 'output' 3"),
        ('[{"messages": [{"role": "user", "content": "a"}], "tools": "x"}]', "'tools' is 'x', e"),
        ('[{"messages": [{"role": "assistant", "tool_calls": [{"a": 1}]}]}]', "is a tool call"),
        ('[{"messages": [{"role": "user", "content": [{"type": "image"}]}]}]', "images"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=f"rows.json.*{message}"):
        load_rows(str(tmp_path / "rows.json"), "all")


def test_a_streamed_corpus_takes_the_same_rows(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.json", [SHARED_CHAT, SHARED_CHAT | {"conversations": []}])
    reader = ShardReader(source, shards_of(source), 0, 1, 0, False, frozenset())
    rows = reader.rows()
    first = next(rows)
    assert first is not None and first.messages == parse(SHARED_CHAT, "x:1").messages
    assert next(rows) is None


def test_a_preset_is_a_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []
    good, bad = {"messages": OF_SHARED}, {"messages": [{"role": "user"}]}
    rows = [good] * 200 + [bad]

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"1 rows are left out, such as gsm8k\[200\]: message 0"):
        assert len(load_rows("gsm8k", "all")) == 200, "a folder of that name is ./gsm8k"
    with pytest.warns(UserWarning, match="left out"):
        load_rows("perfectblend@train[:1%]", "all")
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("mlabonne/open-perfectblend", None, "train[:1%]"),
    ]
    rows[:100] = [bad] * 100
    with pytest.raises(ValueError, match=r"sharegpt\[0\]: message 0"):
        load_rows("sharegpt", "all")  # the first row says what they are
    rows[0] = good
    with pytest.raises(ValueError, match=r"sharegpt\[1\]: message 0 .*and 99 more of 201 rows"):
        load_rows("sharegpt", "all")


@pytest.mark.parametrize("name", PRESETS)
def test_out_of_reach_a_preset_says_what_it_is(name: str, tmp_path: Path) -> None:
    hub = PRESETS[name].partition("@")[0].partition(":")[0]
    split = PRESETS[name].rpartition("@")[2]
    said = rf"data: '{name}' names a data set of the hub, .* It would be {hub}.*, split {split}, k"
    with pytest.raises(ValueError, match=said):
        load_rows(name, "train")
