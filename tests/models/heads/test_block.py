"""Block drafters as modules: what a row may know, what each light head is, and what begins as what.

Shapes: B rows of text, T positions, M anchors, n depths, U width of the taps, V vocabulary.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import FORMS, GRID, LEVELS, made
from eagle_drafts import SIZES, VOCAB
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads import block as heads_block
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.heads.head import assembled
from draftsmith.models.layers.layer import layer_like

T, ANCHOR = 24, 9
IDS_BT = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
TAPS_BTU = torch.randn(2, T, 64, generator=torch.Generator().manual_seed(2))
AT_BT = torch.arange(T).expand(2, -1)


def guess(states_BRH: Tensor) -> Tensor:
    """Of each row by itself."""
    return (states_BRH[..., 0].abs() * 1000).long() % VOCAB


def laws(
    head: Block,
    anchors: list[int],
    ids_BT: Tensor = IDS_BT,
    taps_BTU: Tensor = TAPS_BTU,
    at_BT: Tensor = AT_BT,
) -> tuple[Tensor, Tensor]:
    """Logits [B, M, n, V] without the light head and with it."""
    anchors_BM = torch.tensor([anchors] * len(ids_BT))
    base_BMnH, lit_BMnI = head.drafted(taps_BTU, ids_BT, at_BT, anchors_BM, guess)
    return base_BMnH @ head.target_head_VH.T, lit_BMnI @ torch.cat(head.heads, 1).T


def changed(x: Tensor, place: int) -> Tensor:
    """With other numbers at one position."""
    other = x.clone()
    other[:, place] = (other[:, place] + 7) % VOCAB
    return other


def moved(a: Tensor, b: Tensor) -> list[bool]:
    """Of [B, M, n, V] which depths differ; nothing may differ only a little."""
    gaps = (a - b).abs().amax((0, 1, 3)).tolist()
    assert all(gap < 1e-4 or gap > 1e-3 for gap in gaps), gaps
    return [gap > 1e-3 for gap in gaps]


@pytest.fixture(scope="module")
def bound(tiny_target: PreTrainedModel) -> dict[str, Block]:
    return {name: made(name).bind(tiny_target) for name in FORMS | GRID}


NAMES = list(FORMS | GRID)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_block_reads_what_is_before_it_and_its_own_path(
    bound: dict[str, Block], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's states before the anchor, none from it on; the pending token; and of the drafted
    ones what the light head reads. The twin, whose context is a position too long, is noticed.
    """
    head = bound[name]
    before = laws(head, [ANCHOR])
    for place in range(T):
        after = laws(head, [ANCHOR], taps_BTU=changed(TAPS_BTU, place))
        assert all(moved(before[1], after[1])) == (place < ANCHOR), place
    anywhere = laws(head, [ANCHOR], ids_BT=changed(IDS_BT, ANCHOR))
    assert all(moved(before[0], anywhere[0]))
    for place in (*range(ANCHOR), *range(ANCHOR + 1, T)):
        after = laws(head, [ANCHOR], ids_BT=changed(IDS_BT, place))
        assert not any(moved(before[0], after[0])), place
        back = [ANCHOR + depth - place for depth in range(LEVELS)]  # 0: the token just before
        whole = dict.fromkeys(("rnn", "gru", "path", "layer"), range(LEVELS))
        reads = ({"none": []} | whole).get(head.config.light, [0])
        wanted = [place > ANCHOR and steps in reads for steps in back]
        assert moved(before[1], after[1]) == wanted, place

    def leaking(allowed_BMT: Tensor, *more: Any, **others: Any) -> Any:
        return inner(allowed_BMT | allowed_BMT.roll(1, -1), *more, **others)

    inner = heads_block.Blocks
    monkeypatch.setattr(heads_block, "Blocks", leaking)
    twin = laws(head, [ANCHOR]), laws(head, [ANCHOR], taps_BTU=changed(TAPS_BTU, ANCHOR))
    assert any(moved(twin[0][1], twin[1][1]))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_blocks_are_each_block_alone(bound: dict[str, Block], name: str) -> None:
    """However close they stand; and a document after another is that document alone."""
    anchors = [3, 4, 11, T - 2]
    packed = laws(bound[name], anchors)
    for place, anchor in enumerate(anchors):
        for whole, lone in zip(packed, laws(bound[name], [anchor]), strict=True):
            assert torch.allclose(whole[:, place], lone[:, 0], atol=1e-4)
    second_BT = torch.cat([AT_BT[:, :7], AT_BT[:, : T - 7]], 1)
    beside = laws(bound[name], [anchor + 7 for anchor in (3, 8)], at_BT=second_BT)
    given = IDS_BT[:, 7:], TAPS_BTU[:, 7:], AT_BT[:, : T - 7]
    for ours, theirs in zip(beside, laws(bound[name], [3, 8], *given), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_causal_law_does_not_know_the_levels(bound: dict[str, Block], name: str) -> None:
    """One checkpoint drafts any depth; a full block does not."""
    head = bound[name]
    whole = laws(head, [ANCHOR])[1]
    for levels in range(1, LEVELS):
        short = Block(replace(head.config, levels=levels))
        short.load_state_dict(head.state_dict())
        short._borrowed = head._borrowed
        gap = (laws(short, [ANCHOR])[1] - whole[:, :, :levels]).abs().max()
        assert gap < 1e-4 if head.config.mask == "causal" else gap > 1e-3, (levels, gap)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_fresh_light_head_changes_nothing(bound: dict[str, Block], name: str) -> None:
    """Nor does any whose last map is zero: the trunk's law, to the last bit."""
    head = Block(bound[name].config)
    head._borrowed = bound[name]._borrowed
    head.load_state_dict({k: v for k, v in bound[name].state_dict().items() if "conv" not in k}, 0)
    light = {"light." + k: v for k, v in Block(head.config).light.state_dict().items()}
    for zeroed in (light, {k: 0 * v for k, v in light.items() if "after" in k or "down" in k}):
        head.load_state_dict(zeroed, strict=False)
        base, lit = laws(head, [ANCHOR])
        assert torch.equal(base, lit)
    base, lit = laws(bound[name], [ANCHOR])
    assert torch.equal(base, lit) == (head.config.light == "none")


@torch.no_grad()
def test_dflash2_begins_as_dflash(bound: dict[str, Block]) -> None:
    """Its convolutions keep what they are given, its selector adds nothing; then both matter."""
    plain = bound["dflash"]
    second = Block(bound["dflash2"].config)
    second.load_state_dict(plain.state_dict(), strict=False)
    second._borrowed = plain._borrowed
    wanted = laws(plain, [ANCHOR, 3])[1]
    assert torch.allclose(laws(second, [ANCHOR, 3])[1], wanted, atol=1e-6)
    for conv in second.convs[0]:
        kept = {k: v.clone() for k, v in conv.state_dict().items()}
        for parameter in conv.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        assert all(moved(laws(second, [ANCHOR, 3])[1], wanted))
        conv.load_state_dict(kept)


@torch.no_grad()
def test_a_convolution_by_hand() -> None:
    """Group by group and row by row; a block's first row has none before it."""
    conv = heads_block.TwoTap(32)
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter)
    x_BRH = torch.randn(2, 6, 32)
    got_BRH = conv(x_BRH, 3)
    for row, place, channel in torch.cartesian_prod(*map(torch.arange, (2, 6, 32))).tolist():
        delta_2G = (conv.delta.weight @ x_BRH[row, place]).view(2, 2)
        taps = conv.base[:, channel] + delta_2G[:, channel // 16]
        wanted = taps[0] * x_BRH[row, place, channel]
        if place % 3:
            wanted = wanted + taps[1] * x_BRH[row, place - 1, channel]
        assert torch.allclose(got_BRH[row, place, channel], wanted, atol=1e-5)


@torch.no_grad()
def test_light_heads_by_hand(bound: dict[str, Block]) -> None:
    """Each by its equation, along one path."""
    state_nH, path_n = torch.randn(3, 32), [5, 9, 200]
    for name in ("dspark", "gated-qwen", "dflash2", "rnn", "domino"):
        light: Any = bound[name].light
        embedded_nH = torch.randn(3, 32)
        carried_1S = s = torch.zeros(1, light.width)
        for state, token, embedded in zip(state_nH, path_n, embedded_nH, strict=True):
            given = state[None], torch.tensor([token]), embedded[None], carried_1S
            low_1R, carried_1S = light.low(*given)
            if name == "domino":
                s = light.cell(embedded[None], s)
                wanted = light.inner.weight @ torch.cat([state, s[0]])
                wanted = wanted * wanted.sigmoid()
            elif name == "rnn":
                read = torch.cat([s[0], light.before.weight[token], state])
                g, c, o = (light.gates.weight @ read + light.gates.bias).split(8)
                s, wanted = (g.sigmoid() * s[0] + (1 - g.sigmoid()) * c.tanh())[None], o.tanh()
            else:
                wanted = light.before.weight[token]
                if name == "gated-qwen":
                    gate = light.gate.weight @ torch.cat([state, wanted]) + light.gate.bias
                    wanted = wanted * gate.sigmoid()
                elif name == "dflash2":
                    wanted = wanted * (light.gate.weight @ state)
            assert torch.allclose(low_1R[0], wanted, atol=1e-5), name


@pytest.mark.parametrize("name", FORMS)
def test_gradients_reach_every_weight(bound: dict[str, Block], name: str) -> None:
    head = made(name).requires_grad_(True)
    head._borrowed = bound[name]._borrowed
    laws(head, [ANCHOR, 3])[1].logsumexp(-1).sum().backward()
    assert not [n for n, p in head.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", FORMS)
def test_a_saved_folder_drafts_as_before(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str
) -> None:
    head = made(name).bind(tiny_target)
    assert head.kind == (name if name in KINDS else "block")
    save_drafter(
        tmp_path / "drafter",
        kind=head.kind,
        model=head,
        tokenizer=tiny_tokenizer,
        target_fingerprint=fingerprint(tiny_target, tiny_tokenizer),
        provenance={},
        defaults={"K": 3},
    )
    loaded = load_drafter(str(tmp_path / "drafter"), tiny_target, tiny_tokenizer)
    assert isinstance(loaded, BlockDrafter) and loaded.kind == head.kind
    tensors = loaded.head.state_dict()
    assert tensors.keys() == head.state_dict().keys()
    assert all(torch.equal(tensors[key], value) for key, value in head.state_dict().items())
    assert torch.equal(laws(loaded.head, [ANCHOR])[1], laws(head, [ANCHOR])[1])
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    for key in ("taps", "levels", "light", "rank", "labels", "mask", "convs", "noise"):
        broken = {k: v for k, v in config.items() if k != key}
        with pytest.raises(ValueError, match=f"config.json: got {key}=None"):
            assembled(Block, broken, {})


def test_the_trunk_begins_as_the_targets_last_layers() -> None:
    target = build_llama(VOCAB, layers=3, hidden=32, seed=0).requires_grad_(False)
    head = Block(BlockConfig(layer_like(target, 2), (1, 2), LEVELS, rank=8)).init_from(target)
    for own, theirs in zip(head.layers, target.model.layers[1:], strict=True):
        ours = dict(own.named_parameters())
        assert all(torch.equal(ours[name], p) for name, p in theirs.named_parameters())
        assert not {p.data_ptr() for p in ours.values()} & {
            p.data_ptr() for p in theirs.parameters()
        }
    assert torch.allclose(head.mask, target.model.embed_tokens.weight.mean(0), atol=1e-6)


def test_a_narrow_layer_begins_as_the_largest_neurons() -> None:
    theirs = build_llama(VOCAB, layers=2, hidden=32, seed=0).requires_grad_(False)
    mlp, wide = theirs.model.layers[-1].mlp, theirs.config.intermediate_size
    large = torch.arange(wide) % 4 == 1
    for part in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T):
        part.mul_(torch.where(large, 2.0, 0.5)[:, None])
    head = made("narrow", narrow=int(large.sum()), sizes={"intermediate_size": wide})
    head.init_from(theirs)
    own = head.light.layers[0].mlp
    assert torch.equal(own.up_proj.weight, mlp.up_proj.weight[large])
    assert torch.equal(own.down_proj.weight, mlp.down_proj.weight[:, large])
    trunk, before = (of.layers[0].mlp.gate_proj.weight for of in (head, theirs.model))
    assert torch.equal(trunk, before)


LAYER = LlamaConfig(**SIZES, num_hidden_layers=1)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"light": "lamp"}, "got light='lamp', expected one of none, markov"),
    ({"labels": "late"}, "got labels='late', expected one of shifted, same"),
    ({"mask": "none"}, "got mask='none', expected one of full, causal"),
    ({"levels": 0}, "got 0 levels, rank 256, 2 taps, expected at least 1 of each"),
    ({"rank": 0}, "rank 0"),
    ({"taps": ()}, "0 taps"),
    ({"noise": True, "mask": "full"}, "got noise with labels=shifted, mask=full, expected shifted"),
    ({"noise": True, "labels": "same"}, "got noise with labels=same"),
    ({"convs": True, "layer": LlamaConfig(**SIZES | {"hidden_size": 40})}, "of 16, got 40"),
    ({"narrow": 8}, "got narrow=8 with light=markov, expected 0, or the width of"),
    *(({"light": "layer", "narrow": n}, f"got narrow={n} with light=layer") for n in (-1, 24, 64)),
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=[told[:24] for _, told in WRONG])
def test_what_cannot_be_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        BlockConfig(**{"layer": LAYER, "taps": (1, 2)} | fields)
    assert "\n" not in str(raised.value)
