"""A draft that reads a part of a prompt: what it reads, its own positions, and no answer changes.

Shapes as in decode/draft_lms/lm.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_decoding import plain_decode
from saved_drafts import save_draft
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import SETTINGS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafting.retrieval import CHUNK, LEAST, retrieved
from draftsmith.decode.engine.decoder import Decoder

TEXTS = [
    [(7 * i * i + 3 * row + i // 9) % 300 + 2 for i in range(n)]
    for row, n in enumerate((300, 5, 141, 402))
]
WAYS = [replace(params, max_new_tokens=24) for params in SETTINGS]
TREES: list[dict[str, Any]] = [
    {"K": 3},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:3,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]


@pytest.fixture(scope="module")
def folder(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("lm") / "drafter"
    return save_draft(path, tiny_draft, tiny_target, tiny_tokenizer)


def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once. RAPID's law at
    eta = 0 is the target's; at 20 it isn't.
    """
    drafters = [
        load_drafter(name, tiny_target, tiny_tokenizer)
        for name in ("rapid:128", f"rapid:160+{folder}")
    ]
    assert not has_folder("rapid:128")
    changed = 0
    for params in WAYS:
        stops = () if params.ignore_eos else (0,)
        how: dict[str, Any] = {"vocab_size": len(tiny_tokenizer), "stop_ids": stops}
        expected = [
            plain_decode(tiny_target, t, params, index=i, **how) for i, t in enumerate(TEXTS)
        ]
        for own in drafters:
            for tree, batch in zip(TREES, (3, 1, 16, 3), strict=True):
                decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=batch, **tree)
                assert [c.tokens for c in decoder.generate(TEXTS, params)] == expected, tree
            for eta in (0, 20):
                lossy: dict[str, Any] = {"lossy": f"rapid:{eta}", "allow_lossy": True}
                decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=3, K=3, **lossy)
                found = [c.tokens for c in decoder.generate(TEXTS, params)]
                assert eta or found == expected
                changed += found != expected
    assert changed > 3


class Followed(LMDrafter):
    """Compares what is drafted after a row's pending token with a fresh pass over what the row's
    draft has read, at positions of its own.
    """

    rounds = widest = 0
    texts: dict[int, list[int]]

    def prefill(self, admitted: Any) -> None:
        super().prefill(admitted)
        for i, row in enumerate(admitted.rows_R.tolist()):
            prompt_N = admitted.tokens_RN[i, : admitted.lens_R[i]]
            pending = int(admitted.pending_R[i])
            self.texts[row] = [*retrieved(prompt_N, self.reads).tolist(), pending]

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        for row, new in enumerate(kept.n_new_B.tolist()):
            self.texts[row] += kept.tokens_BL[row, :new].tolist()

    def feed(self, request: Round) -> Feed:
        ask = super().feed(request)

        def feed(frontier: Frontier) -> Fed:
            fed = ask(frontier)
            if frontier.depth == 0:
                for row in request.active_B.nonzero()[:, 0].tolist():
                    self.check(row, fed.logits_BFV[row, 0])
            return fed

        return feed

    def check(self, row: int, logits_V: Tensor) -> None:
        want = self.runner.model(torch.tensor([self.texts[row]])).logits[0, -1]
        self.rounds += 1
        assert torch.allclose(logits_V, want[: len(logits_V)], atol=1e-3), (row, self.rounds)

    def _fed(self, request: Round, frontier: Frontier, width: int) -> Fed:
        self.widest = max(self.widest, width)
        return super()._fed(request, frontier, width)


@pytest.mark.parametrize("tree", TREES[:3], ids=["chain", "static", "dynamic"])
def test_its_keys_are_of_what_it_read_and_of_the_answer_so_far(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any]
) -> None:
    vocab = len(tiny_tokenizer)
    own = Followed.over("128", Followed(tiny_target, vocab), tiny_target, vocab)
    assert isinstance(own, Followed)
    own.texts = {}
    decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=3, **tree)
    decoder.generate(TEXTS, replace(WAYS[1], ignore_eos=True))
    assert own.rounds > 20


def test_slots_of_the_target_s_are_told(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The twin reads on in the target's slots, at its positions, behind what it read at its own."""
    vocab = len(tiny_tokenizer)
    own = Followed.over("128", Followed(tiny_target, vocab), tiny_target, vocab)
    assert isinstance(own, Followed)
    own.texts = {}
    own._own = lambda lens_B: lens_B[:, None]  # type: ignore[method-assign]
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3)
    with pytest.raises(AssertionError):
        decoder.generate(TEXTS[:1], WAYS[0])


def test_a_draft_call_does_not_see_more_where_the_prompt_is_longer(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    vocab = len(tiny_tokenizer)
    widths = {}
    for length in (120, 450):
        own = Followed.over("128", Followed(tiny_target, vocab), tiny_target, vocab)
        assert isinstance(own, Followed)
        own.texts = {}
        text = [[(5 * i * i) % 300 + 2 for i in range(length)]] * 2
        Decoder(tiny_target, tiny_tokenizer, own, K=3, batch_size=2).generate(text, WAYS[0])
        widths[length] = own.widest
    assert widths[450] <= widths[120] + 256 < 450


@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
def test_one_that_reads_all_is_an_ordinary_draft(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    params: Any,
) -> None:
    vocab, found = len(tiny_tokenizer), []
    for reads in (0, 512):
        own = LMDrafter(tiny_draft, vocab)
        if reads:
            own = LMDrafter.over(str(reads), own, tiny_target, vocab)
        decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3, batch_size=3)
        found.append([c.counters.histogram for c in decoder.generate(TEXTS, params)])
    assert found[0] == found[1]


def test_what_is_read_of_a_prompt() -> None:
    """The beginning, the end, and the chunk that holds what the end asks for; by a plain loop."""
    torch.manual_seed(0)
    prompt = torch.randint(100, 5000, (3000,))
    prompt[1600:1610] = torch.arange(10, 20)
    prompt[-12:-2] = torch.arange(10, 20)
    read = retrieved(prompt, LEAST)
    assert len(read) <= LEAST and torch.equal(read[-64:], prompt[-64:])
    assert torch.equal(read[:CHUNK], prompt[:CHUNK])
    read = retrieved(prompt, 192).tolist()
    assert len(read) <= 192
    at = read.index(10)
    first = 1600 // CHUNK * CHUNK
    assert read[at - (1600 - first) :][:CHUNK] == prompt[first : first + CHUNK].tolist()
    latest = 96 + (3000 - 96) % CHUNK
    end, chunks = set(prompt[-latest:].tolist()), prompt[:-latest].view(-1, CHUNK).tolist()
    holders = {token: sum(token in chunk for chunk in chunks) for token in end}
    scores = [
        sum(
            float(torch.tensor(1 + len(chunks) / holders[token]).log())
            for token in end & set(chunk)
        )
        for chunk in chunks
    ]
    scores[0] = 1e9
    best = sorted(sorted(range(len(chunks)), key=lambda c: -scores[c])[: (192 - latest) // CHUNK])
    assert read[:-latest] == [token for c in best for token in chunks[c]]
    assert torch.equal(retrieved(prompt[:100], 128), prompt[:100])


def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    for name, says in (
        ("rapid:127", "expected rapid:BUDGET or rapid:BUDGET\\+FOLDER, with at least 128 tokens"),
        (f"rapid:x+{folder}", "expected rapid:BUDGET or"),
        ("rapid:128+ngram", "got rapid:128 with a drafter of kind ngram"),
        (f"rapid:128+{folder}-none", "-none"),
    ):
        with pytest.raises(ValueError, match=says):
            load_drafter(name, tiny_target, tiny_tokenizer)
