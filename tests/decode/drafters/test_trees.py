"""Trees of every kind: their shapes, what is drafted into them, and that no answer changes."""

import json
from pathlib import Path

import pytest
import torch
from covering import covering
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import Topology
from draftsmith.decode.tree_shapes import (
    DynamicTree,
    StaticTree,
    chain_plan,
    parse_tree,
    static_levels,
)
from draftsmith.decode.untrained.ngram import NgramDrafter

CPU = torch.device("cpu")
TREES = ["chain", "eagle-25", "medusa-63", "dynamic:4,3,12", "dynamic:3,4,37"]


@pytest.mark.parametrize(
    ("tree", "params", "model", "batch"),
    covering(TREES, SETTINGS, ["tiny_draft", "tiny_target"], [1, 3]),
)
def test_trees_give_the_plain_answer(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    request: pytest.FixtureRequest,
    tree: str,
    params: SamplingParams,
    model: str,
    batch: int,
) -> None:
    drafter = LMDrafter(request.getfixturevalue(model), len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, batch_size=batch)
    got = [c.tokens for c in decoder.generate(PROMPTS, params)]
    assert got == truths(tiny_target, tiny_tokenizer, params)


@pytest.mark.parametrize("params", SETTINGS[:2], ids=["greedy", "t1"])
@pytest.mark.parametrize("tree", ["eagle-25", "medusa-63"])
def test_a_draft_that_is_the_target_fills_the_best_path(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: str, params: object
) -> None:
    """Every round keeps the whole path of best children: its noise, KV and positions are right."""
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree)
    for done in decoder.generate(PROMPTS, params):
        histogram = done.counters.histogram
        assert sum(histogram[:-1]) <= 1, histogram  # the last round may be cut
        assert done.counters.nodes == (25 if tree == "eagle-25" else 63) * done.counters.rounds


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:4,3,12"])
@torch.inference_mode()
def test_the_drafts_kv_after_each_round_equals_a_fresh_prefill(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, batch_size=4)
    session = decoder._open(PROMPTS, SETTINGS[1], None)
    batch = session.batch
    session.admit()
    for _ in range(6):
        session.hear(session.launch())
        for row, request in enumerate(batch.rows.requests):
            if request is None:
                continue
            text = request.completion.prompt_tokens + request.completion.tokens
            # The last two tokens are fed at the beginning of the next round.
            length = len(text) - 2
            fresh = drafter.runner.pool(1, length)
            drafter.runner.prefill(
                fresh, torch.tensor([0]), torch.tensor([text[:length]]), torch.tensor([length])
            )
            ours = drafter.pool.kv_2LBSHE[:, :, row, :length]
            assert torch.allclose(ours, fresh.kv_2LBSHE[:, :, 0, :length], atol=1e-5)


def test_published_trees_have_their_published_shapes() -> None:
    medusa, eagle = (parse_tree(name, None) for name in ("medusa-63", "eagle-25"))
    for tree, counts in ((medusa, [10, 28, 23, 2]), (eagle, [4, 8, 8, 3, 2])):
        assert [sum(len(p) == d + 1 for p in tree.paths) for d in range(tree.levels)] == counts
    assert (medusa.nodes, eagle.nodes) == (64, 26)
    assert eagle.paths[:5] == ((0,), (1,), (2,), (3,), (0, 0))


def test_levels_say_who_is_fed_and_who_is_born() -> None:
    tree = StaticTree.from_paths([(0,), (1,), (3,), (1, 0), (1, 2), (0, 1), (1, 2, 0)])
    assert tree.parents == (-1, 0, 0, 0, 1, 2, 2, 6)
    first, second, third = static_levels(tree, CPU)
    assert (first.fed_F.tolist(), first.rank_C.tolist(), first.breadth) == ([0], [0, 1, 3], 4)
    assert (second.fed_F.tolist(), second.of_C.tolist()) == ([1, 2], [0, 1, 1])
    assert (second.rank_C.tolist(), second.order_C.tolist()) == ([1, 0, 2], [0, 0, 1])
    assert (second.first, second.breadth, second.siblings) == (4, 3, 2)
    assert (third.fed_F.tolist(), third.first) == ([6], 7)
    assert tree.cut(2).paths == tree.paths[:-1]
    assert Topology.from_parents(tree.parents, CPU).inner == (0, 1, 2, 6)


def test_trees_are_read_from_files_and_cut_to_K(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]))
    assert parse_tree(str(file), None).paths == ((0,), (1,), (0, 0))
    assert parse_tree(str(file), 1).paths == ((0,), (1,))
    assert parse_tree("chain", 3) == chain_plan(3)
    assert parse_tree("chain", None).levels == 4
    assert parse_tree("dynamic:3,2,9", 2) == DynamicTree(2, 2, 7)
    assert parse_tree("kary:2,1,2", None).parents == (-1, 0, 0, 1, 2, 3, 3, 4, 4)
    assert parse_tree("kary:1,1,1", 2) == chain_plan(2)
    for text in ("kary:", "kary:2,0", "kary:8,8,8", "kary:2,x", "kary:-1"):
        with pytest.raises(ValueError, match=f"tree: got {text!r}, expected kary:4,2,2"):
            parse_tree(text, None)
    for text, message in (
        ("[[0], [1, 0]]", r"without \[1\]"),
        ("[]", "got 0 paths"),
        ('{"a": 1}', "no list of rank paths"),
        ("[[0], [-1]]", "ranks from 0 up"),
        ("[[0", "no JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            parse_tree(str(file), None)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("bushy", "expected chain, medusa-63, eagle-25"),
        ("dynamic:3,2", "dynamic:levels,width,nodes"),
        ("dynamic:3,2,x", "dynamic:levels,width,nodes"),
        ("dynamic:3,2,7,-1", "sharpness"),
        ("dynamic:1,2,9", "2 to 3 nodes"),
        ("dynamic:0,2,2", "at least 1"),
    ],
)
def test_bad_trees_get_a_clear_error(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(tiny_target, tiny_tokenizer, NgramDrafter(), tree=tree)


def test_what_does_not_go_together_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    draft = LMDrafter(tiny_target, len(tiny_tokenizer))
    for drafter, settings, message in (
        (NgramDrafter(), {"tree": "eagle-25"}, "chains only"),
        (draft, {"tree": "eagle-25", "rule": "block"}, "expected a chain"),
        (draft, {"tree": "dynamic:3,2,9", "rule": "recursive"}, "would bias"),
        (draft, {"lossy": "typical"}, "allow_lossy=true"),
        (draft, {"lossy": "typical", "allow_lossy": True, "rule": "block"}, "rule=coupled"),
        (draft, {"policy": "sometimes"}, "expected one of fixed, auto"),
        (draft, {"policy": "confidence:2"}, "between 0 and 1"),
        (draft, {"policy": "fixed:2"}, "at most 0 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            Decoder(tiny_target, tiny_tokenizer, drafter, **settings)


def test_room_for_a_tree_at_the_end_of_the_context(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A tree that reaches beyond the context's end is drafted all the same, and cut there."""
    params = SETTINGS[0]
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    prompt = list(range(4, 300)) + list(range(4, 214))
    plain = Decoder(tiny_target, tiny_tokenizer).generate([prompt], params)[0]
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree="medusa-63")
    assert plain.tokens == decoder.generate([prompt], params)[0].tokens
    assert len(plain.tokens) == 512 - len(prompt)
