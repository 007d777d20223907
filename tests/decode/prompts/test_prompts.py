"""Prompts from every layout, and the parts that tuning and reporting may use."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.evaluate.answers import known_answer
from draftsmith.decode.prompts.prompts import load_prompts, next_turn
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows, part_of
from draftsmith.models.disk.read_lm import load_config
from draftsmith.models.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "f?"}, {"role": "assistant", "content": "one"}]
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(count)]


@pytest.mark.parametrize(
    ("row", "templated", "plain", "category"),
    [
        ({"turns": ["Hi", "Again"], "category": "writing"}, "<|user|>Hi\n<|assistant|>", "Hi\n",
         "writing"),
        ({"question": "1 + 1?", "answer": "2"}, "<|user|>1 + 1?\n<|assistant|>", "1 + 1?\n",
         "grade-school maths"),
        ({"prompt": "def f():", "task_id": "HumanEval/0"}, "def f():", "def f():", "HumanEval"),
        ({"prompt": "def f():", "completion": " pass"}, "def f():", "def f():", "rows"),
        ({"prompt": "def f():"}, "def f():", "def f():", "rows"),
        ({"messages": CHAT}, "<|user|>f?\n<|assistant|>", None, "chat"),
        ({"messages": CHAT + CHAT[:1]},
         "<|user|>f?\n<|assistant|>one<|end|><|user|>f?\n<|assistant|>", None, "chat"),
    ],
    ids=["turns", "question", "humaneval", "completion", "prompt", "chat", "chat to answer"],
)  # fmt: skip
def test_each_layout_gives_what_the_model_reads(
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    row: dict[str, Any],
    templated: str,
    plain: str | None,
    category: str,
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [row])
    [prompt] = load_prompts(source, tiny_tokenizer, limit=None, split="all")
    assert (prompt.text, prompt.category, prompt.index) == (templated, category, 0)
    assert tiny_tokenizer.decode(prompt.tokens) == templated
    bare = copy.copy(tiny_tokenizer)
    bare.chat_template = None
    if plain is None:
        with pytest.raises(ValueError, match=r"rows.jsonl:1: the tokenizer .* no chat template"):
            load_prompts(source, bare, limit=None, split="all")
    else:
        assert load_prompts(source, bare, limit=None, split="all")[0].text == plain


def test_a_later_turn_holds_what_was_said(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"turns": ["Hi", "More", "End"], "category": "writing"}, {"turns": ["Hi"]}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    three, one = load_prompts(source, tiny_tokenizer, limit=None)
    assert (three.turns, one.turns) == (("Hi", "More", "End"), ())
    later = next_turn(three, ["a"], tiny_tokenizer)
    templated = "<|user|>Hi\n<|assistant|>a<|end|><|user|>More\n<|assistant|>"
    assert tiny_tokenizer.decode(later) == templated
    last = tiny_tokenizer.decode(next_turn(three, ["a", "b"], tiny_tokenizer))
    assert last == f"{templated}b<|end|><|user|>End\n<|assistant|>"
    bare = copy.copy(tiny_tokenizer)
    bare.chat_template = None
    assert bare.decode(next_turn(three, ["a"], bare)) == "Hi\na\nMore\n"
    assert bare.decode(next_turn(three, ["a", "b"], bare)) == "Hi\na\nMore\nb\nEnd\n"
    for turns, said in ((1, ("Hi",)), (2, ("Hi", "More"))):
        assert load_prompts(source, tiny_tokenizer, limit=None, turns=turns)[0].turns == said


def test_known_answers_come_along(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"question": "1 + 1?", "answer": "#### 2"},
        {"turns": ["1 + 2?"], "reference": ["#### 3"]},
        {"turns": ["Sing"], "reference": []},
        {"prompt": "def f():", "completion": " pass"},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    prompts = load_prompts(source, tiny_tokenizer, limit=None, split="all")
    assert [prompt.answer for prompt in prompts] == ["#### 2", "#### 3", "", ""]


def test_a_text_file_has_one_prompt_a_line(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("def main(\n\n  import\nclass A:\n")
    prompts = load_prompts(str(path), tiny_tokenizer, limit=None)
    assert [prompt.text for prompt in prompts] == ["def main(", "  import", "class A:"]
    assert {prompt.category for prompt in prompts} == {"mine"}


def test_running_text_is_cut_into_windows(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "".join(f"line {i} of the text\n" for i in range(40))
    source = write_rows(tmp_path / "rows.jsonl", [{"text": text}, {"text": "short"}])
    prompts = load_prompts(source, tiny_tokenizer, limit=None, prompt_tokens=16, split="all")
    assert len(prompts) > 5 and {len(prompt.tokens) for prompt in prompts} == {16}
    assert text.startswith("".join(prompt.text for prompt in prompts))
    with pytest.raises(ValueError, match="has 4000 tokens; expected longer texts"):
        load_prompts(source, tiny_tokenizer, limit=None, prompt_tokens=4000, split="all")


def test_a_limit_spreads_over_the_source(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"turns": [f"number {i}"], "category": f"c{i // 10}"} for i in range(40)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    few = load_prompts(source, tiny_tokenizer, limit=8)
    assert [prompt.index for prompt in few] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert Counter(prompt.category for prompt in few) == dict.fromkeys(("c0", "c1", "c2", "c3"), 2)
    every = load_prompts(source, tiny_tokenizer, limit=None)
    assert [every[prompt.index] for prompt in few] == few
    assert load_prompts(source, tiny_tokenizer, limit=99) == every and len(every) == 40


def test_library_parts_are_apart(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    held_out = load_rows("stdlib", "heldout")
    parts = {part: part_of(held_out, part) for part in ("tune", "report")}
    names = {part: {row.where for row in rows} for part, rows in parts.items()}
    assert not names["tune"] & names["report"]
    assert names["tune"] | names["report"] == {row.where for row in held_out}
    sizes = sorted(sum(len(row.text) for row in rows) for rows in parts.values())
    assert sizes[0] > sizes[1] / 3, "one part has too little text"
    trained = {row.where for row in load_rows("stdlib", "train")}
    assert not trained & (names["tune"] | names["report"])
    texts = {}
    for part, rows in parts.items():
        prompts = load_prompts("stdlib", tiny_tokenizer, limit=50, split=part)
        assert len(prompts) == 50 and prompts[0].category == "library source"
        # Windows of bytes may cut a character; what is whole stands in one of the part's files.
        texts[part] = [prompt.text.strip("\ufffd") for prompt in prompts]
        sources = [row.text for row in rows]
        assert all(any(text in source for source in sources) for text in texts[part])
    assert not set(texts["tune"]) & set(texts["report"])


def test_gsm8k_is_tuned_on_100_and_reported_on_200(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = write_rows(tmp_path / "train.jsonl", questions(320))
    asked = {
        part: [p.text for p in load_prompts(source, tiny_tokenizer, limit=None, split=part)]
        for part in ("train", "tune", "report")
    }
    assert [len(found) for found in asked.values()] == [20, 100, 200]
    assert asked["train"][-1] == "<|user|>19 + 1?\n<|assistant|>"
    assert asked["tune"][0] == "<|user|>20 + 1?\n<|assistant|>"
    assert asked["report"][0] == "<|user|>120 + 1?\n<|assistant|>"


def test_other_rows_are_held_out_and_parted_by_their_text(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"number {i % 600}", "completion": "!"} for i in range(800)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    held_out = {row.prompt for row in load_rows(source, "heldout")}
    asked = {
        part: {p.text for p in load_prompts(source, tiny_tokenizer, limit=None, split=part)}
        for part in ("tune", "report")
    }
    assert asked["tune"] | asked["report"] == held_out and len(held_out) > 20
    assert not asked["tune"] & asked["report"]
    assert abs(len(asked["tune"]) - len(held_out) / 3) < 1
    everything = load_prompts(source, tiny_tokenizer, limit=None, split="all")
    assert len(everything) == 800


def test_what_is_taken_whole_is_for_reporting_only(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    benchmark = write_rows(tmp_path / "bench.jsonl", [{"turns": [f"{i}"]} for i in range(10)])
    assert len(load_prompts(benchmark, tiny_tokenizer, limit=None)) == 10
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for source in (benchmark, str(tmp_path / "a.txt")):
        for split in ("tune", "train"):
            with pytest.raises(ValueError, match="is taken whole, to report on"):
                load_prompts(source, tiny_tokenizer, limit=None, split=split)


def test_bad_sources_are_clear_errors(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    def refused(source: str, message: str, **asked: Any) -> None:
        with pytest.raises(ValueError, match=message):
            load_prompts(source, tiny_tokenizer, **({"limit": None} | asked))

    refused(str(tmp_path / "none.jsonl"), "does not exist")
    refused(str(tmp_path / "none.txt"), "does not exist")
    (tmp_path / "empty.txt").write_text("\n\n")
    refused(str(tmp_path / "empty.txt"), "is empty; expected one prompt a line")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(str(tmp_path / "empty.jsonl"), "holds no rows")
    bad = write_rows(tmp_path / "bad.jsonl", [{"turns": ["a"]}, {"txt": "a"}])
    refused(bad, r"bad.jsonl:2: got the fields \['txt'\], expected")
    named = "split: got 'heldout', expected one of report, tune, train, all"
    refused("stdlib", named, split="heldout")
    refused("stdlib", "limit: got 0, expected at least 1", limit=0)
    two = write_rows(tmp_path / "two.jsonl", [{"text": "a" * 99}, {"text": "b" * 99}])
    refused(two, "the report part of 1 held-out rows is empty")


def test_parts_need_a_name_they_know() -> None:
    rows = [Row("text", f"x:{i}", completion=f"text {i}") for i in range(3)]
    assert [len(part_of(rows, part)) for part in ("tune", "report")] == [1, 2]
    with pytest.raises(ValueError, match="part: got 'dev', expected one of tune, report"):
        part_of(rows, "dev")


@pytest.mark.parametrize(
    ("name", "count", "categories", "turns", "known"),
    # Every answer to a maths problem of Spec-Bench is known, as those of GSM8K are.
    [
        ("spec_bench/question.jsonl", 240, 13, 280, 40),
        ("humaneval/humaneval.jsonl", 164, 1, 164, 0),
    ],
)
def test_real_benchmarks(
    target_15m: Path, name: str, count: int, categories: int, turns: int, known: int
) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not beside this checkout (../shared/data)")
    tokenizer = load_tokenizer(target_15m)
    prompts = load_prompts(str(SHARED / name), tokenizer, limit=None)
    assert len(prompts) == count and all(prompt.tokens for prompt in prompts)
    assert len({prompt.category for prompt in prompts}) == categories
    assert sum(max(1, len(prompt.turns)) for prompt in prompts) == turns
    assert sum(known_answer(prompt) is not None for prompt in prompts) == known
    context = load_config(target_15m).max_position_embeddings
    assert (max(len(prompt.tokens) for prompt in prompts) > context) == (count == 240)


def test_the_real_gsm8k(gsm8k_path: Path, target_15m: Path) -> None:
    rows = [json.loads(line) for line in gsm8k_path.read_text("utf-8").splitlines()]
    parts = {
        part: load_prompts(str(gsm8k_path), load_tokenizer(target_15m), limit=None, split=part)
        for part in ("tune", "report")
    }
    prompts = parts["report"]
    assert [len(part) for part in parts.values()] == [100, 200]
    assert all(known_answer(prompt) is not None for prompt in prompts)
    assert rows[-1]["question"] in prompts[-1].text and rows[-200]["question"] in prompts[0].text
