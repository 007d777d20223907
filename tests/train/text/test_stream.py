"""Streamed corpora: what a process reads, in which order, and that a resumed run reads the same."""

import gzip
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.prompts.rows import parse
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Text
from draftsmith.train.text.stream import Corpus, CorpusStream
from draftsmith.train.text.tokenise import tokenise

STEPS, DOCUMENTS = 24, 240
Make = Callable[..., CorpusStream]


def text_of(number: int) -> str:
    """Documents of many lengths; some are longer than a sequence."""
    draw = random.Random(number)
    words = " ".join(str(draw.randrange(100)) for _ in range(draw.choice([1, 3, 8, 20, 60])))
    return f"<{number}> {words}"


def write(folder: Path, name: str, numbers: range, column: str = "text") -> None:
    lines = "".join(json.dumps({column: text_of(i)}) + "\n" for i in numbers)
    if name.endswith(".gz"):
        with gzip.open(folder / name, "wt") as packed:
            packed.write(lines)
    else:
        (folder / name).write_text(lines)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 documents in six shards of every kind."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        write(folder, f"{number}.jsonl", range(40 * number, 40 * number + 40))
    write(folder, "3.jsonl.gz", range(120, 180), column="content")
    Dataset.from_dict({"text": [text_of(i) for i in range(180, 239)]}).to_parquet(
        folder / "4.parquet"
    )
    (folder / "5.txt").write_text(text_of(239))
    (folder / "empty.jsonl").touch()
    return folder


@pytest.fixture
def make(corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Make:
    def make(*, left_out: tuple[str, ...] = (), **settings: Any) -> CorpusStream:
        given = {"max_length": 32, "batch_size": 3, "seed": 0}
        of_run = {name: settings.pop(name, value) for name, value in given.items()}
        text = Text(max_length=of_run.pop("max_length"))
        run = Settings(out="", steps=STEPS, **of_run)
        asked = Corpus(**{"sources": [str(corpus)], "shuffle": 16} | settings)
        return CorpusStream(asked, text, run, tiny_tokenizer, left_out)

    return make


def take(stream: CorpusStream, steps: range, rank: int = 0, world: int = 1) -> list[Batch]:
    """Two micro-batches a step."""
    place = {"accumulation": 2, "world": world}
    return [stream.batch(s, micro, rank, **place) for s in steps for micro in range(2)]


def alike(some: list[Batch], others: list[Batch]) -> bool:
    """Whether all tensors are the same, bit by bit."""
    for a, b in zip(some, others, strict=True):
        ours, theirs = astuple(a), astuple(b)
        for x, y in zip(ours, theirs, strict=True):
            if not (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y):
                return False
    return True


def documents(batches: list[Batch], tokenizer: PreTrainedTokenizerFast) -> Counter[str]:
    """Texts between a beginning (position 0) and EOS, whole; others are parts of long ones."""
    found: Counter[str] = Counter()
    for batch in batches:
        for ids_T, positions_T in zip(batch.input_ids, batch.position_ids, strict=True):
            starts = [*(positions_T == 0).nonzero().flatten().tolist(), len(ids_T)]
            for begin, end in pairwise(starts):
                ids = ids_T[begin:end].tolist()
                if tokenizer.eos_token_id in ids:
                    text = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)])
                    found[text] += text.startswith("<")
    return found


def first_epoch(stream: CorpusStream, rank: int = 0, world: int = 1) -> list[Batch]:
    """All batches before the corpus begins again, as a warning tells."""
    found: list[Batch] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = 0
        while not any("begins again" in str(warning.message) for warning in told):
            found.append(stream.batch(step, 0, rank, accumulation=1, world=world))
            step += 1
    return found[:-1]


@pytest.mark.filterwarnings("ignore:corpus")
@pytest.mark.parametrize(("world", "steps"), [(1, 24), (2, 24), (8, 6)])
def test_a_resumed_stream_gives_the_same_batches(make: Make, world: int, steps: int) -> None:
    """After a kill at any step, window and epoch, and from JSON; of one, two and eight processes:
    the last has more of them than there are shards. It goes on into a second epoch.
    """
    for rank in {0, world - 1}:
        straight = take(make(), range(steps), rank, world)
        for killed in (1, steps // 3, steps - 1):
            first = make()
            take(first, range(killed), rank, world)
            # The loop has fetched the next step when it is asked to stop.
            ahead = first.state(killed)
            take(first, range(killed, killed + 1), rank, world)
            state = json.loads(json.dumps(first.state(killed)))
            assert state == json.loads(json.dumps(ahead))
            second = make()
            second.restore(state)
            again = take(second, range(killed, steps), rank, world)
            assert alike(straight[2 * killed :], again), (rank, killed)
            assert second.state(steps) is not None


def test_a_resume_reads_on_within_a_shard(
    make: Make, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the corpus is behind it: that half isn't tokenised again."""
    from draftsmith.train.text import stream as module

    seen: list[str] = []

    def spying(rows: Any, tokenizer: Any) -> Examples:
        seen.extend(row.text for row in rows)
        return tokenise(rows, tokenizer)

    monkeypatch.setattr(module, "tokenise", spying)
    first = make(shuffle=6)
    steps = next(s for s in range(1000) if take(first, range(s, s + 1)) and len(seen) > 150)
    second = make(shuffle=6)
    second.restore(first.state(steps + 1))
    seen.clear()
    take(second, range(steps + 1, steps + 2))
    second._ahead.result()  # the window in the background
    assert 0 < len(seen) < 60


@pytest.mark.parametrize("world", [1, 2, 8])
def test_each_document_comes_once_an_epoch_to_one_process(
    make: Make, tiny_tokenizer: PreTrainedTokenizerFast, world: int
) -> None:
    """But for the few that wait for a full batch: they are the first of the next epoch."""
    found = [
        documents(first_epoch(make(batch_size=1), rank, world), tiny_tokenizer)
        for rank in range(world)
    ]
    whole = {t for t in map(text_of, range(DOCUMENTS)) if len(tiny_tokenizer(t).input_ids) < 32}
    together = sum(found, Counter())
    assert len(whole) > 100
    assert {text for text in together if text in whole} == whole
    assert all(together[text] == 1 for text in whole)


def test_every_token_is_trained_once(make: Make, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Long documents too: what is trained is all but the first token of each piece of 32."""
    rows = [parse({"text": text_of(i)}, str(i)) for i in range(DOCUMENTS)]
    examples = tokenise(rows, tiny_tokenizer)
    lengths = examples.starts.diff().tolist()
    pieces = [min(32, n - first) for n in lengths for first in range(0, n, 32)]
    found = sum(int(batch.loss_mask.sum()) for batch in first_epoch(make(batch_size=1)))
    assert found == sum(n - 1 for n in pieces)


def test_batches_are_those_of_the_window(
    make: Make, corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Masks, positions and shuffling come from `Batches`: with a window of the whole corpus, the
    same rows, up to the order of shards."""
    stream = make(shuffle=100_000, batch_size=1)
    rows = [parse({"text": text_of(i)}, str(i)) for i in range(DOCUMENTS)]
    plain = Batches(
        tokenise(rows, tiny_tokenizer),
        batch_size=1,
        max_length=32,
        seed=0,
        packing=True,
        pad_id=tiny_tokenizer.pad_token_id,
    )
    streamed = first_epoch(stream)
    assert len(streamed) == len(plain)
    expected = [plain.batch(i, 0, 0, accumulation=1, world=1) for i in range(len(plain))]
    assert sum(b.loss_mask.sum() for b in streamed) == sum(b.loss_mask.sum() for b in expected)
    packed = next(batch for batch in streamed if batch.attention_mask is not None)
    starts = (packed.position_ids[0] == 0).cumsum(0)
    for query in range(32):
        row = packed.attention_mask[0, 0, query]
        trained_row = [key <= query and starts[key] == starts[query] for key in range(32)]
        if packed.loss_mask[0, query]:
            assert row.tolist() == trained_row


def test_epochs_and_seeds_have_orders_of_their_own(
    make: Make, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = {seed: take(make(seed=seed), range(4)) for seed in (0, 1)}
    assert not alike(ids[0], ids[1])
    rows = list(chain.from_iterable(batch.rows for batch in take(make(), range(60))))
    assert rows != sorted(rows), "shuffled"


def test_a_mix_keeps_its_shares(
    tmp_path: Path, make: Make, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """5 to 2.5 in tokens, though the second corpus is small and comes round often."""
    for name, letter in (("code", "c"), ("text", "t")):
        lines = [json.dumps({"text": letter * 30}) for _ in range(50 if name == "text" else 900)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [str(tmp_path / "code*.jsonl"), str(tmp_path / "text.jsonl")]
    mixed = make(sources=sources, weights=[5, 2.5], shuffle=48)
    with pytest.warns(UserWarning, match=r"text.jsonl is used up and begins again: epoch 2"):
        batches = take(mixed, range(40))
    found = documents(batches, tiny_tokenizer) or Counter()
    code = sum((batch.input_ids == tiny_tokenizer("c").input_ids[-1]).sum() for batch in batches)
    text = sum((batch.input_ids == tiny_tokenizer("t").input_ids[-1]).sum() for batch in batches)
    assert not +found
    assert code / (code + text) == pytest.approx(2 / 3, abs=0.05)
    with pytest.raises(ValueError, match=r"weights: got \[1.0\] for 2 corpora"):
        make(sources=sources, weights=[1.0])


def test_held_out_rows_are_left_out(make: Make, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    held = tuple(text_of(i) for i in range(0, DOCUMENTS, 2))
    found = documents(first_epoch(make(left_out=held, batch_size=1)), tiny_tokenizer)
    assert len(+found) > 50 and not found.keys() & set(held)


def torn_gz(folder: Path) -> str:
    write(folder, "bad.jsonl.gz", range(2000))
    whole = (folder / "bad.jsonl.gz").read_bytes()
    (folder / "bad.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    return r"bad.jsonl.gz:\d+: a corrupt shard .EOFError"


def bad_line(folder: Path) -> str:
    write(folder, "bad.jsonl", range(30))
    lines = (folder / "bad.jsonl").read_text().splitlines()
    lines[16] = '{"text": "torn'
    (folder / "bad.jsonl").write_text("\n".join(lines))
    return "bad.jsonl:17: a corrupt shard"


def broken_parquet(folder: Path) -> str:
    from datasets import Dataset

    Dataset.from_dict({"text": [text_of(i) for i in range(30)]}).to_parquet(folder / "bad.parquet")
    whole = (folder / "bad.parquet").read_bytes()
    (folder / "bad.parquet").write_bytes(whole[:-20])
    return "bad.parquet: a corrupt shard .ArrowInvalid"


def not_utf8(folder: Path) -> str:
    (folder / "bad.txt").write_bytes(b"\xff\xfe text")
    return "bad.txt: a corrupt shard .UnicodeDecodeError"


@pytest.mark.filterwarnings("ignore:corpus.*begins again")
@pytest.mark.parametrize("spoil", [torn_gz, bad_line, broken_parquet, not_utf8])
def test_a_corrupt_shard_is_named_and_skipped_only_if_told(
    spoil: Callable[[Path], str], tmp_path: Path, make: Make
) -> None:
    write(tmp_path, "a.jsonl", range(12))
    write(tmp_path, "z.jsonl", range(12, 24))
    message = spoil(tmp_path)
    source = [str(tmp_path)]
    with pytest.raises(ValueError, match=message):
        take(make(sources=source), range(STEPS))
    told = make(sources=source, skip_corrupt=True)
    with pytest.warns(UserWarning, match=message + ".*the rest of it is skipped"):
        straight = take(told, range(STEPS))
    assert [Path(name).name.split(".")[0] for name in told.skipped] == ["bad"]
    second = make(sources=source, skip_corrupt=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = make(sources=source, skip_corrupt=True)
        take(first, range(STEPS - 2))
        second.restore(first.state(STEPS - 2))
        again = take(second, range(STEPS - 2, STEPS))
    assert alike(straight[-4:], again)
    assert second.skipped == told.skipped


def test_bad_input(tmp_path: Path, make: Make) -> None:
    write(tmp_path, "a.jsonl", range(9))
    (tmp_path / "b.csv").write_text("text\n")
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n{"title": "b", "text": null}\n')
    (tmp_path / "none").mkdir()
    for source, message in {
        "nowhere.jsonl": "nowhere.jsonl', which does not exist",
        "none/*.jsonl": "holds no file",
        "none": "holds no file",
        "b.csv": r"b.csv, expected .jsonl, .json, .txt, .parquet, all but the last also with .gz",
        "blank.jsonl": "has no document to train on",
        "odd.jsonl": r"odd.jsonl, row 2: got the fields \['title'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            take(make(sources=[str(tmp_path / source)], batch_size=1), range(1))
    with pytest.raises(ValueError, match="shuffle: got 2, expected at least batch_size=3"):
        make(shuffle=2)
    stream = make()
    take(stream, range(1), rank=1, world=2)
    other = make()
    other.restore(stream.state(1))
    with pytest.raises(ValueError, match=r"of world=2, this process has 3; .*launch it as before"):
        take(other, range(1, 2), rank=1, world=3)
    first, again = (make(sources=[str(tmp_path / "a.jsonl")]) for _ in range(2))
    take(first, range(1))
    again.restore(first.state(1))
    write(tmp_path, "a.jsonl", range(10))
    with pytest.raises(ValueError, match=r"of corpus=.*on the same files"):
        take(again, range(1, 2))
