"""Two drafters as one: of each row's two drafts one, or both."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_drafts import VOCAB, counting
from head_folders import made, ours
from looked_up import begun, tau, texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import LONGER, PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Admitted, Frontier, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained import composite, suffix
from draftsmith.decode.untrained.composite import CompositeDrafter, either
from draftsmith.decode.untrained.suffix import SuffixDrafter

CPU = torch.device("cpu")


def test_a_composite_gives_plain_answers_and_uses_both(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never sure: the trained one in each round, with a copy beside it where there is room, which
    keeps more; else both are asked in one batch.
    """
    target, head = counting(wrong=0.35)
    trained = EagleDrafter(head, target, VOCAB)
    trees: list[dict[str, Any]] = [{"tree": "chain", "K": 5}, {"tree": "dynamic:6,3,9"}]
    for tree in trees:
        shallow = tree | {"K": 3}
        alone = Decoder(target, tiny_tokenizer, trained, batch_size=3, **shallow)
        for params in LONGER:
            counts = {}
            for sure in (2.0, composite.SURE, 0.0):
                monkeypatch.setattr(composite, "SURE", sure)
                monkeypatch.setattr(composite, "BELIEVED", 1e6)
                looked = SuffixDrafter("suffix", CPU, VOCAB)
                both = CompositeDrafter(looked, trained, 3)
                decoder = Decoder(target, tiny_tokenizer, both, batch_size=3, **tree)
                done = decoder.generate(PROMPTS, params)
                assert texts(done) == truths(target, tiny_tokenizer, params), (tree, sure)
                counts[sure] = tau(done)
            monkeypatch.undo()
            trained_alone = tau(alone.generate(PROMPTS, params))
            room = tree["tree"] == "chain"
            assert counts[2.0] > trained_alone if room else counts[2.0] == trained_alone
    assert len(set(counts.values())) > 1


def test_fused_a_tree_is_grown_from_both_laws(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """No answer changes; with nothing known it drafts as the head alone; a second time it copies
    farther than the head drafts, and more than either alone would.
    """
    target, head = counting(wrong=0.35)
    trained = EagleDrafter(head, target, VOCAB)
    trees: list[dict[str, Any]] = [
        {"tree": "chain", "K": 6}, {"tree": "eagle-25"}, {"tree": "dynamic:6,3,17"},
    ]  # fmt: skip
    for tree in trees:
        for params in SETTINGS:
            both = CompositeDrafter(SuffixDrafter("suffix", CPU, VOCAB), trained, 3, fused=True)
            decoder = Decoder(target, tiny_tokenizer, both, batch_size=3, **tree)
            counts = []
            for _ in range(2):
                done = decoder.generate(PROMPTS, params)
                assert texts(done) == truths(target, tiny_tokenizer, params), tree
                counts.append(tau(done))
            alone = Decoder(target, tiny_tokenizer, trained, batch_size=3, **{**tree, "K": 3})
            assert counts[1] > tau(alone.generate(PROMPTS, params)), tree
    for rule in ("recursive", "multi-draft"):
        decoder = Decoder(target, tiny_tokenizer, both, batch_size=3, tree="eagle-25", rule=rule)
        assert all(
            c.finish_reason in ("length", "stop") for c in decoder.generate(PROMPTS, SETTINGS[1])
        )


def test_the_fused_law_is_the_head_s_where_nothing_is_known() -> None:
    """And where something is, the head has the weight of what was never seen."""
    target, head = counting(wrong=0.35)
    trained = EagleDrafter(head, target, VOCAB)
    both = CompositeDrafter(SuffixDrafter("suffix", CPU, VOCAB), trained, 3, fused=True)
    both.reset(1, 64)
    trained.state_BH.normal_(generator=torch.Generator().manual_seed(0))
    ask = both.looked.looked_up()[0]
    zeros = torch.zeros(1, dtype=torch.int64)
    root = Frontier(0, zeros[None], None, zeros)
    request = Round(
        chain_plan(3), zeros + 7, zeros, zeros.bool(), 8, SamplingParams(), COUPLED
    )  # fmt: skip

    def laws() -> list[torch.Tensor]:
        feeds = both.feed(request), trained.feed(request), ask
        made = [feed(root).logits_BFV[0, 0].softmax(-1) for feed in feeds if feed is not None]
        assert len(made) == 3
        return made

    fused_V, head_V, _ = laws()
    torch.testing.assert_close(fused_V, head_V)
    begun(both.looked, 0, [1, 2, 3, 1, 2])
    ask = both.looked.looked_up()[0]
    fused_V, head_V, looked_V = laws()
    found_V = torch.zeros(VOCAB)
    found_V[3] = 2.0**2  # two tokens match
    torch.testing.assert_close(fused_V, (found_V + suffix.SLACK * head_V) / (4 + suffix.SLACK))
    torch.testing.assert_close(looked_V, (found_V + suffix.SLACK / VOCAB) / (4 + suffix.SLACK))


def test_each_row_keeps_one_of_two_trees() -> None:
    """Padded by children of the root that are there already."""
    first = TokenTree(torch.tensor([[1, 2, 3], [1, 4, 5]]), chain(2, CPU), COUPLED)
    wide = Topology.from_parents([-1, 0, 0, 0, 1], CPU)
    second = TokenTree(torch.tensor([[1, 6, 7, 8, 9], [1, 6, 7, 8, 9]]), wide, COUPLED)
    tree = either(torch.tensor([True, False]), first, second)
    assert tree.tokens_BN.tolist() == [[1, 2, 3, 2, 2], [1, 6, 7, 8, 9]]
    assert tree.topology.parent.tolist() == [[-1, 0, 1, 0, 0], [-1, 0, 0, 0, 1]]
    assert tree.topology.depth.tolist() == [[0, 1, 2, 1, 1], [0, 1, 1, 1, 2]]
    assert tree.topology.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]
    assert tree.topology.ancestors[1].equal(wide.ancestors) and tree.topology.levels == 2


def test_beside_a_tree_stands_what_it_has_not_of_a_copy() -> None:
    """From where they part; of rows that decode as many nodes as the largest has."""
    copies = TokenTree(
        torch.tensor([[1, 2, 3, 4], [1, 7, 9, 5], [1, 8, 3, 4], [1, 6, 8, 2]]),
        chain(3, CPU),
        COUPLED,
    )
    topology = Topology.from_parents([-1, 0, 0, 1, 2], CPU)
    drafted = TokenTree(torch.tensor([[1, 6, 7, 8, 9]]).expand(4, -1), topology, COUPLED)
    sure_B = torch.tensor([True, False, False, False])
    tree = either(sure_B, copies, drafted, 9)
    assert tree.tokens_BN.tolist() == [
        [1, 2, 3, 4, 2, 2, 2, 2],
        [1, 6, 7, 8, 9, 5, 6, 6],  # 7, 9 are there
        [1, 6, 7, 8, 9, 8, 3, 4],
        [1, 6, 7, 8, 9, 2, 6, 6],
    ]
    assert tree.topology.parent[1:].tolist() == [
        [-1, 0, 0, 1, 2, 4, 0, 0],
        [-1, 0, 0, 1, 2, 0, 5, 6],
        [-1, 0, 0, 1, 2, 3, 0, 0],
    ]
    assert tree.topology.depth[1:].tolist() == [
        [0, 1, 1, 2, 2, 3, 1, 1],
        [0, 1, 1, 2, 2, 1, 2, 3],
        [0, 1, 1, 2, 2, 3, 1, 1],
    ]
    for row in range(4):
        parents = tree.topology.parent[row].tolist()
        like = Topology.from_parents(parents, CPU)
        assert tree.topology.ancestors[row].equal(like.ancestors)
    fewer = either(sure_B, copies, drafted, 6)
    assert fewer.tokens_BN.equal(tree.tokens_BN[:, :6])
    cut = either(sure_B, copies, drafted, 9, torch.tensor([True, True, False, False]))
    assert cut.tokens_BN.equal(tree.tokens_BN[:, :6]) and cut.topology.levels == 3
    cut = either(sure_B, copies, drafted, 9, torch.tensor([False, False, True, False]))
    assert cut.tokens_BN.equal(tree.tokens_BN) and cut.topology.levels == 3


def test_a_row_whose_draft_fails_is_sure_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own rounds, against what was to be expected; until another prompt takes it."""
    target, head = counting(wrong=0.35)
    looked = SuffixDrafter("suffix", CPU, VOCAB)
    both = CompositeDrafter(looked, EagleDrafter(head, target, VOCAB), 3)
    both.reset(2, 64)
    both.kept_22X[0, 0, : composite.PLACES] = 0.3 * composite.BELIEVED
    found_BV, ones_B = torch.zeros(2, VOCAB), torch.ones(2, dtype=torch.int64)
    found_BV[:, 5] = 4.0
    request = Round(chain_plan(3), ones_B, ones_B, ones_B > 0, 1, SETTINGS[0], COUPLED)
    # Both draft 8: row 0 emits what was looked up, row 1 what was drafted.
    nodes_BN, said_BL = torch.tensor([[1, 8, 6, 7]] * 2), torch.tensor([[5], [8]])
    told, both.nodes = {"nodes_BN": nodes_BN, "topology": chain(3, CPU)}, 4
    for turn in range(6):
        sure_B = both._ask(found_BV, request)
        assert sure_B.tolist() == [turn > 3, False], turn
        both._tell(Kept(said_BL, ones_B, None, ones_B, **told))
    monkeypatch.setattr(both.trained, "prefill", lambda admitted: None)
    both.prefill(Admitted(ones_B[:1] - 1, ones_B[:1, None], ones_B[:1], ones_B[:1]))
    assert not both._ask(found_BV, request).any()


@pytest.mark.parametrize("fused", [False, True])
def test_a_draft_lm_reads_what_was_copied(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, fused: bool
) -> None:
    """The target drafts for itself, and again when the store knows the answers: its keys and values
    are those of one pass over each row's text, of which the next draft call feeds the last two.
    """
    pair, size = (tiny_target, tiny_tokenizer), len(tiny_tokenizer)
    for tree, batch in (({"K": 6}, 1), ({"K": 6}, 3), ({"tree": "dynamic:6,3,9"}, 3)):
        trained = LMDrafter(tiny_target, size)
        both = CompositeDrafter(SuffixDrafter("suffix", CPU, size), trained, 3, fused=fused)
        decoder = Decoder(*pair, both, batch_size=batch, **tree)
        for params in [replace(params, max_new_tokens=100) for params in SETTINGS[:2] * 2]:
            done = decoder.generate(PROMPTS[:batch], params)
            assert texts(done) == truths(*pair, params)[:batch], (tree, batch)
            for row, one in enumerate(done):
                known_N = torch.tensor([*one.prompt_tokens, *one.tokens][:-2])
                read = tiny_target(known_N[None], use_cache=True).past_key_values
                kept = trained.pool.kv_2LBSHE[:, :, row].unbind(1)
                for layer, held in zip(read.layers, kept, strict=True):
                    for side, own in zip(held, (layer.keys, layer.values), strict=True):
                        torch.testing.assert_close(side[: len(known_N)], own[0].transpose(0, 1))
        assert any(one.counters.drafted for one in done)


def test_a_new_version_goes_on_with_the_state_and_drafts_by_its_own_weights() -> None:
    target, head = counting(wrong=0.35)
    old, new = (
        CompositeDrafter(
            SuffixDrafter("suffix", CPU, VOCAB), EagleDrafter(copy.deepcopy(head), target, VOCAB), 3
        )
        for _ in range(2)
    )
    own = new.trained
    new.succeed(old)  # before anything was decoded, too
    old.reset(2, 64)
    begun(old.looked, 0, [1, 2, 3, 1, 2])
    new.succeed(old)
    assert new.trained is own and isinstance(own, EagleDrafter)
    assert isinstance(old.trained, EagleDrafter) and own.head is not old.trained.head
    assert own.state_BH is old.trained.state_BH and new.kept_22X is old.kept_22X
    assert new.looked.store is old.looked.store and new.looked.text_BS is old.looked.text_BS
    assert new.owed is old.owed
    new.release()
    assert not hasattr(new, "owed")


def test_two_pluses_fuse_and_those_of_a_path_do_not(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pair = tiny_target, tiny_tokenizer
    folder = ours(tmp_path / "c++/drafter", made("eagle3", tiny_target), *pair)
    for name, fused in ((f"suffix+{folder}", False), (f"suffix++{folder}", True)):
        drafter = load_drafter(name, *pair)
        assert isinstance(drafter, CompositeDrafter) and drafter.fused == fused


@pytest.mark.parametrize("tree", ["chain", "dynamic:3,3,9"])
def test_a_round_with_nothing_beside_is_the_trained_ones(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that has no room for more: a draft LM need not read what it has drafted, and a tree's
    nodes keep their order.
    """
    monkeypatch.setattr(composite, "BELIEVED", 1e6)
    monkeypatch.setattr(composite, "SURE", 2.0)
    pair, size = (tiny_target, tiny_tokenizer), len(tiny_tokenizer)
    trained, trees = LMDrafter(tiny_draft, size), list[TokenTree]()
    both = CompositeDrafter(SuffixDrafter("suffix", CPU, size), trained, 3)
    decoder, propose = Decoder(*pair, both, tree=tree, K=None if "," in tree else 3), both.propose
    monkeypatch.setattr(trained, "catch_up", lambda kept: pytest.fail("it has drafted all"))
    monkeypatch.setattr(
        both, "propose", lambda request: trees.append(propose(request)) or trees[-1]
    )
    done = decoder.generate(PROMPTS, LONGER[1])
    assert texts(done) == truths(*pair, LONGER[1])
    assert all((one.rank_BN is not None) == ("," in tree) for one in trees)
