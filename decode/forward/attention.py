"""Attention of new tokens over the slots of their rows: one registered function, four backends.

    masked  one masked sdpa over the attended slots, the reference. A result depends on shapes alone
            (not on where a row's length falls), so it is the one for same-shape comparisons.
    split   the committed prefix and the block of new slots apart, merged by their log-sum-exps.
    varlen  the same, the prefix by torch's variable-length flash attention, which reads each row's
            own length alone. CUDA, bf16 or fp16.
    flex    flex attention over the same mask; compiled on CUDA.

All give what masked sdpa gives, up to rounding. `auto` is masked: the others make twenty times as
many calls a layer, or compile, and none has been measured to pay for it. varlen needs torch 2.12.

Queries of the heads that share a key-value head are packed: they become more rows of one product.
A sliding window of W shows a query at position t the positions t - W < position <= t, as
transformers' masks do (its cache of a window of 1 keeps all, by `[-0:]`). An attention sink
(GPT-OSS) is one more logit without a value: it scales the result by sigmoid(log-sum-exp - sink).

Shapes: B rows, N queries a row, S slots, M slots of the block, H query heads, K key-value heads,
G = H / K, R = G * N packed rows, E head width.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

QKV = tuple[Tensor, Tensor, Tensor]  # packed queries [B, K, R, E], keys and values [B, K, S, E]
Mixed = tuple[Tensor, Tensor]  # of packed queries: mixed [B, K, R, E], log-sum-exp [B, K, R]
ATTENTION = "draftsmith_slots"
PIECE = 256  # queries at a time where scores are held: a long prompt's would not fit at once
# What the flash call must be able to do for `varlen`; older signatures lack some of it.
NEEDED = {"seqused_k", "return_aux", "scale"}


@dataclass(frozen=True)
class Seen:
    """What new tokens attend to: the first lens_B slots of their row and, of the block of slots
    that begins there, what `block` marks: [N, M] or [B, N, M], True where query n sees slot
    lens + m. Without a block the queries are a chain: query n sees slots up to lens + n. width: of
    the slots looked at, a plain int that covers them all. depth: [M] or [B, M], how far beyond lens
    the position of each slot of the block is (a chain: 0, 1, ...). at: [B, S], the position of
    every slot looked at, where that isn't its number; of new tokens any that is far enough on.
    """

    lens_B: Tensor
    width: int
    block: Tensor | None = None
    depth: Tensor | None = None
    at: Tensor | None = None


class Attend:
    """What one pass attends to, by which backend; masks are made once for all layers of a kind.

    positions_BN: of the queries. window, wherever it is asked for: None is full attention. packed:
    where rows differ in how many they have, each one's place [M] in [B * N]; a pass is then [1, M].
    """

    packed: Tensor | None = None

    def __init__(
        self, seen: Seen, positions_BN: Tensor, *, groups: int, dtype: torch.dtype, backend: str
    ) -> None:
        self.seen, self.positions_BN, self.backend = seen, positions_BN, backend
        self.groups, self.dtype = groups, dtype
        self._made: dict[Any, Any] = {}
        self.weights: list[Tensor] = []  # of each layer, where the backend watches

    def once(self, make: Callable[["Attend", int | None], Any], window: int | None = None) -> Any:
        """make(self, window), made at the first call."""
        if (make, window) not in self._made:
            self._made[make, window] = make(self, window)
        return self._made[make, window]

    def mask(self, window: int | None) -> Tensor:
        """Additive mask [B, 1, R, S] over the attended slots."""
        return additive(self.allowed(window), self.groups, self.dtype)

    def allowed(self, window: int | None) -> Tensor:
        """[B, N, S], True where a query sees a slot."""
        seen, length = self.seen, self.positions_BN.shape[1]
        slot_S = torch.arange(seen.width, device=seen.lens_B.device)
        at_BS = slot_S.expand(len(seen.lens_B), -1) if seen.at is None else seen.at
        if seen.block is None:
            step_N = torch.arange(length, device=slot_S.device)
            allowed_BNS = slot_S <= (seen.lens_B[:, None] + step_N)[..., None]
        else:
            nodes = seen.block.shape[-1]
            node_BS = slot_S - seen.lens_B[:, None]
            inside_BS = (node_BS >= 0) & (node_BS < nodes)
            node_BS = node_BS.clamp(0, nodes - 1)
            node_BNS = node_BS[:, None].expand(-1, length, -1)
            family_BNS = seen.block.expand(len(node_BS), -1, -1).gather(2, node_BNS)
            before_BS = slot_S < seen.lens_B[:, None]
            allowed_BNS = (family_BNS & inside_BS[:, None]) | before_BS[:, None]
            if seen.depth is not None and seen.at is None:
                depth_BS = seen.depth.expand(len(node_BS), -1).gather(1, node_BS)
                at_BS = torch.where(inside_BS, seen.lens_B[:, None] + depth_BS, slot_S)
        if window is None:
            return allowed_BNS
        return allowed_BNS & (at_BS[:, None] > self.positions_BN[..., None] - window)

    def prefix(self, window: int | None) -> Tensor:
        """Additive mask [B, 1, R, S] of the committed slots alone."""
        slot_S = torch.arange(self.seen.width, device=self.seen.lens_B.device)
        before_B1S = (slot_S < self.seen.lens_B[:, None])[:, None]
        return additive(self.allowed(window) & before_B1S, self.groups, self.dtype)

    def block(self, window: int | None) -> Tensor:
        """Additive mask [B, 1, R, M] of the block of new slots."""
        at_BNM = self.block_slots()[:, None].expand(-1, self.positions_BN.shape[1], -1)
        return additive(self.allowed(window).gather(2, at_BNM), self.groups, self.dtype)

    def block_slots(self, window: int | None = None) -> Tensor:
        """Slots [B, M] of the block."""
        block = self.seen.block
        nodes = self.positions_BN.shape[1] if block is None else block.shape[-1]
        step_M = torch.arange(nodes, device=self.seen.lens_B.device)
        # Rows that have finished may be longer than what is looked at: any slot will do.
        return (self.seen.lens_B[:, None] + step_M).clamp(max=self.seen.width - 1)

    def lens(self, window: int | None = None) -> Tensor:
        """Lengths of the prefixes, as the flash call wants them."""
        return self.seen.lens_B.int()


def additive(allowed_BNS: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, G * N, S] of packed queries."""
    mask_BNS = torch.zeros(allowed_BNS.shape, dtype=dtype, device=allowed_BNS.device)
    mask_BNS = mask_BNS.masked_fill_(~allowed_BNS, float("-inf"))
    return mask_BNS[:, None, None].expand(-1, 1, groups, -1, -1).flatten(2, 3)


def mix(
    attend: Attend,
    query_BHNE: Tensor,
    key_BKSE: Tensor,
    value_BKSE: Tensor,
    *,
    scale: float | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention by the backend of `attend`, [B, N, H, E]; of a packed pass [1, M, H, E], by a
    rectangle as wide as the longest row: the products with weights are what a pass costs.
    """
    if (packed := attend.packed) is not None:
        rows_BNHE = spread(query_BHNE.transpose(1, 2), packed, attend.positions_BN.shape)
        query_BHNE = rows_BNHE.transpose(1, 2)
    batch, heads, length, width = query_BHNE.shape
    qkv = query_BHNE.reshape(batch, key_BKSE.shape[1], -1, width), key_BKSE, value_BKSE
    scale = width**-0.5 if scale is None else scale
    if attend.backend == "masked" and sinks_H is None:
        mask = attend.once(Attend.mask, window)
        mixed = F.scaled_dot_product_attention(*qkv, mask, scale=scale)
        mixed = mixed.view(batch, heads, length, -1).transpose(1, 2)
    else:
        found = BACKENDS[attend.backend](attend, qkv, scale, window)
        mixed = unpacked(found, query_BHNE, sinks_H)
    return mixed if packed is None else mixed.flatten(0, 1)[packed][None]


def spread(x_1MX: Tensor, packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Packed nodes in their places [B, N, ...], zeros in the others."""
    whole = x_1MX.new_zeros(shape[0] * shape[1], *x_1MX.shape[2:])
    return whole.index_copy_(0, packed, x_1MX[0]).unflatten(0, tuple(shape))


def unpacked(found: Mixed, query_BHNE: Tensor, sinks_H: Tensor | None) -> Tensor:
    """What was mixed for packed queries as [B, N, H, E] in their type, less what sinks take."""
    mixed = found[0].reshape(*query_BHNE.shape[:3], -1)
    if sinks_H is not None:
        mixed = mixed * kept(found[1].reshape(mixed.shape[:3]), sinks_H)
    return mixed.to(query_BHNE.dtype).transpose(1, 2)


def weigh(qkv: QKV, mask: Tensor, scale: float) -> Mixed:
    """Both results at least fp32; a row that sees nothing is 0 with -inf."""
    query, key, value = qkv
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) * scale) @ key.to(wide).transpose(-1, -2) + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(wide).min)[..., None]).exp()
    return weights @ value.to(wide), lse


def merge(parts: list[Mixed]) -> Mixed:
    """One attention from attentions over disjoint slots: each weighs exp(its log-sum-exp)."""
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    mixed = [out.to(lse.dtype) * (part - lse).exp()[..., None] for out, part in parts]
    return torch.stack(mixed).sum(0), lse


def kept(lse_BHN: Tensor, sinks_H: Tensor) -> Tensor:
    """[B, H, N, 1]: the share of the weight that an attention sink leaves."""
    return torch.sigmoid(lse_BHN - sinks_H[None, :, None])[..., None]


def _masked(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    return weigh(qkv, attend.once(Attend.mask, window), scale)


def _watched(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    """Masked; notes what each slot weighs, [B, K, S], summed over the packed queries."""
    mixed, lse = _masked(attend, qkv, scale, window)
    query, key = qkv[0].to(lse.dtype) * scale, qkv[1].to(lse.dtype)
    scores = query @ key.transpose(-1, -2) + attend.once(Attend.mask, window)
    attend.weights.append((scores - lse[..., None]).exp().sum(2))
    return mixed, lse


def _block(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    query, key, value = qkv
    at_BM = attend.once(Attend.block_slots)
    at_BKME = at_BM[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
    own = query, key.gather(2, at_BKME), value.gather(2, at_BKME)
    return weigh(own, attend.once(Attend.block, window), scale)


def _split(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    query, key, value = qkv
    committed = query, key[:, :, : attend.seen.width], value[:, :, : attend.seen.width]
    before = weigh(committed, attend.once(Attend.prefix, window), scale)
    return merge([before, _block(attend, qkv, scale, window)])


def _varlen(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    if window is not None:  # a node's window depends on its depth, which the kernel doesn't know
        return _split(attend, qkv, scale, window)
    batch, _, rows, _ = qkv[0].shape
    lens_B = attend.once(Attend.lens)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=lens_B.device)
    # Whole rows of the pool, so that keys and values are views of it.
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in qkv]
    mixed, lse = flash(
        *tokens,
        steps * rows,
        steps * qkv[1].shape[2],
        rows,
        attend.seen.width,
        scale=scale,
        seqused_k=lens_B,
        return_aux=varlen.AuxRequest(lse=True),
    )
    mixed = mixed.unflatten(0, (batch, rows)).transpose(1, 2)
    lse_BKR = lse.unflatten(1, (batch, rows)).transpose(0, 1)  # [K, B * R], whatever the docs say
    # What the kernel answers for a row without a prefix is its own affair.
    lse_BKR = lse_BKR.masked_fill((lens_B == 0)[:, None, None], float("-inf"))
    mixed = mixed.masked_fill((lens_B == 0)[:, None, None, None], 0)
    return merge([(mixed, lse_BKR), _block(attend, qkv, scale, window)])


def _flex(attend: Attend, qkv: QKV, scale: float, window: int | None) -> Mixed:
    call: Any = _compiled_flex() if qkv[0].is_cuda else flex.flex_attention
    mask, request = attend.once(_flex_mask, window), flex.AuxRequest(lse=True)
    mixed, aux = call(*qkv, block_mask=mask, scale=scale, return_aux=request)
    return mixed, aux.lse


def _flex_mask(attend: Attend, window: int | None) -> flex.BlockMask:
    allowed_BNS = attend.allowed(window).repeat(1, attend.groups, 1)
    batch, rows, width = allowed_BNS.shape

    def sees(b: Tensor, h: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        return allowed_BNS[b, q, slot]

    return flex.create_block_mask(sees, batch, None, rows, width, device=allowed_BNS.device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call. Without `attend` (prefill): its sdpa under the model's own
    mask, with sinks where the layer has them.
    """
    sinks_H, window = kwargs.get("s_aux"), kwargs.get("sliding_window")
    if attend is not None:
        mixed = mix(attend, query, key, value, scale=scaling, window=window, sinks_H=sinks_H)
        return mixed, None
    if sinks_H is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pieces = []
    for first in range(0, query.shape[2], PIECE):
        part = query[:, :, first : first + PIECE]
        if attention_mask is not None:
            allowed = attention_mask[:, 0, first : first + PIECE]
        else:  # transformers' sign for causal from the first key on; one query sees all
            step_S = torch.arange(key.shape[2], device=query.device)
            step_N = torch.arange(part.shape[2], device=query.device)
            allowed = ((step_S <= first + step_N[:, None]) | (query.shape[2] == 1))[None]
        mask = additive(allowed, query.shape[1] // key.shape[1], query.dtype)
        packed = part.reshape(len(part), key.shape[1], -1, part.shape[-1])
        pieces.append(unpacked(weigh((packed, key, value), mask, scale), part, sinks_H))
    return torch.cat(pieces, 1), None


def available(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The backends that this torch has on this device for this dtype."""
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    flashes = fits and inspect.signature(flash).parameters.keys() >= NEEDED
    return ["masked", "split", *["varlen"] * flashes, "flex"]


def resolve(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend meant by `name`; ValueError, naming those at hand, for one that isn't."""
    name, found = "masked" if name == "auto" else name, available(device, dtype)
    if name not in found:
        raise ValueError(
            f"attention: got {name!r}, expected auto, {', '.join(found)}: what torch "
            f"{torch.__version__} has on {device.type} in {str(dtype).removeprefix('torch.')} "
            "(varlen needs torch 2.12, CUDA and bfloat16 or float16)"
        )
    return name


flash: Callable[..., Any] = varlen.varlen_attn
BACKENDS = {"masked": _masked, "split": _split, "varlen": _varlen, "flex": _flex}
BACKENDS["watched"] = _watched  # for who asks what weighs, never for decoding
AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
