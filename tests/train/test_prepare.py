"""Answers written by the target: what they are; a kill, a torn line, more processes change none."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, ranks
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams, request_seeds
from draftsmith.train.prepare import main
from draftsmith.train.text.prepared import answer_file, is_prepared, load_prepared, read_answers
from draftsmith.train.text.tokenise import load_examples

ROOT = Path(__file__).resolve().parents[2]
COUNT, SAMPLES = 12, 2
SETTINGS = {"samples": SAMPLES, "max_new_tokens": 24, "seed": 5, "batch_size": 3, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For so small a model more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A target that ends its answers now and then, and prompts of unequal lengths."""
    folder = tmp_path_factory.mktemp("prepare")
    state = {name: tensor.clone() for name, tensor in tiny_target.state_dict().items()}
    target = LlamaForCausalLM(tiny_target.config)
    target.load_state_dict(state)
    with torch.no_grad():
        target.lm_head.weight[tiny_tokenizer.eos_token_id] *= 1.5
    target.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    rows = [{"prompt": "def " + "f" * i + "(x):"} for i in range(COUNT)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, out: Path, **changes: Any) -> list[str]:
    settings = {"prompts": folder / "rows.jsonl", "split": "all", **SETTINGS, **changes}
    pairs = [f"{name}={value}" for name, value in settings.items()]
    return [f"target.path={folder / 'target'}", f"out={out}", *pairs]


def answers_of(out: Path) -> dict[int, dict[str, Any]]:
    answers = list(read_answers(out))
    found = {answer["index"]: answer for answer in answers}
    assert len(found) == len(answers), "an answer stands twice"
    return found


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """A run that nothing disturbed."""
    main(arguments(folder, folder / "whole"))
    return folder / "whole"


def test_answers_are_the_decoders_own(folder: Path, finished: Path) -> None:
    decoder = Decoder.from_pretrained(str(folder / "target"), dtype="float32")
    found = answers_of(finished)
    prompts = [found[i]["prompt_ids"] for i in range(COUNT * SAMPLES)]
    params = SamplingParams(temperature=1.0, max_new_tokens=24, seed=5)
    completions = decoder.generate(prompts, params)
    assert len(found) == COUNT * SAMPLES
    for index, made in enumerate(completions):
        answer = found[index]
        assert answer["token_ids"] == made.tokens and answer["text"] == made.text
        assert answer["finish_reason"] == made.finish_reason
        assert answer["seed"] == request_seeds(5, index)
    assert prompts[0] == prompts[1] and completions[0].tokens != completions[1].tokens


def test_several_temperatures_take_turns(folder: Path, finished: Path, tmp_path: Path) -> None:
    """Request i has the (i mod 2)-th temperature and the seed that it has anyway."""
    given = arguments(folder, tmp_path / "two", temperatures="[0.0,1.0]")
    main(given)
    found, warm = answers_of(tmp_path / "two"), answers_of(finished)
    decoder = Decoder.from_pretrained(str(folder / "target"), dtype="float32")
    prompts = [found[i]["prompt_ids"] for i in range(0, COUNT * SAMPLES, 2)]
    greedy = decoder.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=24))
    for index in range(COUNT * SAMPLES):
        expected = warm[index]["token_ids"] if index % 2 else greedy[index // 2].tokens
        assert found[index]["token_ids"] == expected, index
    assert len(load_prepared(tmp_path / "two")) == COUNT * SAMPLES
    with pytest.raises(ValueError, match=r"sampling: .*0\.6"):
        main([*given, "temperatures=[0.0,0.6]"])


def test_answers_are_trained_and_prompts_are_not(
    folder: Path, finished: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    examples, found = load_prepared(finished), answers_of(finished)
    end = tiny_tokenizer.eos_token_id
    assert len(examples) == COUNT * SAMPLES
    for index, answer in found.items():
        ids, trained = examples.example(index)
        assert examples.prompt(index) == answer["prompt_ids"]
        assert ids[trained].tolist() == answer["token_ids"]
        assert (ids[-1] == end) == (answer["finish_reason"] == "stop")
    assert {answer["finish_reason"] for answer in found.values()} == {"stop", "length"}
    same = load_examples(str(finished), tiny_tokenizer, "train")
    assert same.fingerprint() == examples.fingerprint()


def test_a_torn_line_is_dropped_and_only_what_is_missing_is_redone(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    main(arguments(folder, tmp_path, limit=COUNT))
    (shard,) = tmp_path.glob("answers-*.jsonl")
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:9]) + lines[9][:-30])
    with pytest.raises(ValueError, match="got 9 of 24 answers; run the same"):
        load_prepared(tmp_path)
    main(arguments(folder, tmp_path, limit=COUNT))
    assert shard.read_bytes().splitlines(keepends=True)[:9] == lines[:9]
    assert answers_of(tmp_path) == answers_of(finished)
    shard.write_bytes(b"".join([*lines[:3], b"{]\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"jsonl:4: not JSON"):
        load_prepared(tmp_path)


def test_after_kill_9_the_same_command_goes_on(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    # Long answers one by one, so that the kill comes within the work.
    long = arguments(folder, tmp_path, batch_size=1, max_new_tokens=150)
    run = Forked(["train/prepare.py", *long], cwd=ROOT)
    shard = tmp_path / "answers-00000-of-00001.jsonl"
    deadline = time.monotonic() + 1800
    while not (shard.exists() and shard.read_bytes().count(b"\n") >= 3):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = answers_of(tmp_path)
    assert 3 <= len(before) < COUNT * SAMPLES
    first_lines = shard.read_bytes().rpartition(b"\n")[0]
    main(long)
    after = answers_of(tmp_path)
    assert shard.read_bytes().startswith(first_lines) and len(after) == COUNT * SAMPLES
    for index, answer in answers_of(finished).items():
        assert after[index]["token_ids"][:24] == answer["token_ids"]


def test_processes_share_the_prompts(folder: Path, finished: Path, tmp_path: Path) -> None:
    for rank in ranks(["train/prepare.py", *arguments(folder, tmp_path)], cwd=ROOT):
        assert rank.returncode == 0, rank.told
    assert [path.name for path in sorted(tmp_path.glob("answers-*"))] == [
        "answers-00000-of-00002.jsonl",
        "answers-00001-of-00002.jsonl",
    ]
    assert answers_of(tmp_path) == answers_of(finished)
    assert load_prepared(tmp_path).fingerprint() == load_prepared(finished).fingerprint()
    # Another number of processes finds what these have finished.
    (tmp_path / "answers-00001-of-00002.jsonl").unlink()
    main(arguments(folder, tmp_path))
    assert answers_of(tmp_path) == answers_of(finished)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"temperature": 0.5}, "sampling.temperature"),
        ({"seed": 6}, "sampling.seed"),
        ({"limit": 3}, "prompts: .*; requests"),
        ({"samples": 1}, "prompts: .*; requests"),
        ({"target.dtype": "bfloat16"}, "dtype"),
    ],
)
def test_another_recipe_in_the_same_folder_is_refused(
    folder: Path, finished: Path, changes: dict[str, Any], key: str
) -> None:
    before = answers_of(finished)
    with pytest.raises(ValueError, match=f"begun with other settings .{key}: .* there, "):
        main(arguments(folder, finished, **changes))
    assert answers_of(finished) == before


def test_what_does_not_decide_an_answer_may_change(folder: Path, finished: Path) -> None:
    before = answers_of(finished)
    main(arguments(folder, finished, batch_size=7, **{"endpoint.concurrency": 2}))
    assert answers_of(finished) == before


def test_one_folder_has_one_writer(tmp_path: Path) -> None:
    with answer_file(tmp_path, 0, 1) as append:
        append({"index": 0})
        with pytest.raises(ValueError, match=r"being written by process .*expected one run"):
            answer_file(tmp_path, 0, 1).__enter__()
        with answer_file(tmp_path, 1, 2):
            pass
    assert [answer["index"] for answer in read_answers(tmp_path)] == [0]


def test_long_prompts_are_an_error_or_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": text} for text in ("def f", "x " * 600, "def g")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompts": tmp_path / "rows.jsonl", "max_new_tokens": 4, "samples": 1}
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"1 of 3 prompts longer than 511 tokens, request 1"):
        main(arguments(folder, out, **changes))
    assert not is_prepared(out)
    main(arguments(folder, out, **changes, max_prompt_tokens=100))
    assert sorted(answers_of(out)) == [0, 2], "indices stay with their prompts"
    assert len(load_prepared(out)) == 2


def test_documents_give_windows(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "def function(argument):\n    return argument\n" * 20}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompts": tmp_path / "rows.jsonl", "max_new_tokens": 4, "prompt_tokens": 16}
    with pytest.raises(ValueError, match="say limit=<how many windows>"):
        main(arguments(folder, tmp_path / "out", **changes))
    main(arguments(folder, tmp_path / "out", **changes, limit=5))
    found = answers_of(tmp_path / "out")
    assert len(found) == 5 * SAMPLES
    assert {len(answer["prompt_ids"]) for answer in found.values()} == {16}


def test_a_recipe_can_be_tried_on_a_shrunk_target(folder: Path, tmp_path: Path) -> None:
    main([*arguments(folder, tmp_path), "target.shrink=true"])
    found = answers_of(tmp_path)
    assert len(found) == 4 * SAMPLES
    assert max(len(answer["token_ids"]) for answer in found.values()) <= 8


def test_a_folder_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder that train/prepare.py"):
        load_prepared(tmp_path)
    (tmp_path / "answers-00000-of-00001.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"holds answers without prepare.json"):
        main(arguments(folder, tmp_path))
    (tmp_path / "prepare.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match=r"got schema 1 of schema; expected 1 with 'identity'"):
        main(arguments(folder, tmp_path))
