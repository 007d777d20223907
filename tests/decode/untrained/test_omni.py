"""Runs of a draft's tokens that spell one of the target's: the cache, the chain, and no answer
changes.

Shapes as in decode/untrained/foreign.py and models/ngram_cache.py.
"""

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tokens import VERSES, Watched, heart, letters, marked, permuted
from looked_up import tau, texts
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import has_folder, load_drafter, moved
from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.untrained.foreign import ForeignDrafter, OmniDrafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.ngram_cache import LONGEST, NgramCache
from draftsmith.models.vocab_map import Spelling


def drafter_of(draft: str, kind: Any = OmniDrafter) -> Any:
    tokenizer, model = heart(draft)
    return kind(model, tokenizer, heart("target")[0])


class WatchedOmni(Watched, OmniDrafter):
    """Its first calls are fresh passes over the text."""


class Slow(OmniDrafter):
    """Compares each chain with one that is drafted row by row from dictionaries. short: how often a
    guess was corrected to what was said so far; merged: tokens proposed that take several calls.
    """

    short = merged = 0

    def feed(self, request: Round) -> Feed:
        ask, self.said = super().feed(request), list[Tensor]()

        def feed(frontier: Frontier) -> Fed:
            fed = ask(frontier)
            self.said.append(fed.logits_BFV[:, 0].double().log_softmax(-1))
            return fed

        return feed

    def propose(self, request: Round) -> TokenTree:
        tree = super().propose(request)
        for row in request.active_B.nonzero()[:, 0].tolist():
            self._led(row, tree.tokens_BN[row, 1:].tolist(), request)
        return tree

    def _led(self, row: int, proposed: list[int], request: Round) -> None:
        grams, counts_V = self.store.grams, self.store.counts_V
        seen = {t: int(counts_V[t]) for t, g in grams.items() if 0 < len(g) <= LONGEST}
        fed: tuple[int, ...] = ()
        level, guess = 0, -1
        for log_q_BD in self.said:
            law = self._weights(seen, fed, log_q_BD[row])
            best = self._winner(law, row, level, request)
            if fed and tuple(grams[best]) == fed:
                self.short += guess != best
                assert proposed[level] == best
                level, fed = level + 1, ()
                if level == request.plan.levels:
                    break
                law = self._weights(seen, fed, log_q_BD[row])
                best = self._winner(law, row, level, request)
            guess, fed = best, (*fed, grams[best][len(fed)])
        assert level == len(proposed) or proposed[level] == guess
        self.merged += sum(len(grams[token]) > 1 for token in proposed[: level + 1])

    def _weights(self, seen: dict[int, int], fed: tuple[int, ...], q: Tensor) -> dict[int, float]:
        grams = {token: tuple(self.store.grams[token]) for token in seen}
        begun, many = [t for t, gram in grams.items() if gram[: len(fed)] == fed], len(fed) + 1
        alike = Counter[tuple[int, ...]]()
        for token in begun:
            alike[grams[token][:many]] += seen[token]
        longer = {
            token: float(q[grams[token][many - 1]].exp()) * seen[token] / alike[grams[token][:many]]
            for token in begun
            if len(grams[token]) >= many
        }
        rest = max(1 - sum(longer.values()), 1e-6)
        return longer | {t: rest for t in begun if fed and grams[t] == fed}

    def _winner(self, law: dict[int, float], row: int, level: int, request: Round) -> int:
        race = request.race_BDV
        noise = {t: 0.0 if race is None else float(race[row, level, t]) for t in law}
        return max((math.log(p) - noise[t], t) for t, p in law.items() if p > 0)[1]


class Uncounted(Slow):
    """Takes all that begin alike for equally frequent."""

    def propose(self, request: Round) -> TokenTree:
        counts_V = self.store.counts_V
        self.store.counts_V = counts_V.clamp(max=1)
        tree = OmniDrafter.propose(self, request)
        self.store.counts_V = counts_V
        for row in request.active_B.nonzero()[:, 0].tolist():
            self._led(row, tree.tokens_BN[row, 1:].tolist(), request)
        return tree


def test_a_chain_is_the_best_of_the_law_that_the_page_says() -> None:
    tokenizer, target = heart("target")
    ways = [SamplingParams(t, max_new_tokens=16, seed=3, ignore_eos=True) for t in (0.0, 1.0)]
    for draft in ("bytes", "other"):
        slow = drafter_of(draft, Slow)
        decoder = Decoder(target, tokenizer, slow, K=8, batch_size=3)
        for params in ways:
            decoder.generate(VERSES, params)
        assert draft == "other" or (slow.merged > 3 and slow.short)
    twin = drafter_of("bytes", Uncounted)
    with pytest.raises(AssertionError):
        for params in ways:
            Decoder(target, tokenizer, twin, K=8, batch_size=3).generate(VERSES, params)


@pytest.mark.parametrize(
    "draft", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("bytes", "other")), "small"]
)
def test_no_answer_changes(draft: str) -> None:
    """Rows come and go, end inside a draft, and outgrow what a draft with 48 positions can read;
    what was learned stays for the next ones.
    """
    tokenizer, target = heart("target")
    watched = drafter_of(draft.replace("small", "bytes"), WatchedOmni)
    if draft == "small":
        watched.runner.context = 48
    trials = [({"K": K}, rows, SETTINGS) for K, rows in ((4, 3), (1, 1), (7, 16))]
    changes_nothing((target, tokenizer), watched, trials, VERSES)
    assert watched.seen > 40 and (watched.halved > 3 or draft != "small")


def test_what_the_draft_lacks_is_drafted() -> None:
    """Of letters alone `tli` gets no farther than the first word."""
    tokenizer, target = heart("target")
    taus = {}
    for kind in (ForeignDrafter, OmniDrafter):
        decoder = Decoder(target, tokenizer, drafter_of("bytes", kind), K=8, batch_size=3)
        for params in SETTINGS[:2]:
            decoder.generate(VERSES, params)
            taus[kind, params.temperature] = tau(decoder.generate(VERSES, params))
    for temperature in (0.0, 1.0):
        assert taus[OmniDrafter, temperature] > 1.1 * taus[ForeignDrafter, temperature], taus


@pytest.mark.parametrize("params", SETTINGS[:2], ids=["greedy", "t1"])
def test_the_same_vocabulary_is_an_ordinary_draft(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> None:
    """Token for token and round for round, by the same ids and by others."""
    near = copy.deepcopy(tiny_target)
    torch.manual_seed(0)
    for parameter in near.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    own, by_other_ids = permuted(tiny_tokenizer, near)
    found = []
    for one in (
        LMDrafter(near, len(tiny_tokenizer)),
        OmniDrafter(near, tiny_tokenizer, tiny_tokenizer),
        OmniDrafter(by_other_ids, own, tiny_tokenizer),
    ):
        done = Decoder(tiny_target, tiny_tokenizer, one, batch_size=3, K=4).generate(
            PROMPTS, params
        )
        found.append([(c.tokens, c.counters.rounds) for c in done])
    assert found[0] == found[1] == found[2]


# ---- what is learned -------------------------------------------------------------------------


def test_a_cache_spells_what_it_saw_as_it_saw_it() -> None:
    target, own = Spelling(heart("target")[0]), Spelling(heart("bytes")[0])
    cache = NgramCache(own, target, len(heart("target")[0]))
    assert set(cache.grams) == set(cache.mapped) and int(cache.length_V.sum()) == len(cache.mapped)
    ids = heart("target")[0](VERSES[3]).input_ids
    grams, before = cache.spelled(ids)
    assert before == VERSES[3].encode()[-16:]
    for token, gram in zip(ids, grams, strict=True):
        assert b"".join(own.bytes_of[i] for i in gram) == target.bytes_of[token]
        assert cache.grams[token] == gram
    cache.count(torch.tensor([*ids, *ids]))
    begun = [tuple(cache.grams[t])[:1] for t in ids]
    for token in set(ids):
        assert cache.counts_V[token] == 2 * ids.count(token) + (token in cache.mapped)
        alike = {t for t, gram in cache.grams.items() if gram[:1] == cache.grams[token][:1]}
        number = cache.begins_NV[0, token]
        assert cache.total_G[number] == sum(int(cache.counts_V[t]) for t in alike)
    assert begun
    long = max(target.bytes_of, key=lambda t: len(target.bytes_of[t]) * (t not in cache.mapped))
    if len(target.bytes_of[long]) > LONGEST:
        cache.spelled([long])
        assert cache.length_V[long] == 0, "it is read, and not drafted"
    again = NgramCache(own, target, cache.size)
    again.restore(cache.stored())
    assert again.grams == cache.grams and again.counts_V.equal(cache.counts_V)
    assert again.total_G.sum() == cache.total_G.sum()
    cache.forget()
    assert set(cache.grams) == set(cache.mapped) and cache.counts_V.sum() == len(cache.mapped)


def test_what_says_a_space_more_is_no_n_gram() -> None:
    """Of a tokenizer that puts a space before every text, where no token begins with the word."""
    target, own = Spelling(letters("thesat", "t", "at")), Spelling(marked())
    cache = NgramCache(own, target, 3)
    grams, _ = cache.spelled([0, 2])
    assert 0 not in cache.grams and grams[0], "it is in the context all the same"
    assert cache.grams[2] == grams[1] == [own.ids[b"at"]]


def test_rows_of_a_session_come_and_go_and_a_later_version_goes_on() -> None:
    """With what was learned and with the rows on their way."""
    tokenizer, target = heart("target")
    plain, first = Decoder(target, tokenizer), drafter_of("bytes")
    decoder = Decoder(target, tokenizer, first, K=4)
    session = decoder.open_session(8, 200)
    how: dict[str, Any] = {"tokenizer": tokenizer, "context": 200, "end_ids": decoder.eos_ids}
    asked = [open_request(VERSES[i % 4], i, i, params=SETTINGS[i % 3], **how) for i in range(7)]
    later = drafter_of("bytes")
    for i, request in enumerate(asked):
        session.submit(request)
        session.step()
        if i == 3:
            session.swap_drafter(later)
    while session.busy:
        session.step()
    session.close()
    assert later.store is first.store and len(first.store.grams) > len(first.store.mapped)
    for i, request in enumerate(asked):
        alone = plain.generate([VERSES[i % 4]], SETTINGS[i % 3], [i])
        assert texts(alone) == [request.completion.tokens]


def test_by_name_and_from_a_file(tmp_path: Path) -> None:
    """A cache is kept like any store; of other tokenizers, or cut, it is refused."""
    tokenizer, target = heart("target")
    own, model = heart("other")
    for name, tokens in (("lm", own), ("bytes", heart("bytes")[0])):
        (model if name == "lm" else heart("bytes")[1]).save_pretrained(tmp_path / name)
        tokens.save_pretrained(tmp_path / name)
    file, mark = tmp_path / "cache.safetensors", fingerprint(None, tokenizer)["tokenizer"]
    name = f"omni+{tmp_path}/lm"
    assert not has_folder(name) and moved(name, None) == name
    assert moved(f"omni:{file}+{tmp_path}/lm", Path("v")) == "omni+v" and moved("x", None) == "x"
    with pytest.warns(UserWarning, match="no draftsmith.json"):
        first = load_drafter(name, target, tokenizer)
        assert isinstance(first, OmniDrafter)
        Decoder(target, tokenizer, first, K=4).generate(VERSES, SETTINGS[1])
        first.save(file, mark)
        again = load_drafter(f"omni:{file}+{tmp_path}/lm", target, tokenizer)
        assert isinstance(again, OmniDrafter) and again.store.grams == first.store.grams
        file.with_name("cut").write_bytes(file.read_bytes()[:100])
        for said, folder in ((file, "bytes"), (file.with_name("cut"), "lm")):
            with pytest.raises(ValueError, match=r"cut or foreign.*omni\+FOLDER"):
                load_drafter(f"omni:{said}+{tmp_path}/{folder}", target, tokenizer)
        with pytest.raises(ValueError, match="missing"):
            load_drafter(f"omni:{tmp_path}/none+{tmp_path}/lm", target, tokenizer)
    again.forget()
    assert again.store.grams.keys() == again.store.mapped.keys()
    with pytest.raises(ValueError, match="no folder"):
        load_drafter("omni+nowhere", target, tokenizer)
    with pytest.raises(ValueError, match="drafts chains only"):
        Decoder(target, tokenizer, again, tree="eagle-25")
    with pytest.raises(ValueError, match=r"kind omni, which draws from no distribution.*coupled"):
        Decoder(target, tokenizer, again, rule="leviathan").generate(VERSES, SETTINGS[1])
