"""P-EAGLE as a drafter: no answer changes, one pass drafts what lone rows of MASK say, and nothing
of these rows outlives a round.

Shapes: B rows, T positions, D levels, H hidden, U width of the taps, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_drafts import PARALLEL, TEXTS, VOCAB, begin, draft, made
from rounds import MODES, reads_nothing, records, started
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters import peagle
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafters.peagle import PEagleDrafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.lean_heads import LeanEagle
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.peagle import PEagle
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.trim import trimmed

WAYS = [replace(params, max_new_tokens=18) for params in SETTINGS]
TREES = ["chain", "eagle-25", "dynamic:4,3,12"]
ROUNDS: dict[str, dict[str, Any]] = MODES | {"leviathan": {"rule": "leviathan"}}


@pytest.fixture(scope="module")
def answers(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> list[list[list[int]]]:
    return [truths(tiny_target, tiny_tokenizer, params) for params in WAYS]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", PARALLEL)
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: list[list[list[int]]],
    name: str,
    tree: str,
) -> None:
    """Rows come and go: four prompts in three rows."""
    drafter = PEagleDrafter(made(name), tiny_target, VOCAB)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, batch_size=3)
    for expected, params in zip(answers, WAYS, strict=True):
        assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected


def alone(
    head: PEagle, target: PreTrainedModel, text: list[int], *, turned: int = 0, mask: int = 0
) -> Tensor:
    """Logits [6, D] after a text whose last token is pending, by the head's own step on its pairs
    and the rows of MASK as one text. Twins: these stand further on, or are those of other depths.
    """
    pairs, text_1T = len(text) - 1, torch.tensor([text])
    taps_1TU = target_states(target, head.taps, input_ids=text_1T[:, :-1]).taps_BTF
    mask_15H = head.fuse(head.mask_state).expand(1, 5, -1)
    deeper_15 = torch.arange(1, 6)[None]
    tokens_1T = torch.cat([text_1T[:, 1:], -deeper_15 - mask], 1)
    at_1T = torch.cat([torch.arange(pairs)[None], pairs - 1 + deeper_15 + turned], 1)
    hidden_1TH = torch.cat([head.fuse(taps_1TU), mask_15H], 1)
    output_1TH = head.step(hidden_1TH, tokens_1T, at_1T, causal())
    return (head.before_head(output_1TH)[0, pairs - 1 :]) @ head.head_DH.T


def logits(head: PEagle, tree: TokenTree) -> Tensor:
    assert tree.q_logits_BIV is not None
    return tree.q_logits_BIV[..., head.vocab.ids_D]


@pytest.mark.parametrize("name", PARALLEL)
@torch.no_grad()
def test_one_pass_is_what_rows_alone_say(tiny_target: PreTrainedModel, name: str) -> None:
    """After a prefill; and after a round that kept 0 to 3 tokens, beside states of others."""
    head = made(name)
    drafter = PEagleDrafter(head, tiny_target, VOCAB)
    assert isinstance(drafter.body, LeanEagle)
    begin(drafter, tiny_target, TEXTS)
    expected_BDV = torch.stack([alone(head, tiny_target, text) for text in TEXTS])
    found_BDV = logits(head, draft(drafter, TEXTS, K=6))
    assert torch.allclose(found_BDV, expected_BDV, atol=2e-5)
    twins = [{"turned": 1}, {"mask": 1}] if head.config.own_masks else [{"turned": 1}]
    for twin in twins:
        wrong_BDV = torch.stack([alone(head, tiny_target, text, **twin) for text in TEXTS])
        assert torch.allclose(found_BDV[:, 0], wrong_BDV[:, 0], atol=2e-5)
        assert (found_BDV - wrong_BDV)[:, 1:].abs().amax((0, 2)).min() > 5e-3, twin

    longer = [text + [(11 * i + row) % VOCAB for i in range(row)] for row, text in enumerate(TEXTS)]
    lens_B, n_new_B = torch.tensor([len(text) - 1 for text in TEXTS]), torch.arange(4)
    tokens_BL, taps_BLU = torch.full((4, 7), 9), torch.randn(4, 7, len(head.taps) * 32)
    for row, text in enumerate(longer):
        states = target_states(tiny_target, head.taps, input_ids=torch.tensor([text[:-1]]))
        tokens_BL[row, :row] = torch.tensor(text[len(text) - row :])
        taps_BLU[row, :row] = states.taps_BTF[0, len(text) - 1 - row :]
    drafter.extend(Kept(tokens_BL, n_new_B, None, lens_B, taps_BLU))
    expected_BDV = torch.stack([alone(head, tiny_target, text) for text in longer])
    found_BDV = logits(head, draft(drafter, longer, K=6))
    assert torch.allclose(found_BDV, expected_BDV, atol=2e-5)


@torch.no_grad()
def test_deeper_rows_change_nothing_above(
    tiny_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of three levels gives the first three of six; rows that see all of theirs do not."""
    head = made("peagle")
    drafter = PEagleDrafter(head, tiny_target, VOCAB)

    def gap() -> float:
        found = []
        for K in (6, 3, 1):
            begin(drafter, tiny_target, TEXTS)
            found.append(logits(head, draft(drafter, TEXTS, K=K)))
        return max(float((found[0][:, : x.shape[1]] - x).abs().max()) for x in found[1:])

    assert gap() < 1e-5

    def full(first_B: Tensor, width: int, block_DD: Tensor, depth_D: Tensor) -> Seen:
        return Seen(first_B, width, torch.ones_like(block_DD), depth_D)

    monkeypatch.setattr(peagle, "Seen", full)
    assert gap() > 1e-3


@pytest.mark.parametrize("tree", ["eagle-25", "dynamic:4,3,12"])
@torch.no_grad()
def test_nodes_of_a_depth_share_a_law(tiny_target: PreTrainedModel, tree: str) -> None:
    """All parents have the same children, best first: those of the chain's law."""
    drafter = PEagleDrafter(made("peagle"), tiny_target, VOCAB)
    begin(drafter, tiny_target, TEXTS)
    best_BDV = logits(drafter.head, draft(drafter, TEXTS, K=6)).argsort(2, descending=True)
    begin(drafter, tiny_target, TEXTS)
    grown = draft(drafter, TEXTS, tree)
    for row in range(len(TEXTS)):
        parent, depth = (
            x if x.ndim == 1 else x[row] for x in (grown.topology.parent, grown.topology.depth)
        )
        for node in set(parent[1:].tolist()):
            children = (parent == node).nonzero().flatten()
            ids = drafter.head.vocab.ids_D[best_BDV[row, int(depth[node])]]
            assert grown.tokens_BN[row, children].tolist() == ids[: len(children)].tolist()


@pytest.mark.parametrize("tree", ["chain", "eagle-25"])
@torch.no_grad()
def test_nothing_of_mask_rows_outlives_a_round(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: str
) -> None:
    """In rounds made to keep all, some and none of what was drafted, the state is that of a fresh
    prefill, though what lies beyond the committed slots is spoilt before each round.
    """
    head, params = made("peagle"), replace(SETTINGS[0], max_new_tokens=40)
    prompts = [tiny_tokenizer(text).input_ids for text in PROMPTS]
    expected = truths(tiny_target, tiny_tokenizer, params)
    drafter, fresh = (PEagleDrafter(head, tiny_target, VOCAB) for _ in range(2))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, batch_size=4)
    session = decoder._open(PROMPTS, params, None)
    rows, propose, done = session.batch.rows, drafter.propose, [0]

    def partly_right(request: Any) -> TokenTree:
        for row, length in enumerate(request.lens_B.tolist()):
            drafter.pool.kv_2LBSHE[:, :, row, length:] = 1e3
        grown: TokenTree = propose(request)
        for row, asked in enumerate(rows.requests):
            if asked is None:
                continue
            right, node = (row + done[0]) % (request.plan.levels + 1), 0
            at = len(asked.completion.tokens)
            for token in expected[prompts.index(asked.completion.prompt_tokens)][at : at + right]:
                node = int((grown.topology.parent == node).nonzero()[0])
                grown.tokens_BN[row, node] = token
        done[0] += 1
        return grown

    drafter.propose = partly_right  # type: ignore[method-assign]
    session.admit()
    kept = set()
    for _ in range(6):
        before = rows.lens_B.clone()
        session.hear(session.launch())
        kept |= set((rows.lens_B - before).tolist())
        for row, request in enumerate(rows.requests):
            if request is None:
                continue
            text = request.completion.prompt_tokens + request.completion.tokens
            begin(fresh, tiny_target, [text])
            length = len(text) - 1
            ours = drafter.pool.kv_2LBSHE[:, :, row, :length]
            assert torch.allclose(ours, fresh.pool.kv_2LBSHE[:, :, 0, :length], atol=1e-5)
            assert torch.allclose(drafter.state_BH[row], fresh.state_BH[0], atol=1e-5)
    assert len(kept - {0}) >= 4, kept


@pytest.mark.parametrize("mode", ROUNDS)
def test_a_round_never_reads_the_device(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, mode: str
) -> None:
    """Under every rule, the one-pass rejection rules too: each level's law is drawn from."""
    drafter = PEagleDrafter(made("peagle"), tiny_target, VOCAB)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4, **ROUNDS[mode])
    session = started(decoder, SETTINGS[1])
    session.hear(session.launch())
    reads_nothing(decoder, session)


@pytest.mark.parametrize("tree", ["chain", "dynamic:3,3,9"])
def test_a_recorded_round_is_the_round(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: list[list[list[int]]],
    tree: str,
) -> None:
    drafter = PEagleDrafter(made("peagle"), tiny_target, VOCAB)
    records((tiny_target, tiny_tokenizer), drafter, WAYS[1], tree=tree)


@torch.no_grad()
def test_a_saved_head_drafts_as_before(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    head = made("parallelspec").bind(tiny_target)
    save_drafter(
        tmp_path / "drafter",
        kind=head.kind,
        model=head,
        tokenizer=tiny_tokenizer,
        target_fingerprint=fingerprint(tiny_target, tiny_tokenizer),
        provenance={},
        defaults={"K": 3},
    )
    drafter = load_drafter(str(tmp_path / "drafter"), tiny_target, tiny_tokenizer)
    assert isinstance(drafter, PEagleDrafter) and drafter.levels == 6
    assert open_drafter(tmp_path / "drafter", None).head().config.own_masks
    begin(drafter, tiny_target, TEXTS)
    expected_BDV = torch.stack([alone(head, tiny_target, text) for text in TEXTS])
    assert torch.allclose(logits(head, draft(drafter, TEXTS, K=6)), expected_BDV, atol=2e-5)
    with pytest.raises(ValueError, match="give K=6 or less"):
        Decoder(tiny_target, tiny_tokenizer, drafter, K=7)


@torch.no_grad()
def test_fewer_tokens_are_drafted_by_the_same_rows(tiny_target: PreTrainedModel) -> None:
    whole = PEagleDrafter(made("parallelspec"), tiny_target, VOCAB)
    some = DraftVocab(torch.arange(0, VOCAB, 3), VOCAB)
    few = trimmed(whole, (some, None), tiny_target, VOCAB)
    found = []
    for drafter in (whole, few):
        begin(drafter, tiny_target, TEXTS)
        tree = draft(drafter, TEXTS, K=6)
        assert isinstance(drafter, PEagleDrafter) and tree.q_logits_BIV is not None
        found.append(tree.q_logits_BIV[..., ::3])
    assert torch.allclose(*found, atol=1e-6)


def test_bytes_of_a_draft_call(tiny_target: PreTrainedModel) -> None:
    """All that a round reads, shared by its levels; embeddings are looked up."""
    drafter = PEagleDrafter(made("peagle"), tiny_target, VOCAB)
    read = [*drafter.head.layers.parameters(), drafter.head.lm_head.weight, drafter.head.fc.weight]
    assert drafter.parameter_bytes == sum(p.nbytes for p in read) // 6


def test_no_one_takes_it_for_eagle3() -> None:
    """Its folder names no architecture of a server, which would go on from its own outputs."""
    config = made("peagle").to_json()
    assert config["architectures"] not in (["LlamaForCausalLMEagle3"], ["Eagle3Qwen3ForCausalLM"])
    assert (
        Eagle.kinds.keys() == {"eagle1", "dovetail", "eagle3", "mtp"}
        and not PEagle.kinds["peagle"].stacks
    )
