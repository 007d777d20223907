"""Chains that are drafted in one call of C++, and heads' layers there: what torch drafts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import block_drafts
import pytest
import torch
from eagle_drafts import HEADS, PARALLEL, TEXTS, VOCAB, begin, made
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.decode.draft_lms.easy import EasyDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafting import grow_tree
from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.drafting.retrieval import LEAST
from draftsmith.decode.forward import lean_heads
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.lean_heads import LeanEagle
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import measured_costs, round_of
from draftsmith.decode.sampling import RowParams, SamplingParams, log_race, position_keys
from draftsmith.decode.token_tree import WITHOUT_REPLACEMENT, TokenTree
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.decode.untrained.exits import ExitsDrafter
from draftsmith.decode.untrained.own_layers import OwnLayersDrafter
from draftsmith.models.vocab import DraftVocab

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]
CPU, K = torch.device("cpu"), 5
SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
IN_CALLS = [name for name in HEADS if name != "dovetail"]  # which drafts in torch
BLOCK = "noise-layer"
LMS = ("lm", "trimmed", "rapid")
OWN = ("exit:2", "skip:1a", "exits:1+2")  # the target's own layers
MOST = 32  # tokens a pass, on a machine too where it isn't faster


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """One in bf16 whose states are as wide as what native.cpp takes."""
    return build_llama(VOCAB, layers=3, hidden=64, seed=0).requires_grad_(False).bfloat16()


def texts_of(name: str) -> list[list[int]]:
    """Long ones for a draft that reads a part of them alone."""
    before = [i * i % VOCAB for i in range(150)] if name == "rapid" else []
    return [before + text for text in TEXTS]


def head_of(name: str) -> Any:
    """A random head, small enough that bf16 doesn't drown it."""
    block = name == BLOCK
    head: Any = block_drafts.made(name, sizes=SIZES, levels=K) if block else made(name, **SIZES)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.mul_(0.6)
    return head.bfloat16()


def drafter_of(name: str, target: PreTrainedModel) -> Drafter:
    """A random one, after the prefill of four texts."""
    if name == BLOCK:
        block = BlockDrafter(head_of(name), target, VOCAB)
        begin(block, target, TEXTS)
        assert block.nodes is not None and block.nodes.native is not None
        block.nodes.native.most = MOST
        return block
    if name in OWN:
        return own_layers(name)
    if name not in LMS:
        drafter = EagleDrafter(head_of(name), target, VOCAB)
        begin(drafter, target, TEXTS)
        if drafter.native is not None:
            drafter.native.most = MOST
        return drafter
    model = llama(2)
    vocab = DraftVocab(torch.arange(0, VOCAB - 2, 2), VOCAB) if name == "trimmed" else None
    lm = LMDrafter(model, VOCAB, vocab)
    lm.reads = LEAST if name == "rapid" else 0
    assert lm.native is not None
    lm.native.most = MOST
    texts = texts_of(name)
    rows_R, lens_R = torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])
    tokens_RN = torch.full((len(texts), int(lens_R.max())), 3)
    for row, text in enumerate(texts):
        tokens_RN[row, : len(text) - 1] = torch.tensor(text[:-1])
    pending_R = torch.tensor([text[-1] for text in texts])
    lm.reset(len(texts), 256)
    lm.prefill(Admitted(rows_R, tokens_RN, lens_R, pending_R))
    return lm


def llama(layers: int) -> PreTrainedModel:
    """A random one in bf16."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **{**SIZES, "vocab_size": VOCAB, "num_hidden_layers": layers, "initializer_range": 0.2},
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False).bfloat16()


def own_layers(name: str) -> Drafter:
    """Of a random target, on a pool of its own after the same texts."""
    kind, _, says = name.partition(":")
    of = ExitsDrafter if kind == "exits" else OwnLayersDrafter
    drafter = of.named(kind, says, llama(3), VOCAB)
    pool = drafter.whole.pool(len(TEXTS), 64)
    for row, text in enumerate(TEXTS):
        lens_1 = torch.tensor([len(text) - 1])
        drafter.whole.prefill(pool, torch.tensor([row]), torch.tensor([text[:-1]]), lens_1)
    drafter.share(pool)
    assert drafter.native is not None
    for part in (drafter.runner, *getattr(drafter, "parts", {}).values()):
        part.native.most = MOST
    return drafter


def asked(temperature: float, name: str = "lm") -> Round:
    """A chain's round after its texts, with the noise that the target will use."""
    texts = texts_of(name)
    request = round_of(parse_tree("chain", K), len(texts), max(map(len, texts)), CPU)
    lens_B = torch.tensor([len(text) - 1 for text in texts])
    race_BDV = None
    if temperature:
        at_BD = lens_B[:, None] + 1 + torch.arange(K + 1)
        race_BDV = log_race(position_keys(torch.arange(len(TEXTS)), at_BD), VOCAB)
    return replace(
        request,
        lens_B=lens_B,
        pending_B=torch.tensor([text[-1] for text in TEXTS]),
        params=SamplingParams(temperature),
        race_BDV=race_BDV,
    )


def told_apart(drafter: Drafter, request: Round) -> tuple[float, Tensor]:
    """How far the chain that is drafted at once is from torch's, and that chain: of the first token
    of each row that differs, how much worse its score is, as a share of the largest one.
    """
    at_once_BN = drafter.propose(request).tokens_BN
    call_by_call = drafter.propose(replace(request, want_q=True))
    scores_BKV = call_by_call.q_logits_BIV
    assert scores_BKV is not None
    if request.race_BDV is not None:
        scores_BKV = scores_BKV - request.race_BDV[:, :K]
    worst = 0.0
    for row, (ours, own) in enumerate(zip(at_once_BN, call_by_call.tokens_BN, strict=True)):
        differ = (ours != own).nonzero()[:, 0].tolist()
        if differ:
            scores_V = scores_BKV[row, differ[0] - 1]
            size = scores_V[scores_V.isfinite()].abs().max()
            gap = scores_V[own[differ[0]]] - scores_V[ours[differ[0]]]
            worst = max(worst, float(gap / size))
    return worst, at_once_BN


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [*LMS, *IN_CALLS, BLOCK, *OWN])
@torch.inference_mode()
def test_a_chain_drafted_at_once_is_torchs(
    name: str, temperature: float, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, request, calls = drafter_of(name, target), asked(temperature, name), []
    if name == "exits:1+2":
        request = replace(request, plan=replace(request.plan, by=1))
    chain = NativeBody.chain

    def counted(self: NativeBody, *given: Any, **how: Any) -> Any:
        calls.append(given)
        return chain(self, *given, **how)

    monkeypatch.setattr(NativeBody, "chain", counted)
    worst, tokens_BN = told_apart(drafter, request)
    assert len(calls) == 1 and tokens_BN.shape == (len(TEXTS), K + 1)
    assert worst < 0.02, "beyond rounding"

    told = replace(request, sure=True)  # how sure it is, where the same was drafted
    ours, own = drafter.propose(told), drafter.propose(replace(told, want_q=True))
    assert ours.sure_BN is not None and own.sure_BN is not None
    same_BN = (ours.tokens_BN == own.tokens_BN).cumprod(1).bool()
    assert torch.allclose(ours.sure_BN[same_BN], own.sure_BN[same_BN], atol=0.05)
    assert bool((ours.sure_BN <= 1e-6).all()) and same_BN[:, 1:].any()

    # A twin: one whose tokens are fed too far on.
    def late(*given: Any) -> TokenTree:
        return grow_tree.grow_at_once(*given[:-1], given[-1] + 20)

    module = "drafters.block" if name == BLOCK else "drafters.eagle"
    module = "draft_lms.lm" if name in LMS else module
    module = "untrained.own_layers" if name in OWN else module
    monkeypatch.setattr(f"draftsmith.decode.{module}.grow_at_once", late)
    assert told_apart(drafter, request)[0] > 0.02


@pytest.mark.parametrize("name", IN_CALLS)
@torch.inference_mode()
def test_a_heads_states_are_torchs(name: str, target: PreTrainedModel) -> None:
    """After a round: of five kept tokens, in C++ and in torch, beside exact ones."""
    found = []
    kept_BL, lens_B = torch.arange(20).view(4, 5) % VOCAB, torch.tensor([len(t) - 1 for t in TEXTS])
    for kind in ("native", "torch", "exact"):
        exact = kind == "exact"
        drafter = drafter_of(name, target)
        assert isinstance(drafter, EagleDrafter) and isinstance(drafter.body, LeanEagle)
        assert drafter.body.native is not None
        if kind == "torch":
            drafter.body.native = None
        if exact:
            drafter = EagleDrafter(head_of(name).float(), target.float(), VOCAB)
            begin(drafter, target, TEXTS)
            target.bfloat16()
        width = len(drafter.taps) * 64
        taps_BLU = torch.randn(4, 5, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        drafter.extend(Kept(kept_BL, torch.full((4,), 5), None, lens_B, taps_BLU, top=32))
        found.append((drafter.state_BH.float(), drafter.pool.kv_2LBSHE.float()))
    for ours, own, right in zip(*found, strict=True):
        assert (ours - right).norm() <= 1.5 * (own - right).norm() + 1e-6 * right.norm()


def easy(target: PreTrainedModel) -> Drafter:
    lm = drafter_of("lm", target)
    assert isinstance(lm, LMDrafter)
    return EasyDrafter(lm, 2)


@torch.inference_mode()
def test_other_rounds_are_drafted_call_by_call(target: PreTrainedModel) -> None:
    drafter, request = drafter_of("lm", target), asked(1.0)
    assert isinstance(drafter, LMDrafter)

    def at_once(round: Round) -> bool:
        return grow_tree.at_once(round, drafter.native, drafter.runner.head) is not None

    assert at_once(request)
    rows = RowParams([SamplingParams(float(row)) for row in range(4)], CPU)
    others: dict[str, Callable[[], Round]] = {
        "tree": lambda: replace(request, plan=parse_tree("kary:2,2", 2)),
        "dynamic": lambda: replace(request, plan=parse_tree("dynamic:3,3,9", 3)),
        "drawn": lambda: replace(request, law=WITHOUT_REPLACEMENT),
        "logits": lambda: replace(request, want_q=True),
        "filtered": lambda: replace(request, params=SamplingParams(1.0, top_k=3)),
        "rows": lambda: replace(request, params=rows),
        "watched": lambda: replace(request, calls=[]),
        "stopped": lambda: replace(request, enough=lambda call: call.active_B),
        "judged": lambda: replace(request, chance=lambda call: call.log_q_BC),
    }
    assert [name for name, other in others.items() if at_once(other())] == []
    assert drafter.native is not None
    assert not drafter.native.drafts(drafter.runner.head, drafter.native.most + 1)
    assert easy(target).native is None


@pytest.mark.parametrize("name", PARALLEL)
def test_a_head_with_tokens_of_its_own_stays_in_torch(name: str, target: PreTrainedModel) -> None:
    drafter = drafter_of(name, target)
    assert isinstance(drafter, EagleDrafter) and isinstance(drafter.body, LeanEagle)
    assert drafter.body.native is None


def test_a_head_that_differs_there_stays_in_torch(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = LeanEagle.front.fget
    assert front is not None
    wrong = property(lambda lean: front(lean)._replace(of_state=front(lean).of_token))
    monkeypatch.setattr(lean_heads.LeanEagle, "front", wrong)
    drafter = drafter_of("eagle3", target)
    assert isinstance(drafter, EagleDrafter) and isinstance(drafter.body, LeanEagle)
    assert drafter.body.native is None


@torch.inference_mode()
def test_a_level_of_a_chain_costs_what_drafting_at_once_does(target: PreTrainedModel) -> None:
    runner, largest = Runner(target, VOCAB), parse_tree("eagle-25", None)
    costs = measured_costs(runner, drafter_of("eagle3", target), largest, 1, 20)
    assert costs.level is not None and costs.level > 0
    chain_of_4, slower = parse_tree("chain", 4), costs._replace(level=costs.level + 1.0)
    assert slower.of(chain_of_4) == pytest.approx(costs.of(chain_of_4) + 4.0)
    assert slower.of(largest) == costs.of(largest)
    block = measured_costs(runner, drafter_of(BLOCK, target), largest, 1, 20)
    assert block.level is not None and block.first is not None
    drafting = block.first + 3 * block.level  # the trunk's pass, and what is kept, once
    assert block.of(chain_of_4) == pytest.approx(drafting + block.verifying(chain_of_4))
    assert measured_costs(runner, drafter_of("peagle", target), largest, 1, 20).level is None
