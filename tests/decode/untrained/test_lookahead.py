"""Lookahead: a window of guesses beside a tree of what the target said of such guesses before."""

from typing import Any

import pytest
import torch
from looked_up import tau, texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.untrained.jacobi import LookaheadDrafter, joined

CPU = torch.device("cpu")
TREES: list[dict[str, Any]] = [
    {"K": 1},
    {"K": 6},
    {"tree": "eagle-25"},
    {"tree": "dynamic:4,3,17"},
    {"tree": "dynamic:4,3,17", "policy": "depth:0.3"},
]


def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = load_drafter("lookahead:4", tiny_target, tiny_tokenizer)
    assert isinstance(drafter, LookaheadDrafter)
    pair = tiny_target, tiny_tokenizer
    for tree, batch in zip(TREES, (3, 1, 3, 16, 3), strict=True):
        changes_nothing(pair, drafter, [(tree, batch, SETTINGS)])
    drafter.forget()
    changes_nothing(pair, drafter, [(TREES[3], 3, SETTINGS[:1])])


def test_two_trees_under_one_root() -> None:
    """Of rows that differ in their shape, too."""
    bush = Topology.from_parents([-1, 0, 0, 1], CPU)
    guessed = TokenTree(torch.tensor([[1, 7, 8], [2, 9, 3]]), chain(2, CPU), COUPLED)
    wanted = Topology.from_parents([-1, 0, 0, 1, 0, 4], CPU)
    rowwise = Topology(
        *(x.expand(2, *x.shape).clone() for x in (bush.parent, bush.depth, bush.ancestors)), 2
    )
    for topology in (bush, rowwise):
        tree = joined(
            TokenTree(torch.tensor([[1, 3, 4, 5], [2, 4, 5, 6]]), topology, COUPLED), guessed
        )
        assert tree.tokens_BN.tolist() == [[1, 3, 4, 5, 7, 8], [2, 4, 5, 6, 9, 3]]
        for row in range(2):
            assert tree.topology.parent[row].equal(wanted.parent)
            assert tree.topology.depth[row].equal(wanted.depth)
            assert tree.topology.ancestors[row].equal(wanted.ancestors)
        assert tree.topology.levels == 2 and tree.topology.parents is None


@pytest.mark.parametrize("tree", ["dynamic:6,3,17", "kary:2,2,2"])
def test_the_window_is_what_the_target_said_of_the_last_one(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: str
) -> None:
    """Its guesses after a round, beside those that a forward over text and old window finds; and
    the pool knows what the target said after them.
    """
    drafter = load_drafter("lookahead:4", tiny_target, tiny_tokenizer)
    assert isinstance(drafter, LookaheadDrafter)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree)
    session = decoder._open(PROMPTS[:1], SETTINGS[0], None)
    [(request, _, _)] = session.admit()
    for _ in range(12):
        whole = request.completion.prompt_tokens + request.completion.tokens
        old = drafter.window.guess_BK[0, : 4 if "dynamic" in tree else 3].tolist()
        session.hear(session.launch())
        new = len(request.completion.prompt_tokens + request.completion.tokens) - len(whole)
        assert drafter.made == len(old)
        logits_NV = tiny_target(torch.tensor([[*whole, *old]])).logits[0]
        chosen = logits_NV[-len(old) - 1 :, : len(tiny_tokenizer)].argmax(-1).tolist()
        ahead = chosen[new:]
        assert drafter.window.guess_BK[0, : len(ahead)].tolist() == ahead
        context = torch.tensor([[*old[::-1], whole[-1]][:4]])
        found, chance = drafter.store.laws(context)
        assert chance[0, 0] > 0 and chosen[-1] in found[0].tolist()


def test_it_keeps_more_than_its_window_alone(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    how = {"tree": "dynamic:6,3,17", "batch_size": 1}
    taus = {}
    for name in ("lookahead:6", "jacobi:6"):
        drafter = load_drafter(name, tiny_target, tiny_tokenizer)
        trial = how if name != "jacobi:6" else {"K": 6}
        done = Decoder(tiny_target, tiny_tokenizer, drafter, **trial).generate(PROMPTS, SETTINGS[0])
        assert texts(done) == truths(tiny_target, tiny_tokenizer, SETTINGS[0])
        taus[name] = tau(done)
    assert taus["lookahead:6"] > taus["jacobi:6"]


def test_what_it_cannot_do(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="got lookahead:x, expected lookahead:K"):
        load_drafter("lookahead:x", tiny_target, tiny_tokenizer)
    drafter = load_drafter("lookahead:4", tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, rule="recursive", tree="eagle-25")
    with pytest.raises(ValueError, match="draws from no distribution"):
        decoder.generate(PROMPTS, SETTINGS[1])
