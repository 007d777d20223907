"""Drafts over a part of the target's keys and values: what the view holds, and no answer changes.

Shapes as in decode/untrained/partial_kv.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import made
from saved_heads import keeps_its_size
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from truths import SETTINGS, changes_nothing

from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Admitted, Frontier, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.kv import KVPool, ring
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED, TokenTree
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.partial_kv import SINKS, WATCHED, PartialKVDrafter

TEXTS = [
    [(7 * i * i + 3 * row) % 300 + 2 for i in range(n)] for row, n in enumerate((70, 5, 41, 90))
]
WAYS = [replace(params, max_new_tokens=30) for params in SETTINGS]
TREES: list[dict[str, Any]] = [
    {"K": 3},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:3,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]
NAMES = ["streaming:8", "snapkv:40"]


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    own = load_drafter(name, tiny_target, tiny_tokenizer)
    assert own is not None and not has_folder(name)
    trials = [(tree, batch, WAYS) for tree, batch in zip(TREES, (3, 1, 16, 3), strict=True)]
    changes_nothing((tiny_target, tiny_tokenizer), own, trials, TEXTS)


class Followed(PartialKVDrafter):
    """Keeps, slot by slot, the positions that its view should hold, by lists; and checks them, and
    that nothing below a row's length changes in the target's pool.
    """

    spoilt = False
    rounds = 0

    def prefill(self, admitted: Admitted) -> None:
        before = self.pool.kv_2LBSHE.clone()
        super().prefill(admitted)
        assert torch.equal(self.pool.kv_2LBSHE, before)
        if not hasattr(self, "lists"):
            self.lists: dict[int, list[list[list[int]]]] = {}
            self.ages: dict[int, list[int]] = {}
        for row, tokens_N, length in zip(
            admitted.rows_R.tolist(), admitted.tokens_RN, admitted.lens_R.tolist(), strict=True
        ):
            chosen_LCK = self._chosen(row, tokens_N[:length])[:, :length]
            self.lists[row] = chosen_LCK.permute(0, 2, 1).tolist()
            self.ages[row] = list(range(chosen_LCK.shape[1]))

    def propose(self, request: Round) -> TokenTree:
        before = self.pool.kv_2LBSHE.clone()
        tree = super().propose(request)
        for row, length in enumerate(request.lens_B.tolist()):
            now = self.pool.kv_2LBSHE[:, :, row, :length]
            assert torch.equal(now, before[:, :, row, :length])
        return tree

    def extend(self, kept: Kept) -> None:
        if not self.spoilt:
            super().extend(kept)
        for row, (length, new) in enumerate(
            zip(kept.lens_B.tolist(), kept.n_new_B.tolist(), strict=True)
        ):
            ages = self.ages.get(row, [])
            for position in range(length, length + new):
                slot = len(ages)
                if slot < self.budget:
                    ages.append(position)
                    for heads in self.lists[row]:
                        for held in heads:
                            held.append(position)
                else:  # the oldest, but for the first ones
                    slot = min(range(SINKS, self.budget), key=ages.__getitem__)
                    ages[slot] = position + 1000
                    for heads in self.lists[row]:
                        for held in heads:
                            held[slot] = position
            if new:
                self._check(row)

    def _check(self, row: int) -> None:
        self.rounds += 1
        at_LCK = torch.tensor(self.lists[row]).permute(0, 2, 1)
        for layer, at_CK in enumerate(at_LCK):
            for head, at_C in enumerate(at_CK.T):
                want = self.pool.kv_2LBSHE[:, layer, row, at_C, head]
                got = self.view.kv_2LBSHE[:, layer, row, : len(at_C), head]
                assert torch.equal(got, want), (row, layer, head)


@pytest.mark.parametrize(("kind", "budget"), [("streaming", 8), ("snapkv", 40), ("streaming", 64)])
@pytest.mark.parametrize("tree", TREES[:3:2], ids=["chain", "dynamic"])
def test_the_view_holds_the_target_s_own_entries(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    budget: int,
    tree: dict[str, Any],
) -> None:
    own = Followed(kind, tiny_target, len(tiny_tokenizer), budget)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=3, **tree)
    decoder.generate(TEXTS, replace(WAYS[1], ignore_eos=True))
    assert own.rounds > 20


def test_a_view_that_is_left_as_drafted_is_told(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = Followed("streaming", tiny_target, len(tiny_tokenizer), 8)
    own.spoilt = True
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3)
    with pytest.raises(AssertionError):
        decoder.generate(TEXTS[:1], WAYS[0])


@pytest.mark.parametrize("name", ["streaming:128", "snapkv:128"])
@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
def test_a_view_of_everything_drafts_what_the_target_says(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    params: SamplingParams,
) -> None:
    own = load_drafter(name, tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3, batch_size=4)
    for done in decoder.generate(TEXTS, replace(params, max_new_tokens=17, ignore_eos=True)):
        assert done.counters.histogram == [0, 0, 0, 4]


def prefilled(own: PartialKVDrafter, tokens: list[int]) -> tuple[Tensor, Tensor]:
    pool = own.whole.pool(1, len(tokens) + 8)
    ids_1N, lens_1 = torch.tensor([tokens]), torch.tensor([len(tokens)])
    rows_1, pending_1 = torch.zeros(1, dtype=torch.int64), torch.tensor([11])
    own.whole.prefill(pool, rows_1, ids_1N, lens_1)
    own.share(pool)
    own.prefill(Admitted(rows_1, ids_1N, lens_1, pending_1))
    return lens_1, pending_1


@pytest.mark.parametrize("shifted", [False, True])
def test_a_draft_call_is_a_masked_pass_at_true_positions(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, shifted: bool
) -> None:
    """By transformers, over a cache of which all but the view is masked; the twin that takes slots
    for positions is told.
    """
    vocab, tokens = len(tiny_tokenizer), TEXTS[0]
    own = PartialKVDrafter("streaming", tiny_target, vocab, 16)
    lens_1, pending_1 = prefilled(own, tokens)
    plan, on_1 = chain_plan(1), torch.tensor([True])
    request = Round(plan, lens_1, pending_1, on_1, len(tokens), SamplingParams(), COUPLED)
    got = own.feed(request)(Frontier(0, pending_1[:, None], None, torch.zeros(1).long()))
    cache = DynamicCache(config=tiny_target.config)
    with torch.no_grad():
        tiny_target(torch.tensor([tokens]), past_key_values=cache)
        sees = torch.zeros(1, 1, 1, len(tokens) + 1, dtype=torch.bool)
        sees[..., :SINKS] = sees[..., -13:] = True
        at = 16 if shifted else len(tokens)
        want = tiny_target(
            pending_1[:, None],
            past_key_values=cache,
            attention_mask=sees,
            position_ids=torch.tensor([[at]]),
        ).logits[..., :vocab]
    assert torch.allclose(got.logits_BFV, want, atol=1e-4) is not shifted


def test_snapkv_chooses_what_the_last_queries_weigh_most(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = PartialKVDrafter("snapkv", tiny_target, len(tiny_tokenizer), 44)
    tokens = TEXTS[3]
    prefilled(own, tokens)
    tiny_target.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = tiny_target(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        tiny_target.set_attn_implementation("sdpa")
    chosen_LCK = own._chosen(0, torch.tensor(tokens))
    n, agreed = len(tokens), 0
    for layer, of_1HNS in enumerate(weights):
        for head in range(2):
            sums = of_1HNS[0, 2 * head : 2 * head + 2, -WATCHED:, : n - WATCHED].sum((0, 1))
            padded = F.pad(sums, (2, 2))
            mean = torch.stack([padded[i : i + 5].mean() for i in range(len(sums))])
            best = set(mean.topk(44 - WATCHED).indices.tolist())
            got = chosen_LCK[layer, :, head].tolist()
            assert got == sorted(got) and got[-WATCHED:] == list(range(n - WATCHED, n))
            assert set(got[:-WATCHED]) == best
            agreed += got != list(range(4)) + list(range(n - 40, n))
    assert agreed == 6, "else the choice is streaming's"


def test_the_view_s_memory_is_planned_and_does_not_grow(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = PartialKVDrafter("streaming", tiny_target, len(tiny_tokenizer), 64)
    keeps_its_size((tiny_target, tiny_tokenizer), own, "view", TEXTS[:2], WAYS[0])


def test_teacher_forced_law_of_a_whole_view_is_the_target_s(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    ids_BT = torch.tensor([TEXTS[0][:40], TEXTS[3][:40]])
    vocab = len(tiny_tokenizer)
    whole = PartialKVDrafter("snapkv", tiny_target, vocab, 64).teacher_logits(ids_BT)
    part = PartialKVDrafter("streaming", tiny_target, vocab, 10).teacher_logits(ids_BT)
    with torch.no_grad():
        want = tiny_target(ids_BT).logits[..., :vocab]
    torch.testing.assert_close(whole, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(part[:, :7], want[:, :7], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(part[:, 20:], want[:, 20:], atol=1e-2)


def test_other_families(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """transformers' own body, and one with windows, which is refused."""
    model = made("phi")
    own = PartialKVDrafter("snapkv", model, 320, 44)
    prefilled(own, TEXTS[3])
    assert own._chosen(0, torch.tensor(TEXTS[3])).shape == (3, 44, 2)
    with pytest.raises(ValueError, match="expected full attention in every layer"):
        PartialKVDrafter("streaming", made("mistral"), 320, 16)


def test_ring() -> None:
    slots = ring(torch.arange(12), 6, 2).tolist()
    assert slots == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3]
    assert ring(torch.arange(5), 3).tolist() == [0, 1, 2, 0, 1]


def test_what_is_taken_and_moved_between_pools(tiny_target: PreTrainedModel) -> None:
    runner = Runner(tiny_target, 320)
    pools: list[KVPool] = [runner.pool(3, 64) for _ in range(2)]
    torch.manual_seed(0)
    for pool in pools:
        pool.kv_2LBSHE.normal_()
    before = pools[1].kv_2LBSHE.clone()
    slots_LRCK = torch.randint(64, (3, 2, 5, 2))
    pools[1].take(pools[0], torch.tensor([2, 0]), slots_LRCK)
    for layer in range(3):
        for i, row in enumerate((2, 0)):
            for c in range(5):
                for head in range(2):
                    want = pools[0].kv_2LBSHE[:, layer, row, slots_LRCK[layer, i, c, head], head]
                    assert torch.equal(pools[1].kv_2LBSHE[:, layer, row, c, head], want)
    assert torch.equal(pools[1].kv_2LBSHE[:, :, :, 5:], before[:, :, :, 5:])
    assert torch.equal(pools[1].kv_2LBSHE[:, :, 1], before[:, :, 1])
    at_BP = torch.tensor([[3], [4], [5]])
    pools[0].commit(at_BP, at_BP + 7, pools[1])
    assert torch.equal(pools[1].kv_2LBSHE[:, :, 1, 11], pools[0].kv_2LBSHE[:, :, 1, 4])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("streaming:7", "expected streaming:BUDGET with 8 slots to 512"),
        ("streaming:513", "expected streaming:BUDGET with 8 slots to 512"),
        ("snapkv:39", "expected snapkv:BUDGET with 40 slots to 512"),
        ("snapkv:x", "expected snapkv:BUDGET"),
    ],
)
def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        load_drafter(name, tiny_target, tiny_tokenizer)


def test_trees_that_are_too_deep_or_too_wide(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = load_drafter("streaming:16", tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="drafts 11 tokens ahead; give K=11 or less"):
        Decoder(tiny_target, tiny_tokenizer, own, K=12)
    with pytest.raises(ValueError, match=r"takes 161 slots, .* room for 128; give a smaller tree"):
        Decoder(tiny_target, tiny_tokenizer, own, tree="dynamic:8,20,60")
