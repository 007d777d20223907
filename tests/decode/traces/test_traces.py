"""Traces on disk: whole, bounded, resumable, refused when they are another's; the command that
writes them; SpecDec++'s mixed rows against a slow version.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import guarded
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    SamplingParams,
    choose,
    log_race,
    position_keys,
    request_seeds,
    uniform,
)
from draftsmith.decode.traces import record as tracing
from draftsmith.decode.traces.record import check_mixing, mixed_rows
from draftsmith.decode.traces.store import TraceWriter, read_traces
from draftsmith.models.disk import store

ABOUT = {
    "kind": "decoder",
    "target": {"head": "abc", "name": "x"},
    "drafter": {"path": "here", "mark": "m"},
    "settings": {"temperature": 1.0, "K": 4},
}


def columns_of(prompt: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(prompt)
    return {
        "depth": torch.arange(1, rows + 1, dtype=torch.int16),
        "kept": torch.rand(rows, generator=generator) < 0.5,
        "draft_state": torch.randn(rows, 6, generator=generator).bfloat16(),
    }


def write(folder: Path, prompts: list[int], **changes: Any) -> TraceWriter:
    """Ten rows a prompt, 25 or more a shard, so three prompts; not closed."""
    about = changes.pop("about", ABOUT)
    writer = TraceWriter(folder, about, max_bytes=changes.pop("max_bytes", 10**6), shard_rows=25)
    for prompt in prompts:
        writer.add(prompt, columns_of(prompt, 10))
    return writer


def same_rows(folder: Path, prompts: list[int]) -> None:
    """The folder holds the rows of just these prompts, each once, in this order."""
    found = read_traces(folder).columns
    for name in ("depth", "kept", "draft_state"):
        assert torch.equal(found[name], torch.cat([columns_of(p, 10)[name] for p in prompts]))
    assert found["prompt"].tolist() == [prompt for prompt in prompts for _ in range(10)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, [3, 0, 7, 1, 5]).close()
    same_rows(tmp_path, [3, 0, 7, 1, 5])
    shards = json.loads((tmp_path / "trace.json").read_text())["shards"]
    assert [shard["prompts"] for shard in shards] == [[3, 0, 7], [1, 5]]
    some = read_traces(tmp_path, ["kept"], kind="decoder")
    assert list(some.columns) == ["kept"] and some.about == ABOUT


def test_a_kill_costs_the_shard_that_was_being_filled(tmp_path: Path) -> None:
    write(tmp_path, [0, 1, 2, 3, 4])  # never closed
    (tmp_path / ".trace-00001.safetensors.half").write_bytes(b"cut")
    same_rows(tmp_path, [0, 1, 2])
    again = write(tmp_path, [])
    assert again.done == {0, 1, 2} and not again.full
    again.add(9, {})  # an answer without rows is done too
    for prompt in (3, 4):
        again.add(prompt, columns_of(prompt, 10))
    again.close()
    same_rows(tmp_path, [0, 1, 2, 3, 4])
    assert write(tmp_path, []).done == {0, 1, 2, 3, 4, 9}


def test_a_kill_between_shard_and_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.write_atomically

    def killed(path: Path, content: bytes) -> None:
        if path.name == "trace.json" and (tmp_path / "trace-00001.safetensors").exists():
            raise KeyboardInterrupt
        whole(path, content)

    monkeypatch.setattr(store, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [0, 1, 2, 3, 4, 5])
    monkeypatch.undo()
    same_rows(tmp_path, [0, 1, 2])
    write(tmp_path, [8, 9, 3]).close()  # takes the place of the shard that nobody knows
    same_rows(tmp_path, [0, 1, 2, 8, 9, 3])


def test_it_is_bounded(tmp_path: Path) -> None:
    size = sum(c.nbytes for c in columns_of(0, 10).values()) + 80  # the column `prompt`
    writer = write(tmp_path, [0, 1], max_bytes=3 * size)
    assert not writer.full
    writer.add(2, columns_of(2, 10))
    assert writer.full
    writer.add(3, columns_of(3, 1))  # on its way when the end came
    writer.close()
    assert writer.bytes == 3 * size and writer.done == {0, 1, 2}
    same_rows(tmp_path, [0, 1, 2])
    more = write(tmp_path, [3], max_bytes=4 * size)
    assert more.full and more.done == {0, 1, 2, 3}


def test_another_trace_is_refused_by_what_differs(tmp_path: Path) -> None:
    write(tmp_path, [0]).close()
    moved = ABOUT | {"drafter": {"path": "there", "mark": "m"}, "commit": "1"}
    assert write(tmp_path, [], about=moved).done == {0}
    for part, other, message in (
        ("settings", {"temperature": 0.5, "K": 4}, r"settings\.temperature: 1\.0 there, 0\.5 now"),
        ("target", {"head": "abd"}, "target.head: abc there, abd now"),
        ("drafter", {"mark": "n"}, "drafter.mark: m there, n now"),
        ("kind", "mixed", "kind: decoder there, mixed now"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path, [], about=ABOUT | {part: other})


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    heard, told = os.pipe()
    first = os.fork()
    if not first:
        try:
            writer = write(tmp_path, [0])
            os.write(told, bytes(len(writer.done)))
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(heard, 1)
    with pytest.raises(ValueError, match=rf"written by process {first}; wait for it"):
        write(tmp_path, [1])
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    os.close(heard)
    os.close(told)
    write(tmp_path, [1]).close()
    same_rows(tmp_path, [1])


def test_a_damaged_folder_is_refused_by_name(tmp_path: Path) -> None:
    def refused(message: str, **asked: Any) -> None:
        with pytest.raises(ValueError, match=message):
            read_traces(tmp_path, **asked)

    refused("no trace.json, expected a folder that draftsmith trace wrote")
    write(tmp_path, []).close()
    refused("a trace without rows")
    write(tmp_path, [0, 1, 2, 3]).close()
    refused("without the columns lead, expected them beside depth, draft_state", columns=["lead"])
    refused("a trace of kind 'decoder', expected 'judge'", kind="judge")
    last, other = tmp_path / "trace-00001.safetensors", tmp_path / "other"
    content = last.read_bytes()
    write(other, [0, 1, 2, 4]).close()
    foreign = (other / last.name).read_bytes()
    assert len(foreign) == len(content)
    for damaged, message in (
        (content[:-5], "cut or foreign"),
        (foreign, "cut or foreign .*belongs to other content"),
        (b"\xff" * len(content), "cut"),
    ):
        last.write_bytes(damaged)
        refused(f"trace-00001.safetensors: got a shard that is {message}")
        with pytest.raises(ValueError, match="trace-00001"):
            write(tmp_path, [])
    last.unlink()
    refused("trace-00001.safetensors: got a shard that is missing")
    manifest = tmp_path / "trace.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    refused("got schema 2 of .*expected 1 with 'about'")
    with pytest.raises(ValueError, match="kind: got 'other', expected one of"):
        write(tmp_path, [], about={"kind": "other"})


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Arguments that name a pair and prompts on disk."""
    root = tmp_path_factory.mktemp("pair")
    for name, model in (("target", tiny_target), ("drafter", tiny_draft)):
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    rows = [{"prompt": f"def f{i}(", "completion": "x"} for i in range(12)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = [f"target={root / 'target'}", f"drafter={root / 'drafter'}"]
    return [*named, f"prompts={root / 'rows.jsonl'}", "max_new_tokens=12", "K=3"]


def by_prompt(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    columns = read_traces(folder).columns
    prompts = columns["prompt"].unique().tolist()
    return {p: {k: v[columns["prompt"] == p] for k, v in columns.items()} for p in prompts}


@pytest.mark.filterwarnings("ignore:.*no draftsmith.json")
def test_the_command_goes_on_where_it_was_interrupted(
    tmp_path: Path,
    folders: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C, then the rest in another batch size: the rows of one go, prompt by prompt."""
    every = ["every=true", "limit=5"]
    assert guarded(tracing.main, [*folders, *every, f"out={tmp_path / 'one'}"]) == 0
    whole = TraceWriter.add

    def interrupted(self: TraceWriter, prompt: int, columns: dict[str, torch.Tensor]) -> None:
        if len(self.done) == 2:
            raise KeyboardInterrupt
        whole(self, prompt, columns)

    monkeypatch.setattr(TraceWriter, "add", interrupted)
    two = [*folders, *every, f"out={tmp_path / 'two'}", "batch_size=1"]
    assert guarded(tracing.main, two) == 130
    assert "what is whole is kept" in capsys.readouterr().err
    monkeypatch.undo()
    assert len(by_prompt(tmp_path / "two")) == 2
    assert guarded(tracing.main, two) == 0
    assert "3 prompts to trace, 2 done" in capsys.readouterr().out
    one, both = by_prompt(tmp_path / "one"), by_prompt(tmp_path / "two")
    assert one.keys() == both.keys() and len(one) == 5
    for prompt, columns in one.items():
        for name in ("round", "position", "depth", "token", "kept"):
            assert torch.equal(columns[name], both[prompt][name]), name
        torch.testing.assert_close(columns["log_q"], both[prompt]["log_q"])
        assert len(columns["round"]) == 3 * (int(columns["round"].max()) + 1)
    assert guarded(tracing.main, [*two, "temperature=0.5"]) == 2
    assert "settings.temperature: 1.0 there, 0.5 now" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.filterwarnings("ignore:.*no draftsmith.json")
def test_the_command_mixes_rows_and_keeps_to_its_bound(
    tmp_path: Path, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = [*folders, f"out={tmp_path / 'mixed'}", "source=mixed", "mixing=0.4", "limit=4"]
    assert guarded(tracing.main, out) == 0
    found = read_traces(tmp_path / "mixed", kind="mixed").columns
    assert "token_state" in found and 0.4 < len(found["kept"]) / (4 * 12) < 0.8
    small = [*folders, f"out={tmp_path / 'small'}", "max_gb=1e-5"]
    assert guarded(tracing.main, small) == 0
    said = capsys.readouterr().out
    assert "full: no further prompt within max_gb=1e-05" in said and "at most" in said
    assert sum(c.nbytes for c in read_traces(tmp_path / "small").columns.values()) <= 1e4
    for wrong, message in (
        (["source=mixed", "every=true"], "which has no rounds"),
        (["source=mixed", "temperature=0"], "got temperature=0"),
        (["source=mixed", "mixing=1"], "mixing: got 1.0"),
        (["source=other"], "expected one of decoder, mixed"),
        (["tree=dynamic:2,2,4"], "recording: got tree=dynamic"),
        (["split=dev"], "split: got 'dev'"),
    ):
        assert guarded(tracing.main, [*folders, *wrong, f"out={tmp_path / 'wrong'}"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def slow_rows(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    answer: Completion,
    number: int,
    params: SamplingParams,
    share: float,
) -> list[dict[str, Any]]:
    """Token by token, each from a pass of its own."""
    rows: list[dict[str, Any]] = []
    read = list(answer.prompt_tokens)  # prompt and Z so far
    seed = torch.tensor([request_seeds(params.seed, number)])
    for i, x in enumerate(answer.tokens):
        before = torch.tensor([answer.prompt_tokens + answer.tokens[:i]])
        at = torch.tensor([[before.shape[1]]])
        keys = {s: position_keys(seed, at, s) for s in (DRAFT, ACCEPT, RESIDUAL)}
        q, p = (params.transform(m(before).logits[0, -1]).softmax(-1) for m in (draft, target))
        race = log_race(keys[DRAFT], len(q))[0, 0]
        y = int(choose(q.log(), race))
        if uniform(keys[ACCEPT]) < share:
            read.append(x)
            continue
        state = [
            draft.model(torch.tensor([r])).last_hidden_state[0, -1] for r in (read, [*read, y])
        ]
        read.append(y)
        score = q.log() - race
        rows.append(
            {
                "position": int(at),
                "token": y,
                "log_q": float(q[y].log()),
                "log_p": float(p[y].log()),
                "entropy": -float((q * q.log()).nansum()),
                "lead": float(score[y] - score[torch.arange(len(q)) != y].max()),
                "kept": bool(uniform(keys[RESIDUAL]) < min(1, p[y] / q[y])),
                "on_path": True,
                "draft_state": state[0].bfloat16(),
                "token_state": state[1].bfloat16(),
            }
        )
    return rows


@torch.inference_mode()
def test_mixed_rows_are_those_of_the_slow_version(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    params = SamplingParams(temperature=0.8, top_k=60, max_new_tokens=24, seed=3)
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3)
    [answer] = decoder.generate([[5, 9, 30]], params, indices=[11])
    rows = mixed_rows(decoder.runner, drafter, answer, 11, params, 0.3)
    expected = slow_rows(tiny_target, tiny_draft, answer, 11, params, 0.3)
    assert 8 < len(expected) < len(answer.tokens)
    for name, column in rows.items():
        want = [row[name] for row in expected]
        wanted = torch.stack(want) if isinstance(want[0], torch.Tensor) else torch.tensor(want)
        close = {"rtol": 1e-2, "atol": 1e-2} if column.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(column, wanted.to(column.dtype), **close)
    again = mixed_rows(decoder.runner, drafter, answer, 11, params, 0.3)
    assert all(torch.equal(rows[name], again[name]) for name in rows)
    other = mixed_rows(decoder.runner, drafter, answer, 12, params, 0.3)
    assert other["token"].tolist() != rows["token"].tolist()
    own = LMDrafter(tiny_target, len(tiny_tokenizer))
    assert mixed_rows(decoder.runner, own, answer, 11, params, 0.0)["kept"].all()
    with pytest.raises(ValueError, match="kind None, expected a draft LM"):
        check_mixing(None, params, 0.3)
