"""Medusa and Hydra heads as drafters: no answer changes, and what they draft is what an obvious
loop drafts.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import ahead, counting_target
from randomised import randomised
from rounds import reads_nothing, records, started
from saved_heads import reloaded
from tiny_hydra import layer, looks_at
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.hydra import HydraDrafter
from draftsmith.decode.drafters.medusa import MedusaDrafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.drafting.head_drafter import keep_last
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.taps import target_states

ROWS = 328  # of the LM head: eight more than the tokenizer has
TREES: list[dict[str, Any]] = [
    {"K": 2},
    {"tree": "medusa-63", "K": 3},
    {"tree": "eagle-25"},
    {"tree": "dynamic:4,3,12"},
]
KINDS = ["medusa", "medusa-shared", "hydra", "hydra++"]
WAYS = [replace(params, max_new_tokens=20) for params in SETTINGS[:2]]
Drafting = MedusaDrafter | HydraDrafter


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return counting_target(len(tiny_tokenizer), ROWS, blur=0.15)


def make(
    kind: str,
    target: PreTrainedModel,
    vocab: int,
    *,
    off: int | None = None,
    noise: float = 0.02,
) -> Drafting:
    """Five random heads; with `off`, heads that count on by as much too far, with some noise of all
    that they read.
    """
    if kind.startswith("medusa"):
        shared = kind == "medusa-shared"
        head: Medusa | Hydra = Medusa(MedusaConfig(32, ROWS, 5, layers=2, own_heads=not shared))
    else:
        plus = {"layers": 2, "prefix": layer(vocab_size=ROWS), "head_bias": True}
        head = Hydra(HydraConfig(32, ROWS, 5, **(plus if kind == "hydra++" else {})))
    head.init_from(target).eval().requires_grad_(False)
    randomised(head)
    if off is not None:
        table = target.model.embed_tokens.weight[:vocab]
        for depth in range(5):
            for block in head.blocks(depth):
                block.linear.weight.zero_()
                block.linear.bias.zero_()
            head.output(depth).weight.zero_()
            steps, scale = 2 + depth, 1.4
            if isinstance(head, Hydra):
                looks_at(head, depth, depth + 1)
                steps, scale = 1, 1.4 * math.sqrt(32)  # an embedding isn't normed
            head.output(depth).weight[:vocab] = scale * ahead(table, steps + off)
            for parameter in (p for block in head.blocks(depth) for p in block.parameters()):
                parameter.add_(noise * torch.randn_like(parameter))
    return (MedusaDrafter if isinstance(head, Medusa) else HydraDrafter)(head, target, vocab)


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "t1"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_changes(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    params: SamplingParams,
) -> None:
    """Rows come and go: four prompts of different lengths in three rows."""
    vocab, expected = len(tiny_tokenizer), truths(target, tiny_tokenizer, params)
    for off in (None,) if kind == "medusa-shared" else (None, 0):
        drafter = make(kind, target, vocab, off=off)
        for tree in TREES:
            decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **tree)
            done = decoder.generate(PROMPTS, params)
            assert [c.tokens for c in done] == expected, (off, tree)
            rounds = sum(c.counters.rounds for c in done)
            assert off is None or sum(c.counters.emitted for c in done) > 1.2 * rounds


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_heads_that_count_are_always_right_and_one_off_never(
    tiny_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    vocab, params = len(tiny_tokenizer), WAYS[0]
    target = counting_target(vocab, ROWS)
    for off in (0, -1, 1):
        drafter = make(kind, target, vocab, off=off, noise=0)
        for done in Decoder(target, tiny_tokenizer, drafter, K=5).generate(PROMPTS, params):
            histogram = done.counters.histogram
            kept = histogram[-1] if off == 0 else histogram[0]
            assert sum(histogram) - kept <= (off == 0), (off, histogram)  # the last may be cut


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_rules_by_rejection_run_and_keep_drafts(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    drafter = make(kind, target, len(tiny_tokenizer), off=0)
    for rule, tree in (("leviathan", "chain"), ("block", "chain"), ("recursive", "eagle-25")):
        decoder = Decoder(target, tiny_tokenizer, drafter, rule=rule, tree=tree, batch_size=3)
        greedy = decoder.generate(PROMPTS, WAYS[0])
        assert [c.tokens for c in greedy] == truths(target, tiny_tokenizer, WAYS[0])
        sampled = [c.counters for c in decoder.generate(PROMPTS, WAYS[1])]
        assert sum(c.emitted for c in sampled) > 1.2 * sum(c.rounds for c in sampled)


def fresh_base(drafter: Drafting, target: PreTrainedModel, text: list[int]) -> Tensor:
    """What heads read at the last token of a text, [1, H], computed from the text alone."""
    norm_1TH, _ = target_states(target, (), input_ids=torch.tensor([text]))
    if isinstance(drafter, HydraDrafter):
        length = len(text)
        sees = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

        def attention(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~sees, -1e9)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

        norm_1TH = drafter.head.prefix(norm_1TH, torch.arange(length)[None], attention)
    return norm_1TH[:, -1]


def law(drafter: Drafting, base_1H: Tensor, path: list[int], vocab: int) -> Tensor:
    """Raw logits [V] after a path of drafted tokens, the pending one first."""
    depth, head = len(path) - 1, drafter.head
    if isinstance(head, Medusa):
        return (head.states(base_1H)[depth] @ head.head_VH(depth).T)[0, :vocab]
    state_1H = head.state(depth, base_1H, head.embed(torch.tensor([path])))
    return head.output(depth)(state_1H)[0, :vocab]


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "t1"])
@pytest.mark.parametrize("tree", TREES[::2] + TREES[3:], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
@torch.no_grad()
def test_state_and_drafts_are_those_of_the_text(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Each round begins with the state that the text alone gives; and each node is the child of its
    rank by the law after its path.
    """
    vocab = len(tiny_tokenizer)
    drafter = make(kind, target, vocab, off=0)
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **tree)
    seen: list[tuple[Round, TokenTree]] = []
    propose = drafter.propose

    def recorded(request: Round) -> TokenTree:
        seen.append((request, propose(request)))
        return seen[-1][1]

    drafter.propose = recorded  # type: ignore[method-assign]
    session = decoder._open(PROMPTS[:3], params, None)
    batch = session.batch
    session.admit()
    kept = set()
    for _ in range(6):
        texts = {
            row: request.completion.prompt_tokens + request.completion.tokens
            for row, request in enumerate(batch.rows.requests)
            if request is not None
        }
        state_BH = drafter.state_BH.clone()
        session.hear(session.launch())
        request, drafted = seen[-1]
        for row, text in texts.items():
            base_1H = fresh_base(drafter, target, text[:-1])
            assert torch.allclose(state_BH[row], base_1H[0], atol=1e-5)
            check_tree(drafter, drafted, request, row, base_1H, text[-1], vocab)
            now = batch.rows.requests[row]
            kept.add(0 if now is None else len(now.completion.tokens) - len(text))
    assert len(kept) > 1, "rounds that kept different numbers of tokens"


def check_tree(
    drafter: Drafting,
    tree: TokenTree,
    request: Round,
    row: int,
    base_1H: Tensor,
    pending: int,
    vocab: int,
) -> None:
    tokens, topology = tree.tokens_BN[row].tolist(), tree.topology
    parents = topology.parent.expand(len(tree.tokens_BN), -1)[row].tolist()
    paths = [[pending]]
    assert tokens[0] == pending
    for node in range(1, len(tokens)):
        path = paths[parents[node]]
        score_V = law(drafter, base_1H, path, vocab)
        if request.race_BDV is not None:
            score_V = score_V - request.race_BDV[row, len(path) - 1]
        siblings = [n for n in range(1, node) if parents[n] == parents[node]]
        # Siblings come best first, in trees without gaps in their ranks.
        best = score_V.topk(len(siblings) + 1).indices.tolist()
        assert tokens[node] == best[-1], (node, path)
        paths.append([*path, tokens[node]])


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "hydra++"])
def test_a_round_never_reads_the_device(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: dict[str, Any],
) -> None:
    drafter = make(kind, target, len(tiny_tokenizer))
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=4, **tree)
    reads_nothing(decoder, started(decoder, WAYS[1]))


@pytest.mark.parametrize("tree", [TREES[0], TREES[3]], ids=str)
@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_a_recorded_round_is_the_round(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: dict[str, Any],
) -> None:
    """Replayed on the same tensors, over two calls whose rows come and go: the same tokens."""
    drafter = make(kind, target, len(tiny_tokenizer), off=0)
    records((target, tiny_tokenizer), drafter, WAYS[1], **tree)


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "t1"])
@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:3,5,30", "dynamic:3,20,200"])
def test_a_head_that_says_no_number_changes_no_answer(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
    params: SamplingParams,
) -> None:
    """And the nodes below its own keep their parents, though these are worth nothing."""
    drafter = make("medusa", target, len(tiny_tokenizer), off=0)
    drafter.head.output(0).weight.fill_(torch.nan)
    decoder = Decoder(target, tiny_tokenizer, drafter, tree=tree, batch_size=3)
    seen: list[TokenTree] = []
    propose = drafter.propose
    drafter.propose = lambda request: seen.append(propose(request)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    done = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in done] == truths(target, tiny_tokenizer, params)
    for topology in (tree.topology for tree in seen):
        parent_BN, depth_BN = (torch.atleast_2d(x) for x in (topology.parent, topology.depth))
        above_BM = depth_BN.gather(1, parent_BN[:, 1:])
        assert torch.equal(depth_BN[:, 1:], above_BM + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_draft_as_before(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    drafter = make(kind, target, len(tiny_tokenizer))
    loaded = reloaded((target, tiny_tokenizer), drafter, tmp_path)
    ids_BT = torch.arange(24).view(2, 12)
    norm_BTH, _ = target_states(target, (), input_ids=ids_BT)
    teacher = [d.teacher_logits(ids_BT, norm_BTH) for d in (drafter, loaded)]
    # The maps of a layer may lie side by side in a file: merged, they round otherwise.
    assert torch.allclose(*teacher, atol=1e-5) if kind == "hydra++" else torch.equal(*teacher)
    wanted_V = law(drafter, fresh_base(drafter, target, ids_BT[1, :7].tolist()), [19], ROWS - 8)
    assert torch.allclose(teacher[0][1, 7], wanted_V, atol=1e-5)
    assert not teacher[0][:, 0].any()


def test_room_for_a_tree_at_the_end_of_the_prefix_layers_context(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = make("hydra++", target, len(tiny_tokenizer), off=0)
    prompt = list(range(4, 300)) + list(range(4, 214))
    answers = [
        Decoder(target, tiny_tokenizer, d, **way).generate([prompt], WAYS[0])[0].tokens
        for d, way in ((None, {}), (drafter, {"tree": "medusa-63"}), (drafter, {"K": 5}))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 512 - len(prompt)


def test_bytes_that_a_draft_call_reads(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafters = {kind: make(kind, target, len(tiny_tokenizer)) for kind in KINDS}
    block, output = 32 * 32 + 32, ROWS * 32
    assert drafters["medusa"].parameter_bytes == 4 * (2 * block + output)
    assert drafters["medusa-shared"].parameter_bytes == 4 * (5 * 2 * block + output) // 5
    wide = sum((depth + 2) * 32 * 32 + 32 for depth in range(5))
    assert drafters["hydra"].parameter_bytes == 4 * (2 * wide + 5 * output) // 5
    assert [drafters[kind].size.kv(3, 64) for kind in KINDS] == [0, 0, 0, 2 * 3 * 64 * 2 * 8 * 4]


def test_rows_without_news_keep_their_state() -> None:
    states_BLH = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    old_BH = torch.ones(3, 8)
    keep_last(old_BH, states_BLH, torch.tensor([0, 1, 4]))
    assert torch.equal(old_BH, torch.stack([torch.ones(8), states_BLH[1, 0], states_BLH[2, 3]]))


def test_more_levels_than_heads_are_refused(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = make("medusa", target, len(tiny_tokenizer))
    with pytest.raises(ValueError, match="give K=5 or less"):
        Decoder(target, tiny_tokenizer, drafter, K=6)
