"""Answers that retrieve as they go, without waiting for each retrieval: RaLMSpec (Zhang et al.,
arXiv 2401.14021). The answers are those of plain iterative retrieval, token by token.

    python examples/speculative_retrieval.py target=TARGET documents=docs.jsonl prompts=asked.jsonl

Every `stride` tokens the document that fits the latest text best comes before all of it. Here the
best document is first guessed from a cache of those already seen; after s strides one batched call
of the retriever says which they should have been. The first stride with another document is written
anew, what came after it is dropped, and all documents found go into the cache. With a the seconds
of a stride, b of a call, g the chance of a right guess, s is the least at which

    (1 - g^(s+1)) / (1 - g) / ((s + 1) a + b)  <  (1 - g^s) / (1 - g) / (s a + b)

so that strides a second would fall. The decoder is as it is: each stride is a prompt of its own.

Where we differ: verification isn't overlapped with the next stride; one retriever, BM25, here.
"""

import heapq
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftsmith import Decoder, SamplingParams
from draftsmith.command import check_least, parse, run_command
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.printed import number, print_table

PREFETCHED = 20  # documents that a query brings into the cache
MOST, WINDOW, MOST_SURE = 16, 5, 0.6  # strides ahead, calls that g is estimated on, g at most


@dataclass
class Retrieving:
    """What answers what, from which documents."""

    target: str
    documents: str  # rows, each a document
    prompts: str
    split: str = "report"
    limit: int = 8
    stride: int = 4  # tokens until documents are looked up again
    ahead: int = 0  # strides guessed at a time; 0: by what they cost and come to
    query_tokens: int = 32  # the latest, which are looked up
    document_tokens: int = 96
    max_new_tokens: int = 48
    temperature: float = 0.0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_least(self, limit=1, stride=1, ahead=0, query_tokens=1, max_new_tokens=1)


class Retriever:
    """BM25 (Robertson and Zaragoza 2009) over documents; counts its calls and their seconds."""

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.counts = [Counter(words(document)) for document in documents]
        lengths = [sum(counts.values()) for counts in self.counts]
        mean, total = sum(lengths) / len(lengths), len(lengths)
        self.norms = [k1 * (1 - b + b * length / mean) for length in lengths]
        held = Counter(word for counts in self.counts for word in counts)
        self.rare = {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in held.items()}
        self.factor, self.calls, self.seconds = k1 + 1, 0, 0.0

    def score(self, query: Counter[str], document: int) -> float:
        counts, norm = self.counts[document], self.norms[document]
        return sum(
            n * self.rare[word] * counts[word] * self.factor / (counts[word] + norm)
            for word, n in query.items()
            if word in counts
        )

    def best(self, query: str, among: Iterable[int], k: int) -> list[int]:
        """The k that fit best, ties to the first."""
        asked = Counter(words(query))
        return heapq.nsmallest(k, among, key=lambda at: (-self.score(asked, at), at))

    def search(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """The same among all documents, for several queries: one call, which is waited for."""
        started = time.perf_counter()
        found = [self.best(query, range(len(self.counts)), k) for query in queries]
        self.calls += 1
        self.seconds += time.perf_counter() - started
        return found


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@dataclass
class Pace:
    """How many strides to guess before the next call, by what strides and calls took."""

    a: float = 1.0
    b: float = 0.0
    right: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, right: int, failed: bool, stride: float, call: float) -> None:
        """A round with so many right guesses, and whether one was wrong; seconds of each."""
        self.right.append((right, failed))
        self.a, self.b = stride, call

    def ahead(self) -> int:
        guessed = sum(right + failed for right, failed in self.right)
        sure = sum(right for right, _ in self.right) / guessed if guessed else 0.0
        return strides_ahead(min(sure, MOST_SURE), self.a, self.b)


def strides_ahead(sure: float, a: float, b: float) -> int:
    """The least s after which right strides a second fall; at most `MOST`."""
    s = 1
    while s < MOST and (1 - sure ** (s + 1)) * (s * a + b) >= (1 - sure**s) * ((s + 1) * a + b):
        s += 1
    return s


class Answerer:
    """Answers from documents, by plain iterative retrieval or speculatively."""

    def __init__(self, decoder: Decoder, documents: Sequence[str], how: Retrieving) -> None:
        self.decoder, self.how, self.retriever = decoder, how, Retriever(documents)
        encoded = (decoder.tokenizer(text, add_special_tokens=False) for text in documents)
        self.documents = [list(made.input_ids)[: how.document_tokens] for made in encoded]

    def plain(self, prompt: list[int], index: int) -> list[int]:
        text = list(prompt)
        while not self.ended(text, prompt):
            ((document,),) = self.retriever.search([self.query(text)], 1)
            text += self.stride(text, prompt, document, index)
        return text[len(prompt) :]

    def speculative(self, prompt: list[int], index: int) -> list[int]:
        text, pace = list(prompt), Pace()
        cache = set(self.retriever.search([self.query(text)], PREFETCHED)[0])
        while not self.ended(text, prompt):
            tried, guesses, started = list(text), list[tuple[int, str, int]](), time.perf_counter()
            for _ in range(self.how.ahead or pace.ahead()):
                query = self.query(tried)
                (guess,) = self.retriever.best(query, cache, 1)
                guesses.append((len(tried), query, guess))
                tried += self.stride(tried, prompt, guess, index)
                if self.ended(tried, prompt):
                    break
            wrote = time.perf_counter()
            found = self.retriever.search([query for _, query, _ in guesses], PREFETCHED)
            seconds = (wrote - started) / len(guesses), time.perf_counter() - wrote
            wrong = [at for at, (_, _, guess) in enumerate(guesses) if found[at][0] != guess]
            text = tried
            if wrong:
                text = tried[: guesses[wrong[0]][0]]
                text += self.stride(text, prompt, found[wrong[0]][0], index)
            pace.observe(wrong[0] if wrong else len(guesses), bool(wrong), *seconds)
            cache.update(*found)
        return text[len(prompt) :]

    def stride(self, text: list[int], prompt: list[int], document: int, index: int) -> list[int]:
        """The next tokens after `text`, with a document before all of it."""
        left = self.how.max_new_tokens - len(text) + len(prompt)
        params = SamplingParams(self.how.temperature, max_new_tokens=min(self.how.stride, left))
        (made,) = self.decoder.generate([self.documents[document] + text], params, [index])
        return made.tokens

    def query(self, text: list[int]) -> str:
        return str(self.decoder.tokenizer.decode(text[-self.how.query_tokens :]))

    def ended(self, text: list[int], prompt: list[int]) -> bool:
        answer = text[len(prompt) :]
        return len(answer) >= self.how.max_new_tokens or text[-1] in self.decoder.eos_ids


def main(argv: list[str]) -> None:
    how = parse(Retrieving, argv)
    decoder = Decoder.from_pretrained(how.target, device=how.device, dtype=how.dtype, batch_size=1)
    documents = [row.text for row in load_rows(how.documents, "all")]
    answerer = Answerer(decoder, documents, how)
    retriever, rows, answers = answerer.retriever, [], []
    prompts = load_prompts(how.prompts, decoder.tokenizer, limit=how.limit, split=how.split)
    for name, answer in (("plain", answerer.plain), ("speculative", answerer.speculative)):
        retriever.calls, retriever.seconds, started = 0, 0.0, time.perf_counter()
        answers.append([answer(prompt.tokens, prompt.index) for prompt in prompts])
        took = (number(time.perf_counter() - started), number(retriever.seconds))
        rows.append((name, str(retriever.calls), *took))
    same = sum(one == other for one, other in zip(*answers, strict=True))
    title = f"{len(documents):,} documents; {same} of {len(prompts)} answers the same"
    print_table(
        ("retrieval", "calls waited for", "seconds", "of them retrieving"), rows, title=title
    )


if __name__ == "__main__":
    run_command(main, Retrieving)
