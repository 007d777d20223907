"""Heads' products, layers and trees by the shorter ways of a CPU: what torch drafts."""

from dataclasses import replace
from typing import Any

import block_drafts
import pytest
import torch
from eagle_drafts import TEXTS, VOCAB, begin
from randomised import randomised
from tiny_hydra import layer
from tiny_llama import build_llama
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafters.hydra import HydraDrafter
from draftsmith.decode.drafters.medusa import MedusaDrafter
from draftsmith.decode.drafting.base import Frontier, Kept, Round
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.forward import native, product
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.lean_heads import LeanStack
from draftsmith.decode.forward.product import NativeProduct, Product, VocabHead
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.sampling import RowParams, SamplingParams, log_race, position_keys
from draftsmith.decode.token_tree import WITHOUT_REPLACEMENT
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa, MedusaConfig

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
CPU, K, TWO = torch.device("cpu"), 4, TEXTS[:2]
SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
BLOCKS = ("dflash", "dspark", "domino", "jetspec", "treeflash", "rnn", "gated-qwen", "noise-path")
BLOCKS += ("noise-layer",)
KINDS = ("medusa", "medusa-shared", "hydra", "hydra++", *BLOCKS)
Drafting = MedusaDrafter | HydraDrafter | BlockDrafter


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return build_llama(VOCAB, layers=3, hidden=64, seed=0).requires_grad_(False).bfloat16()


def drafter_of(kind: str, target: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> Drafting:
    """A random one, after two texts."""
    if kind in BLOCKS:
        head: Any = block_drafts.made(kind, sizes=SIZES, rank=16)
        drafts: Any = BlockDrafter
    elif kind.startswith("medusa"):
        own = kind == "medusa"
        head, drafts = Medusa(MedusaConfig(64, VOCAB, K, layers=2, own_heads=own)), MedusaDrafter
    else:
        plus = {"layers": 2, "prefix": layer(vocab_size=VOCAB, **SIZES), "head_bias": True}
        sizes = HydraConfig(64, VOCAB, K, **(plus if kind == "hydra++" else {}))
        head, drafts = Hydra(sizes), HydraDrafter
    if kind not in BLOCKS:
        randomised(head.eval().requires_grad_(False))
    for parameter in head.parameters():  # small enough that bf16 doesn't drown it
        parameter.mul_(0.5 if parameter.ndim > 1 else 1.0)
    drafter: Drafting = drafts(head.bfloat16().to(dtype), target.to(dtype), VOCAB)
    stack = getattr(getattr(drafter, "body", None), "stack", getattr(drafter, "prefix", None))
    for layers in (stack, getattr(drafter, "nodes", None)):
        if isinstance(layers, LeanStack) and layers.native is not None:
            layers.native.most = 32  # on a machine too where it isn't faster
    begin(drafter, target, TWO)
    return drafter


def after_a_round(drafter: Drafting) -> Drafting:
    """The same, three more tokens kept."""
    width = len(drafter.taps) * 64
    taps_BLU = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    lens_B = torch.tensor([len(text) - 1 for text in TWO])
    tokens_BL = torch.arange(6).view(2, 3) * 7
    drafter.extend(Kept(tokens_BL, torch.full((2,), 3), None, lens_B, taps_BLU, top=32))
    return drafter


def asked(tree: str, params: Any, **changes: Any) -> Round:
    """The next round after these, with the noise that the target will use."""
    lens_B = torch.tensor([len(text) + 2 for text in TWO])
    request = round_of(parse_tree(tree, K), 2, int(lens_B.max()), CPU)
    race_BDV = None
    if not params.greedy:
        at_BD = lens_B[:, None] + 1 + torch.arange(K + 1)
        race_BDV = log_race(position_keys(torch.arange(2), at_BD), VOCAB)
    about = {"lens_B": lens_B, "pending_B": torch.tensor([14, 35]), "race_BDV": race_BDV}
    return replace(request, **(about | {"params": params} | changes))


def laws(drafter: Drafting) -> list[Tensor]:
    """Logits at all depths of one path, of all rows; then what is kept of them. Depths together: of
    one alone bf16's roundings say little.
    """
    feed, found = drafter.feed(asked("chain", SamplingParams())), []
    tokens_BK = torch.tensor([[14, 3, 200, 77], [35, 9, 41, 310]])
    for depth in range(K):
        frontier = Frontier(depth, tokens_BK[:, depth, None], None, torch.tensor([depth]))
        found.append(feed(frontier).logits_BFV)
    kept = [drafter.pool.kv_2LBSHE] if hasattr(drafter, "pool") else []
    return [part.float() for part in (torch.cat(found, 1), drafter.state_BH, *kept)]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_laws_are_torchs(
    kind: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, calls, init = set(), NativeProduct.__call__, NativeProduct.__init__
    states, keep = native.NativeBody.states, native.NativeBody.keep

    def begun(self: NativeProduct, *given: Any, **how: Any) -> None:
        init(self, *given, **how)
        self.most = 32  # on a machine too where it isn't faster

    def called(self: NativeProduct, x: Tensor) -> Tensor | None:
        made = calls(self, x)
        ran.add("a prompt" if made is None else "products")
        return made

    def passed(self: native.NativeBody, *given: Any) -> tuple[Tensor, Tensor]:
        ran.add("layers")
        return states(self, *given)

    def kept(self: native.NativeBody, *given: Any) -> bool:
        made = keep(self, *given)
        ran.add("kept" if made else "a prompt")
        return made

    with monkeypatch.context() as watched:
        watched.setattr(NativeProduct, "__init__", begun)
        watched.setattr(NativeProduct, "__call__", called)
        fast = drafter_of(kind, target)
        ran.clear()
        watched.setattr(native.NativeBody, "states", passed)
        watched.setattr(native.NativeBody, "keep", kept)
        ours = laws(after_a_round(fast))
    layers = ["layers"] * (kind in ("hydra++", *BLOCKS)) + ["kept"] * (kind in BLOCKS)
    assert ran == {"products", *layers}
    with monkeypatch.context() as without:
        for place in (native, product):
            without.setattr(place, "library", lambda: None)
        slow = drafter_of(kind, target)
        own = laws(after_a_round(slow))
    exact = laws(after_a_round(drafter_of(kind, target, torch.float32)))
    for place, (mine, torchs, right) in enumerate(zip(ours, own, exact, strict=True)):
        most = 1.5 * (torchs - right).norm() + 1e-3 * right.norm()
        assert (mine - right).norm() <= most, place


@needs_compiler
@torch.inference_mode()
def test_a_full_block_isnt_taken_for_a_causal_one(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = laws(after_a_round(drafter_of("dflash", target)))
    states = native.NativeBody.states

    def causal(self: native.NativeBody, *given: Any) -> tuple[Tensor, Tensor]:
        seen = given[2].attend.seen
        given[2].attend.seen = replace(seen, block=None)
        return states(self, *given)

    monkeypatch.setattr(native.NativeBody, "states", causal)
    wrong = laws(after_a_round(drafter_of("dflash", target)))
    assert (wrong[0] - right[0]).norm() > 0.1 * right[0].norm()


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_products_of_few_tokens(bias: bool) -> None:
    """Of a sum that is as near as bf16 is, by C++ and, without it, by oneDNN, or in fp32; by C++
    the same whoever is with a token; changes are followed.
    """
    torch.manual_seed(0)
    inputs = 208
    weights = [torch.randn(outputs, inputs).bfloat16() for outputs in (38, 5)]
    biases = [torch.randn(len(weight)).bfloat16() for weight in weights] if bias else []
    made, x_TI = Product(weights, biases), torch.randn(7, inputs).bfloat16()
    assert made.native is not None and made.version == -1, "nothing is packed before it is needed"
    packs = Product(weights, biases)
    packs.native = None
    for turn in range(2):
        weight_OI = torch.cat(weights).double()
        right_TO = x_TI.double() @ weight_OI.T + (torch.cat(biases).double() if bias else 0)
        for tokens in range(1, 8):
            for product_ in (made, packs):
                error_TO = (product_(x_TI[:tokens]).double() - right_TO[:tokens]).abs()
                assert (error_TO <= 2**-8 * right_TO[:tokens].abs() + 1e-4).all(), (turn, tokens)
        alone = torch.cat([made(x_TI[t : t + 1]) for t in range(7)])
        assert torch.equal(alone, made(x_TI)) and torch.equal(made(x_TI[:, None])[:, 0], alone)
        weights[1].mul_(2)
    assert made(x_TI[:0]).shape == (0, 43)
    assert Product([weights[0][:, :184].clone()]).native is None


@needs_compiler
@pytest.mark.parametrize("size", [96, 70])
@torch.inference_mode()
def test_a_targets_logits_are_a_rounds_whatever_its_tokens(size: int, one_thread: None) -> None:
    """The same bits alone and among as many tokens as a round has. States of another dtype are
    refused, not misread.
    """
    torch.manual_seed(0)
    rows_VH, x_TH = torch.randn(size, 384).bfloat16(), torch.randn(96, 384).bfloat16()
    head = VocabHead(rows_VH, None, size)
    right_TV = x_TH.double() @ rows_VH.T.double()
    among_TV = head.logits(x_TH)
    assert ((among_TV - right_TV).abs() <= 2**-8 * right_TV.abs() + 1e-4).all()
    if product.library().most():
        assert head.native is not None
        assert head.version == -1, "nothing is packed for what isn't multiplied"
        for tokens in (1, 5, 6, 7, 17, 32):
            assert torch.equal(head.logits(x_TH[:tokens]), among_TV[:tokens]), tokens
        assert head.native(x_TH.float()) is None


@torch.inference_mode()
def test_several_threads_have_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and nothing is packed for oneDNN that it doesn't multiply."""
    head = VocabHead(torch.randn(640, 384).bfloat16(), None, 640)
    x_TI = torch.randn(3, 384).bfloat16()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone_TV = head.logits(x_TI)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(head.logits(x_TI), alone_TV)
    assert head.native is None or head.version == -1


ASKS: dict[str, Any] = {
    "greedy": SamplingParams(),
    "t0.7": SamplingParams(0.7),
    "filtered": SamplingParams(1.0, top_k=20),
    "rows": RowParams([SamplingParams(), SamplingParams(1.0)], CPU),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "dflash", "jetspec"])
@torch.inference_mode()
def test_a_tree_of_known_laws_is_the_one_grown(
    kind: str, ask: str, target: PreTrainedModel
) -> None:
    # In fp32: of equal scores, which bf16 has, any may come first.
    drafter = after_a_round(drafter_of(kind, target, torch.float32))
    for tree in ("chain", "eagle-25", "medusa-63", "kary:2,1,3"):
        request = asked(tree, ASKS[ask])
        at_once, feed = drafter.at_once(request), drafter.feed(request)
        assert at_once is not None
        grown, _ = grow(request, feed)
        assert torch.equal(at_once.tokens_BN, grown.tokens_BN), tree
        assert at_once.topology is grown.topology and at_once.law == grown.law


@torch.inference_mode()
def test_other_rounds_grow(target: PreTrainedModel) -> None:
    drafter, sampled = drafter_of("medusa", target), SamplingParams(1.0)
    others: dict[str, Round] = {
        "dynamic": asked("dynamic:3,3,9", sampled),
        "drawn": asked("chain", sampled, law=WITHOUT_REPLACEMENT),
        "logits": asked("chain", sampled, want_q=True),
        "watched": asked("chain", sampled, calls=[]),
        "stopped": asked("chain", sampled, enough=lambda call: call.active_B),
        "judged": asked("chain", sampled, chance=lambda call: call.log_q_BC),
    }
    assert [name for name, request in others.items() if drafter.at_once(request)] == []
    assert drafter_of("dspark", target).at_once(asked("chain", sampled)) is None
