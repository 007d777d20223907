"""What block drafters draft is what an obvious loop drafts, node by node and path by path; and what
they keep is what a fresh prefill makes.

Shapes: B rows, T positions, U width of the taps, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_drafts import FORMS, GRID, LEVELS, counting, drafter, laws, made, racing
from eagle_drafts import VOCAB
from eagle_drafts import counting as counting_pair
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafting.base import Admitted, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.block import Block
from draftsmith.models.taps import target_states

TREES: list[dict[str, Any]] = [
    {"K": LEVELS},
    {"K": 2},
    {"tree": "eagle-25", "K": LEVELS},
    {"tree": "dynamic:4,3,12"},
]
Seen = list[tuple[Round, TokenTree]]


def watched(own: BlockDrafter) -> Seen:
    """The rounds that it drafts from now on."""
    seen: Seen = []
    propose = own.propose

    def recorded(request: Round) -> TokenTree:
        seen.append((request, propose(request)))
        return seen[-1][1]

    own.propose = recorded  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("tree", [TREES[0], *TREES[2:]], ids=["chain", "static", "dynamic"])
@torch.no_grad()
def test_state_after_each_round_equals_a_fresh_prefill(
    tiny_tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any]
) -> None:
    """In rounds that keep all, some and none of what was drafted: keys and values of the text alone
    and, beyond it, nothing that a later round reads.
    """
    target, _ = counting_pair(wrong=0.35)
    head = counting(target)
    own, fresh = (BlockDrafter(head, target, VOCAB) for _ in range(2))
    decoder = Decoder(target, tiny_tokenizer, own, batch_size=4, **tree)
    session = decoder._open(PROMPTS, SETTINGS[0], None)
    batch = session.batch
    session.admit()
    kept = set()
    for _ in range(7):
        before = batch.rows.lens_B.clone()
        session.hear(session.launch())
        kept |= set((batch.rows.lens_B - before).tolist())
        for row, request in enumerate(batch.rows.requests):
            if request is None:
                continue
            text = request.completion.prompt_tokens + request.completion.tokens
            length = len(text) - 1
            assert length == batch.rows.lens_B[row]
            begin(fresh, target, text)
            ours = own.pool.kv_2LBSHE[:, :, row, :length]
            assert torch.allclose(ours, fresh.pool.kv_2LBSHE[:, :, 0, :length], atol=1e-5)
            with torch.inference_mode():
                own.pool.kv_2LBSHE[:, :, row, length:] = 100.0  # of no round to come
    assert len(kept - {0}) >= 3, kept


def begin(own: BlockDrafter, target: PreTrainedModel, text: list[int]) -> None:
    """Prefill a text whose last token is pending."""
    tokens_1N, at_1 = torch.tensor([text[:-1]]), torch.tensor([0])
    taps_1NU = target_states(target, own.taps, input_ids=tokens_1N).taps_BTF
    own.reset(1, 128)
    lens_1, pending_1 = torch.tensor([len(text) - 1]), torch.tensor(text[-1:])
    own.prefill(Admitted(at_1, tokens_1N, lens_1, pending_1, taps_1NU))


def check_rounds(
    head: Block, tokenizer: PreTrainedTokenizerBase, given: tuple[Any, ...], rounds: int
) -> int:
    """Each node of some rounds is the child of its rank by the law after its path; returns how many
    nodes of one depth and rank differ by their paths.
    """
    target, tree, params = given
    own = drafter(head, target)
    seen = watched(own)
    decoder = Decoder(target, tokenizer, own, batch_size=2, **tree)
    session = decoder._open(PROMPTS[:2], params, None)
    session.admit()
    differ = 0
    for _ in range(rounds):
        texts = {
            row: request.completion.prompt_tokens + request.completion.tokens
            for row, request in enumerate(session.batch.rows.requests)
            if request is not None
        }
        session.hear(session.launch())
        for row, text in texts.items():
            differ += check_tree(head, target, seen[-1], row, text, params)
    return differ


def check_tree(
    head: Block,
    target: PreTrainedModel,
    round_: tuple[Round, TokenTree],
    row: int,
    text: list[int],
    params: SamplingParams,
) -> int:
    request, tree = round_
    race_DV = None if request.race_BDV is None else request.race_BDV[row]
    guess = racing(head, params, race_DV, VOCAB)
    law = laws(head, target, text[:-1], guess, VOCAB)
    tokens = tree.tokens_BN[row].tolist()
    parents = tree.topology.parent.expand(len(tree.tokens_BN), -1)[row].tolist()
    paths, kinds = [[text[-1]]], set()
    assert tokens[0] == text[-1]
    for node in range(1, len(tokens)):
        path = paths[parents[node]]
        score_V = params.transform(law(path))
        if race_DV is not None:
            score_V = score_V - race_DV[len(path) - 1]
        siblings = [n for n in range(1, node) if parents[n] == parents[node]]
        # Siblings come best first, in trees without gaps in their ranks.
        best = score_V.topk(len(siblings) + 1)
        if best.values[-1] == -torch.inf:  # more children than tokens that a filter leaves: any
            assert score_V[tokens[node]] == -torch.inf, (node, path)
        else:
            assert tokens[node] == best.indices[-1], (node, path)
        paths.append([*path, tokens[node]])
        kinds.add((len(path), len(siblings), tokens[node]))
    return len(kinds) - len({kind[:2] for kind in kinds})


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_every_node_is_what_an_obvious_loop_drafts(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Children are their own path's where there is a light head, and a marginal's where none is."""
    params, head = replace(SETTINGS[1], max_new_tokens=12), made(name)
    for tree in TREES[2:]:
        differ = check_rounds(head, tiny_tokenizer, (tiny_target, tree, params), 1)
        assert (differ > 0) == (head.config.light != "none"), (tree, differ)
    check_rounds(head, tiny_tokenizer, (tiny_target, TREES[1], SETTINGS[0]), 1)


@torch.no_grad()
def test_a_layer_for_the_nodes_without_its_lean_form(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A head that learns, or whose rotary embeddings depend on more than the position."""
    head = made("noise-layer").requires_grad_(True)
    assert drafter(head, tiny_target).nodes is None
    for tree in TREES:
        check_rounds(head, tiny_tokenizer, (tiny_target, tree, SETTINGS[1]), 1)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("name", GRID)
@torch.no_grad()
def test_every_form_drafts_what_an_obvious_loop_drafts(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    tree: dict[str, Any],
) -> None:
    for params in SETTINGS:
        check_rounds(made(name), tiny_tokenizer, (tiny_target, tree, params), 3)


@pytest.mark.parametrize("light", ["rnn", "gru"])
def test_what_a_path_carries_goes_to_its_own_children(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    light: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin, in which each node goes on with what the first one carried, is noticed."""
    name = "rnn" if light == "rnn" else "domino"

    def first(states_BNX: torch.Tensor, of_BF: torch.Tensor) -> torch.Tensor:
        return states_BNX[:, :1].expand(-1, of_BF.shape[1], -1)

    monkeypatch.setattr("draftsmith.decode.drafters.block.picked", first)
    given = tiny_target, TREES[2], SETTINGS[1]
    with pytest.raises(AssertionError), torch.no_grad():
        check_rounds(made(name), tiny_tokenizer, given, 4)


@pytest.mark.parametrize("name", ["jetspec", "gru-two", "noise-markov", "dspark"])
@torch.no_grad()
def test_a_causal_block_does_not_know_how_deep_the_round_is(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """What is drafted at a depth is the same in shorter rounds; a full block is fed whole."""
    fed: list[int] = []
    head = made(name)
    trunk = head.trunk
    head.trunk = lambda tokens, last, rows, *more: (
        fed.append(rows) or trunk(tokens, last, rows, *more)
    )  # type: ignore[func-returns-value,method-assign]
    drafted = []
    for K in (1, 2, LEVELS):
        own = drafter(head, tiny_target)
        seen = watched(own)
        params = replace(SETTINGS[1], max_new_tokens=4)
        Decoder(tiny_target, tiny_tokenizer, own, K=K).generate(["def f"], params)
        drafted.append(seen[0][1].tokens_BN[0, 1:].tolist())
    assert all(short == drafted[-1][: len(short)] for short in drafted)
    rows = {head.first + K for K in (1, 2, LEVELS)}
    assert set(fed) == (rows if head.config.mask == "causal" else {head.block})


@pytest.mark.parametrize("name", ["dspark", "dflash", "domino", "treeflash", "noise"])
@torch.no_grad()
def test_teacher_forced_logits_are_those_of_the_first_draft(
    tiny_target: PreTrainedModel, name: str
) -> None:
    head = made(name)
    own = drafter(head, tiny_target)
    text = [(7 * i) % VOCAB for i in range(14)]
    taps_1TU = target_states(tiny_target, own.taps, input_ids=torch.tensor([text])).taps_BTF
    all_TV = own.teacher_logits(torch.tensor([text]), taps_1TU)[0]
    assert not all_TV[0].any()
    guess = racing(head, SETTINGS[0], None, VOCAB)
    for end in range(2, len(text) + 1):
        wanted_V = laws(head, tiny_target, text[: end - 1], guess, VOCAB)(text[end - 1 : end])
        assert torch.allclose(all_TV[end - 1], wanted_V, atol=1e-4)
