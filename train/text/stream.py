"""Batches of a corpus that doesn't fit in memory: streamed, sharded, resumed to the bit.

Each process reads its own shards (train/text/shards.py), a window of some thousand sequences at a
time: what it reads is cut, packed and shuffled within the window exactly as `Batches` does with a
whole corpus. What doesn't fill the window's last batch opens the next one, so that nothing is lost.
The next window is read and tokenised in the background.

Everything is a function of the corpus, the seed, the process and the place where a window begins.
That place, and how many batches of the window are taken, is all that a checkpoint keeps: a resumed
run reads one window again, not the corpus.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.train.run.loop import step_seed
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Text
from draftsmith.train.text.shards import ShardReader, shards_of
from draftsmith.train.text.tokenise import tokenise

# A window is read in about so many pieces, each from the corpus that is furthest behind its share.
PIECES, LETTERS_A_TOKEN = 8, 4
State = dict[str, Any]
Numbered = tuple[int, Any, Any]  # a document's number, and arrays: its ids, which are trained


@dataclass(kw_only=True)
class Corpus:
    """The group `corpus` of a recipe: text to stream."""

    # Each a path, a glob, a folder, `stdlib` or a hub's name; empty: `data` is trained on, from
    # memory. With it, `data` gives the held-out text alone.
    sources: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of their tokens; empty: all alike
    shuffle: int = 1024  # sequences of a window
    skip_corrupt: bool = False  # leave a broken shard's rest out, and say so


class Window(NamedTuple):
    """Sequences that are shuffled together, and what it took to read them."""

    before: State  # of the reader, where the window begins
    batches: Batches
    numbers: list[int]  # of each example of `batches`: its place among the documents read
    notes: list[str]
    skipped: list[str]  # shards, so far

    def rest(self) -> list[Numbered]:
        """What no full batch holds."""
        (spans, origin), examples = self.batches.cut, self.batches.examples
        left = len(self.batches) % self.batches.batch_size
        found = []
        for piece in chain.from_iterable(self.batches.sequences(len(self.batches) - left, left)):
            ids, trained = (t[slice(*spans[piece])] for t in (examples.ids, examples.trained))
            found.append((self.numbers[int(origin[piece])], ids.numpy(), trained.numpy()))
        return found


def windows(stream: "CorpusStream", rank: int, world: int, start: State | None) -> Iterator[Window]:
    """One process's windows without end, from the state where one began; each has at least one full
    batch. ValueError: what the readers and `tokenise` refuse, or text of which nothing is trained.

    Several corpora are mixed by tokens: the next piece comes from the one with the fewest tokens
    read for its weight. A single corpus ends a window where it ends, so that no document comes
    twice before all have come once.
    """
    corpus, how = stream.corpus, (stream.corpus.skip_corrupt, stream.left_out)
    readers = [
        ShardReader(corpus.sources[i], shards, rank, world, step_seed(stream.seed, i), *how)
        for i, shards in enumerate(stream.shards)
    ]
    rows = [reader.rows() for reader in readers]
    weights = corpus.weights or [1.0] * len(readers)
    goal = corpus.shuffle * stream.max_length
    tokens, documents, number, rest = [0] * len(readers), 0, 0, list[Numbered]()
    if start:
        for reader, state in zip(readers, start["readers"], strict=True):
            reader.restore(state)
        tokens, documents, number = list(start["tokens"]), start["documents"], start["windows"]
        rest = [(n, np.array(ids), np.array(t, dtype=bool)) for n, ids, t in start["rest"]]
    while True:
        before: State = {"readers": [reader.state() for reader in readers], "tokens": list(tokens)}
        before |= {"documents": documents, "windows": number}
        before["rest"] = [[n, ids.tolist(), t.astype(int).tolist()] for n, ids, t in rest]
        batches: Batches | None = None
        while batches is None or len(batches) < stream.batch_size:
            behind = [read / weight for read, weight in zip(tokens, weights, strict=True)]
            chosen = behind.index(min(behind))
            piece, ended = _piece(rows[chosen], goal * LETTERS_A_TOKEN / PIECES)
            if piece:
                examples = tokenise(piece, stream.tokenizer)
                tokens[chosen] += len(examples.ids)
                pairs = map(examples.example, range(len(piece)))
                rest += [(n, i.numpy(), t.numpy()) for n, (i, t) in enumerate(pairs, documents)]
                documents += len(piece)
            full = sum(len(ids) for _, ids, _ in rest) >= goal
            if rest and (full or (ended and len(readers) == 1)):
                batches = Batches(
                    Examples.collect((ids, trained) for _, ids, trained in rest),
                    batch_size=stream.batch_size,
                    max_length=stream.max_length,
                    seed=step_seed(stream.seed, rank, number),
                    packing=True,
                    pad_id=stream.tokenizer.pad_token_id or 0,
                )
        notes = [note for reader in readers for note in reader.told()]
        skipped = [name for reader in readers for name in reader.skipped]
        window = Window(before, batches, [n for n, _, _ in rest], notes, skipped)
        yield window
        rest, number = window.rest(), number + 1


def _piece(rows: Iterator[Row | None], letters: float) -> tuple[list[Row], bool]:
    """About so many letters of documents, and whether the epoch ended with them."""
    found: list[Row] = []
    while letters > 0:
        row = next(rows)
        if row is None:
            return found, True
        found.append(row)
        letters -= len(row.text)
    return found, False


class CorpusStream:
    """`StepBatches` of a corpus; asked for step after step, in order. left_out: texts of rows that
    aren't trained on. ValueError for a corpus that isn't there, weights that don't fit it, or too
    small a `shuffle`.
    """

    chooses = "corpus"

    def __init__(
        self,
        corpus: Corpus,
        text: Text,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase,
        left_out: Iterable[str] = (),
    ) -> None:
        many, weights = len(corpus.sources), corpus.weights
        if weights and (len(weights) != many or min(weights) <= 0):
            raise ValueError(
                f"corpus.weights: got {weights} for {many} corpora, expected one above 0 for each, "
                "or none"
            )
        if corpus.shuffle < settings.batch_size:
            raise ValueError(
                f"corpus.shuffle: got {corpus.shuffle}, expected at least "
                f"batch_size={settings.batch_size}"
            )
        self.corpus, self.tokenizer, self.max_length = corpus, tokenizer, text.max_length
        self.batch_size, self.seed = settings.batch_size, settings.seed
        self.shards = [shards_of(source) for source in corpus.sources]
        self.left_out = frozenset(left_out)
        self._ahead: Future[Window] | None = None
        self._window: Window | None = None
        self._taken = 0
        self._start: State | None = None  # of the checkpoint
        self._at: tuple[int, int] | None = None  # the next (step, micro)
        self._mark: tuple[int, State | None] = (-1, None)  # the state where that step began

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        """The next micro-batch of this process. ValueError: a corrupt shard, a row of another
        layout, another number of processes.
        """
        assert self._at in (None, (step, micro)), (self._at, step, micro)
        if self._ahead is None:
            self._open(rank, world)
        if micro == 0:
            self._mark = (step, self._now())
        if self._window is None or self._taken >= len(self._window.batches) // self.batch_size:
            self._turn()
        assert self._window is not None
        batch = self._window.batches.batch(self._taken, 0, 0, accumulation=1, world=1)
        self._taken += 1
        self._at = (step, micro + 1) if micro + 1 < accumulation else (step + 1, 0)
        rows = tuple(self._window.numbers[i] for i in batch.rows)
        return replace(batch, rows=rows, places=None)

    def state(self, step: int) -> State | None:
        """What `restore` needs to give the batches from `step` on; JSON can hold it."""
        marked, state = self._mark
        if step == marked:
            return state
        assert self._at in (None, (step, 0)), (self._at, step)
        return self._now()

    def restore(self, state: State | None) -> None:
        """Go on from `state`, in another process of the same number. Before the first batch."""
        assert self._ahead is None, "the stream is under way"
        self._start = state

    @property
    def skipped(self) -> list[str]:
        """The corrupt shards that were left out so far."""
        return self._window.skipped if self._window else []

    def amount(self, steps: int, size: int) -> str:
        """What is read; how much there is of it isn't known beforehand."""
        sources = ", ".join(self.corpus.sources)
        return f"text streamed from {sources}: {steps:,} steps of {size:,} sequences"

    def fingerprint(self) -> str:
        """sha256 over the shards' names and, of files, their sizes."""
        digest = hashlib.sha256(repr((self.corpus.sources, self.corpus.weights)).encode())
        for shard in chain.from_iterable(self.shards):
            digest.update(repr((shard.name, shard.path and shard.path.stat().st_size)).encode())
        return digest.hexdigest()

    def _now(self) -> State | None:
        if self._window is None:
            return self._start
        return {**self._place, "window": self._window.before, "taken": self._taken}

    def _open(self, rank: int, world: int) -> None:
        self._pool = ThreadPoolExecutor(1, "corpus")
        self._place: State = {"rank": rank, "world": world, "corpus": self.fingerprint()[:12]}
        self._place["batch_size"] = self.batch_size
        if self._start:
            for name, value in self._place.items():
                if self._start[name] != value:
                    raise ValueError(
                        f"corpus: the checkpoint is of {name}={self._start[name]}, this process "
                        f"has {value}; its place in its shards is lost: launch it as before, on "
                        "the same files"
                    )
        begun = self._start and self._start["window"]
        self._windows = windows(self, rank, world, begun)
        self._ahead = self._pool.submit(next, self._windows)
        if self._start:
            self._turn()
            self._taken = self._start["taken"]

    def _turn(self) -> None:
        """To the next window; another one is begun in the background."""
        assert self._ahead is not None
        self._window, self._taken = self._ahead.result(), 0
        self._ahead = self._pool.submit(next, self._windows)
        for note in self._window.notes:
            warnings.warn(f"corpus: {note}", stacklevel=3)


def first_texts(corpus: Corpus, left_out: Iterable[str], letters: int) -> Iterator[str]:
    """About so many letters of each source, as a tokenizer is trained on; errors of a stream."""
    for source in corpus.sources:
        how = (corpus.skip_corrupt, frozenset(left_out))
        rows, _ = _piece(ShardReader(source, shards_of(source), 0, 1, 0, *how).rows(), letters)
        yield from (row.text for row in rows)


def held_out_texts(*sources: str) -> set[str]:
    """The texts of all held-out rows of some `data`. Those of `stdlib` are in no corpus, and an
    empty name is none.
    """
    named = set(sources) - {"", "stdlib"}
    return {row.text for source in named for row in load_rows(source, "heldout")}
