"""Rows and their splits, and rows as tokens."""

import copy
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.prompts.rows import Row, parse
from draftsmith.decode.prompts.sources import stdlib_rows
from draftsmith.decode.prompts.splits import HELD_OUT_SHARE, SHARED_LINE_LEAST, load_rows
from draftsmith.train.answers.asks import prompts_for_development
from draftsmith.train.show import Show, show
from draftsmith.train.text.tokenise import text_prompts, tokenise

CHAT = {"messages": [{"role": "user", "content": "f?"}, {"role": "assistant", "content": "one"}]}
PAIR = {"prompt": "import", "completion": " sys"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
TEXT = {"text": "def f():\n    return 1\n"}
QUESTION = {"question": "1 + 1?", "answer": "#### 2"}
TURNS = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(count)]


def test_the_fields_say_what_a_row_is() -> None:
    prompt_only = {"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."}
    rows = [parse(row, "x:1") for row in (CHAT, PAIR, TEXT, QUESTION, TURNS, prompt_only)]
    assert [row.kind for row in rows] == [
        "chat",
        "completion",
        "text",
        "question",
        "turns",
        "prompt",
    ]
    assert rows[4].prompt == "Write." and rows[4].category == "writing"
    assert rows[0].text == "f?\none" and rows[2].text == TEXT["text"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', r"rows.jsonl:2: got the fields \['txt'\], expected"),
        ('{"text": "a"', "rows.jsonl:2: not JSON"),
        ('["a"]', "rows.jsonl:2: got a list"),
        ('{"prompt_ids": [3], "token_ids": [4]}', r"rows.jsonl:2: got an answer .* prepare.json"),
        ('{"text": 3}', r"rows.jsonl:2: got the fields \['text'\], expected"),
        ('{"question": "", "answer": "2"}', "rows.jsonl:2: 'question' is ''"),
        ('{"prompt": "a", "completion": 3}', "rows.jsonl:2: 'completion' is 3"),
        ('{"messages": []}', "rows.jsonl:2: 'messages' is"),
        ('{"messages": [{"role": "user"}]}', "rows.jsonl:2: message 0 is"),
        (
            json.dumps({"messages": [CHAT["messages"][0], CALL]}),
            "rows.jsonl:2: message 1 is .*tool",
        ),
        ('{"messages": [{"role": "assistant", "content": " "}]}', "message 0 is .*isn't empty"),
        (r'{"text": "a smile \ud83d"}', r"rows.jsonl:2: 'a smile \\ud83d' ends in half of a char"),
        (r'{"turns": ["a", "b \udc00 c"]}', r"rows.jsonl:2: 'b \\udc00' ends in half"),
        (
            r'{"messages": [{"role": "user", "content": "\ud83d"}]}',
            "rows.jsonl:2: .* mend the row",
        ),
        ('{"turns": "a"}', "rows.jsonl:2: 'turns' is"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(TEXT)}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        load_rows(str(path), "all")


def test_missing_and_empty_data_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_rows(str(tmp_path / "none.jsonl"), "train")
    (tmp_path / "empty.jsonl").write_text('\n\n{"text": " "}\n')
    for data in ("empty.jsonl", "."):
        with pytest.raises(ValueError, match="holds no rows"):
            load_rows(str(tmp_path / data), "train")
    with pytest.raises(ValueError, match="split: got 'test', expected one of train"):
        load_rows("stdlib", "test")


def test_a_hub_that_cannot_be_reached_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"'nobody/nothing:main' is no file here, and as a data"):
        load_rows("nobody/nothing:main", "train")


def test_parquet_and_folders_read_like_jsonl(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_rows(tmp_path / "a.jsonl", [TEXT, PAIR])
    (tmp_path / "b").mkdir()
    # A column that only some rows have comes back as null in the others.
    table = pyarrow.Table.from_pylist([{**CHAT, "text": None}, TEXT])
    write_table(table, tmp_path / "b" / "b.parquet")
    rows = load_rows(str(tmp_path), "all")
    assert [row.kind for row in rows] == ["text", "completion", "chat", "text"]
    assert rows[2].messages[1]["content"] == "one"
    assert rows[3].where.endswith("b.parquet: row 2")
    broken = pyarrow.array([b"a \xed\xa0\xbd"]).cast(pyarrow.string(), safe=False)
    write_table(pyarrow.table({"text": broken}), tmp_path / "b" / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet: not a readable Parquet file .*utf-8"):
        load_rows(str(tmp_path), "all")
    (tmp_path / "b" / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"b.parquet: not a readable Parquet file"):
        load_rows(str(tmp_path), "all")


def test_of_gsm8k_the_last_300_rows_are_held_out(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.jsonl", questions(310))
    train, held_out = load_rows(data, "train"), load_rows(data, "heldout")
    assert [row.prompt for row in train] == [f"{i} + 1?" for i in range(10)]
    assert held_out[0].prompt == "10 + 1?" and len(held_out) == 300
    write_rows(tmp_path / "train.jsonl", questions(300))
    with pytest.raises(ValueError, match="got 300 rows of question and answer"):
        load_rows(data, "train")
    assert len(load_rows(data, "all")) == 300


def test_checkpoints_are_chosen_on_prompts_that_no_figure_is_of(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of 400 questions 0 to 99 are trained on, and 200 to 399 are for the figures."""
    data = write_rows(tmp_path / "train.jsonl", questions(400))
    found = prompts_for_development(data, tiny_tokenizer, limit=1000, prompt_tokens=8)
    numbers = [re.findall(r"(\d+) \+ 1\?", tiny_tokenizer.decode(ids)) for ids in found]
    assert numbers == [[str(i)] for i in range(100, 200)]


def test_the_real_gsm8k(gsm8k_path: Path) -> None:
    assert len(load_rows(str(gsm8k_path), "train")) == 7173
    assert len(load_rows(str(gsm8k_path), "heldout")) == 300


def test_other_rows_are_split_by_their_text(tmp_path: Path) -> None:
    rows = [{"text": f"text {i % 150}"} for i in range(200)]  # 50 stand twice
    data = write_rows(tmp_path / "rows.jsonl", rows)
    sides = {side: load_rows(data, side) for side in ("train", "heldout")}
    assert len(sides["train"]) + len(sides["heldout"]) == 200
    assert abs(len(sides["heldout"]) - 40) <= 1  # of few rows a fifth
    many = write_rows(tmp_path / "many.jsonl", [{"text": f"text {i}"} for i in range(1500)])
    assert [len(load_rows(many, side)) for side in ("train", "heldout")] == [1425, 75]
    some = write_rows(tmp_path / "some.jsonl", [{"text": f"text {i}"} for i in range(900)])
    assert [len(load_rows(some, side)) for side in ("train", "heldout")] == [840, 60]
    texts = {side: {row.text for row in found} for side, found in sides.items()}
    assert not texts["train"] & texts["heldout"]
    # The same rows are held out whatever their order.
    data = write_rows(tmp_path / "rows.jsonl", rows[::-1])
    assert {row.text for row in load_rows(data, "heldout")} == texts["heldout"]


def test_a_side_without_rows_is_an_error(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [TEXT])
    with pytest.raises(ValueError, match=r"the train side of .* is empty"):
        load_rows(data, "train")


def test_the_standard_library_is_split_by_file() -> None:
    train, held_out = load_rows("stdlib", "train"), load_rows("stdlib", "heldout")
    assert not {row.where for row in train} & {row.where for row in held_out}
    everything = load_rows("stdlib", "all")
    held = {row.where for row in held_out}
    sizes = {row.where: len(row.text) for row in everything}
    share = sum(sizes[where] for where in held) / sum(sizes.values())
    assert HELD_OUT_SHARE - 0.01 < share <= HELD_OUT_SHARE
    seen = {line.strip() for row in train for line in row.text.splitlines()}
    shared = [
        line
        for row in held_out
        for line in row.text.splitlines()
        if line.strip() in seen and len(line.strip()) >= SHARED_LINE_LEAST
    ]
    assert not shared
    assert held_out == load_rows("stdlib", "heldout")
    names = [row.where.removeprefix("stdlib:") for row in everything]
    assert names == sorted(names) and "argparse.py" in names
    banned = r"(^|/)(test[^/]*|idlelib|lib2to3|encodings|pydoc_data|site-packages)(/|$)"
    assert not [name for name in names if re.search(banned, name)]


def test_a_stripped_standard_library_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("import sys\n")
    with pytest.raises(ValueError, match=r"got 0.0 MB of library source under .*, expected at"):
        stdlib_rows(tmp_path)
    assert stdlib_rows(Path(sysconfig.get_path("stdlib")))


def words(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]) -> tuple[str, str]:
    """What is not trained, and what is."""
    examples = tokenise([parse(row, "rows.jsonl:7")], tokenizer)
    ids, trained = examples.example(0)
    return tokenizer.decode(ids[~trained]), tokenizer.decode(ids[trained])


def test_what_is_trained_of_each_kind(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert words(tiny_tokenizer, TEXT) == ("", TEXT["text"] + "<|end|>")
    assert words(tiny_tokenizer, PAIR) == ("import", " sys<|end|>")
    assert words(tiny_tokenizer, CHAT) == ("<|user|>f?\n<|assistant|>", "one<|end|>")
    assert words(tiny_tokenizer, QUESTION) == ("<|user|>1 + 1?\n<|assistant|>", "#### 2<|end|>")
    plain = copy.copy(tiny_tokenizer)
    plain.chat_template = None
    assert words(plain, QUESTION) == ("1 + 1?\n", "#### 2<|end|>")


def test_a_prompt_is_the_beginning_of_its_example(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [parse(row, "rows.jsonl:1") for row in (PAIR, CHAT, QUESTION)]
    examples = tokenise(rows, tiny_tokenizer)
    for i, row in enumerate(rows):
        assert prompt_ids(row, tiny_tokenizer) == examples.prompt(i)
    turns = prompt_ids(parse(TURNS, "x:1"), tiny_tokenizer)
    assert tiny_tokenizer.decode(turns) == "<|user|>Write.\n<|assistant|>"
    plain_prompt = prompt_ids(parse({"prompt": "def f"}, "x:1"), tiny_tokenizer)
    assert tiny_tokenizer.decode(plain_prompt) == "def f"


def test_bos_begins_a_text_and_eos_ends_it_once(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|pad|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A <|end|>", special_tokens=[("<|pad|>", 1), ("<|end|>", 0)]
    )
    assert words(tokenizer, TEXT) == ("", f"<|pad|>{TEXT['text']}<|end|>")
    assert words(tokenizer, PAIR) == ("<|pad|>import", " sys<|end|>")
    window = text_prompts([parse(TEXT, "x:1")], tokenizer, count=1, length=4, seed=0)[0]
    assert window[0] == 1 and len(window) == 4


def test_what_cannot_be_tokenised_says_where(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.copy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"rows.jsonl:7: the tokenizer .* has no chat template"):
        words(bare, CHAT)
    with pytest.raises(ValueError, match=r"rows.jsonl:7: a prompt without an answer"):
        words(tiny_tokenizer, TURNS)
    endless = copy.deepcopy(tiny_tokenizer)
    endless.eos_token = None
    with pytest.raises(ValueError, match="has no EOS token"):
        words(endless, TEXT)
    with pytest.raises(ValueError, match=r"x:1: a document has no prompt of its own"):
        prompt_ids(parse(TEXT, "x:1"), tiny_tokenizer)


def test_rewritten_turns_are_reported(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.copy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>{% if loop.last %}think {% endif %}{{ m['content'] }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    # The template also rewrites the user's turn in the prompt, so only one chat can be checked.
    with pytest.raises(ValueError, match="no beginning of the rendered chat"):
        tokenise([Row("chat", "x:1", messages=tuple(turn * 2))], tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "loop.last", "loop.last and m['role'] == 'assistant'"
    )
    with pytest.warns(UserWarning, match="1 earlier assistant turns are rewritten"):
        tokenise([Row("chat", "x:1", messages=tuple(turn * 2))], tokenizer)


def test_windows_of_documents_are_seeded_and_apart(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [Row("text", f"x:{i}", completion=f"number {i}: " + "abcdefgh" * 30) for i in range(4)]
    windows = text_prompts(rows, tiny_tokenizer, count=12, length=16, seed=1)
    assert {len(window) for window in windows} == {16} and len(windows) == 12
    assert windows == text_prompts(rows, tiny_tokenizer, count=12, length=16, seed=1)
    assert windows != text_prompts(rows, tiny_tokenizer, count=12, length=16, seed=2)
    with pytest.raises(ValueError, match=r"got \d+ windows of 16 tokens in 4 documents"):
        text_prompts(rows, tiny_tokenizer, count=10_000, length=16, seed=1)
    with pytest.raises(ValueError, match="expected a document"):
        text_prompts([parse(PAIR, "x:1")], tiny_tokenizer, count=1, length=4, seed=0)


def test_the_inspector_shows_what_is_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = write_rows(tmp_path / "rows.jsonl", [TEXT, CHAT, TEXT])

    def printed(index: int, colour: str | None = None) -> str:
        system: Any = colour
        console = Console(color_system=system, force_terminal=colour is not None, record=True)
        asked = Show(
            data=str(data), tokenizer=str(tmp_path / "tokenizer"), split="all", index=index
        )
        show(asked, console)
        return console.export_text(styles=colour is not None)

    text = printed(1)
    assert "<|user|>f?\n<|assistant|>⟦one<|end|>⟧" in text
    assert "example 1 of 3" in text and "trained" in text
    text = printed(1, colour="standard")
    assert "⟦" not in text and re.search(r"\x1b\[[\d;]*42mone<\|end\|>", text)
    with pytest.raises(ValueError, match=r"index: got 3, expected 0\.\.2"):
        printed(3)
