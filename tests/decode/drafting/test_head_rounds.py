"""Heads in rounds of one call: their drafts and states are those of one round at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made as heads
from head_folders import ours
from several_rounds import (
    NEEDS,
    ROWS,
    TEXTS,
    WAYS,
    Pair,
    drafted_in_rounds,
    one_at_a_time,
    what,
)

from draftsmith.decode.drafters.falcon import FalconDrafter
from draftsmith.decode.drafters.load import drafter_of, load_drafter
from draftsmith.decode.drafting.base import Fed, Frontier
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.heads.block import Block
from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.heads.head import Head
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.trim import trimmed_head

pytestmark = NEEDS
CLOSE = {"rtol": 2**-5, "atol": 2**-6}  # a few roundings in bf16

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle3": ("eagle3", {"norm_output": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "layers": 2}),
    "normed": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "mtp": ("mtp", {}),
    "medusa": ("medusa", {"layers": 2}),
    "shared": ("medusa", {"own_heads": False}),
    "hydra": ("hydra", {"layers": 2, "head_bias": True}),
    "hydra++": ("hydra", {"prefixed": True}),
    "clover2": ("clover2", {"layers": 2}),
    "falcon-1": ("falcon-1", {}),
    "falcon-2": ("falcon-2", {}),
    "falcon-4": ("falcon-4", {}),
    "block": ("block", {"light": "layer", "last": True, "mask_token": -1}),
    "whole block": ("block", {"light": "layer", "labels": "same", "mask": "full", "layers": 2}),
    "dflash": ("dflash", {}),
    "dflash2": ("dflash2", {"layers": 2, "rank": 64}),
    "jetspec": ("jetspec", {"layers": 2}),
    "dspark": ("dspark", {"rank": 64}),
    "gated": ("block", {"light": "gated", "rank": 64}),
    "rnn": ("block", {"light": "rnn", "rank": 64}),
    "domino": ("domino", {"rank": 64}),
    "treeflash": ("treeflash", {}),
    "path": ("block", {"light": "path", "rank": 32}),
    "narrow": ("block", {"light": "layer", "narrow": 32}),
}
# That draft every other token alone.
TRIMMED = {f"some of {kind}": HEADS[kind] for kind in ("medusa", "clover2", "falcon-2", "dspark")}
TRIMMED["some of block"] = HEADS["block"]


def head_of(kind: str, pair: Pair, scale: float) -> Head:
    """Its matrices by that much; at 0.1 the noise decides what is kept."""
    name, about = (HEADS | TRIMMED)[kind]
    head = heads(name, pair[0], width=32, **about)
    whole = "base", "before.weight", "after.weight"  # of what products of two would lose
    for part, weight in head.named_parameters():
        weight.mul_(scale if weight.ndim > 1 and not part.endswith(whole) else 1.0)
    if isinstance(head, Block) and scale < 0.2:  # of the target's LM head
        head.norm.weight.mul_(scale)
    return head.bfloat16()


def loaded(kind: str, folder: Path, pair: Pair) -> Any:
    drafter: Any = load_drafter(str(folder), *pair)
    if kind not in TRIMMED:
        return drafter
    half = DraftVocab(torch.arange(0, drafter.head.rows, 2), drafter.head.rows)
    return drafter_of(trimmed_head(drafter.head, half), pair[0], len(pair[1]))


@pytest.mark.parametrize("kind", [*HEADS, *TRIMMED])
@pytest.mark.parametrize(("way", "batch"), [("greedy", 1), ("drawn", 1), ("drawn", 2)])
def test_what_a_head_holds_is_what_it_holds_after_one_at_a_time(
    pair: Pair,
    kind: str,
    way: str,
    batch: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Chains, what is kept of them, its states, and its keys and values up to the text's end; of
    block drafters, whose context is normed outside of a pass, as EAGLE-3.1's taps are, and of
    Clover's and Falcon's, up to a rounding of that.
    """
    head, about = head_of(kind, pair, 0.1), (HEADS | TRIMMED)[kind][1]
    folder = ours(tmp_path, head, *pair)
    # Shorter than a block of Falcon's.
    prompts = [[5], [7, 5]][:batch] if kind == "falcon-4" else TEXTS[2 : 2 + batch]

    def answered() -> tuple[list[Completion], list[Any]]:
        drafter = loaded(kind, folder, pair)
        decoder = Decoder(*pair, drafter, K=4 - batch, batch_size=batch)
        done = decoder.generate(prompts, WAYS[way])
        assert isinstance(drafter, HeadDrafter)
        kept = drafter.pool.kv_2LBSHE if drafter.layer is not None else []
        state = drafter.state_BW if isinstance(drafter, FalconDrafter) else drafter.state_BH
        return what(done), [state, *kept]

    found, held = answered()
    assert max(made) > 2
    one_at_a_time(monkeypatch)
    again, like = answered()
    once = isinstance(head, Block | Clover | Falcon) or bool(
        {"fc_norm", "norm_before_fc"} & {*about}
    )
    assert [one.tokens for one in found] == [one.tokens for one in again]
    assert found == again or once
    ends = [len(one.prompt_tokens) + len(one.tokens) - 1 for one in found]
    kept = sum(sum(one.accepted) for one in found)
    assert kept > 0 or way == "greedy"
    assert abs(kept - sum(sum(one.accepted) for one in again)) <= once
    near = {"rtol": 2**-6, "atol": 2**-7} if once else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(held[0], like[0], **near)
    for side, other in zip(held[1:], like[1:], strict=True):
        for row, end in enumerate(ends):
            torch.testing.assert_close(side[:, row, :end], other[:, row, :end], **near)


@pytest.mark.parametrize("kind", [*HEADS, *TRIMMED])
def test_a_chain_of_one_call_is_torchs(pair: Pair, kind: str, tmp_path: Path) -> None:
    """Token by token, by weights that say more than the noise; a rounding may decide a near tie."""
    drafter = loaded(kind, ours(tmp_path, head_of(kind, pair, 0.35), *pair), pair)
    K = min(drafter.levels, 6)  # Falcon's in several passes
    decoder, logits = Decoder(*pair, drafter, K=K, batch_size=ROWS), list[torch.Tensor]()
    prompts = [[5], [7, 5], [9, 7, 5]] if kind == "falcon-4" else TEXTS[:ROWS]
    done = decoder.generate(prompts, replace(WAYS["greedy"], max_new_tokens=2))
    ends_B = torch.tensor([len(one.prompt_tokens) + len(one.tokens) - 1 for one in done])
    pending_B = torch.tensor([one.tokens[-1] for one in done])
    request = round_of(chain_plan(K), ROWS, len(pair[1]), torch.device("cpu"))
    request = replace(request, lens_B=ends_B, pending_B=pending_B, top=int(ends_B.max()))
    feed = drafter.feed(request)

    def noted(frontier: Frontier) -> Fed:
        fed: Fed = feed(frontier)
        logits.append(fed.logits_BFV[:, 0])
        return fed

    with torch.inference_mode():
        like = grow(request, noted)[0]
        found_BN = drafted_in_rounds(drafter, request, like)
    same = 0
    for row, (found, wanted) in enumerate(
        zip(found_BN.tolist(), like.tokens_BN.tolist(), strict=True)
    ):
        for depth in range(K):
            law_V, (got, best) = logits[depth][row], (x[1 + depth] for x in (found, wanted))
            assert float(law_V[best] - law_V[got]) <= 2**-6 * float(law_V[best].abs() + 1)
            if got != best:
                break
            same += 1
    assert same > 2 * ROWS and K > 2 and len(found_BN[:, 1:].unique()) > 1


def test_an_lstm_by_products_is_the_heads(pair: Pair, tmp_path: Path) -> None:
    """Of rows with fewer pairs than others, from what they remember."""
    drafter = loaded("falcon-2", ours(tmp_path, head_of("falcon-2", pair, 1.0), *pair), pair)
    noise, hidden = torch.Generator().manual_seed(0), drafter.head.hidden
    pairs = torch.randn(3, 5, hidden, generator=noise).bfloat16(), torch.arange(15).view(3, 5)
    memory_BS = torch.randn(3, 4 * hidden, generator=noise).bfloat16()
    last_B1 = torch.tensor([[4], [0], [2]])
    with torch.inference_mode():
        found = drafter._along(*pairs, memory_BS, last_B1)
        like = drafter.head.along(*pairs, memory_BS, last_B1=last_B1)
    for row, last in enumerate(last_B1[:, 0].tolist()):
        torch.testing.assert_close(*(y[0][row, : last + 1] for y in (found, like)), **CLOSE)
        torch.testing.assert_close(found[1][row], like[1][row], **CLOSE)
    assert found[0].abs().mean() > 0.1
