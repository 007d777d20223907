"""Attention of given queries to a pool's slots in one call of `native.cpp`, for heads whose layers
torch runs.

Shapes: B rows, N tokens, A query heads of E numbers.
"""

import ctypes

import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, place, pointer
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.native import WIDTHS, Body, PassCall, laid


def attends(query_BNAE: Tensor, pool: KVPool) -> bool:
    """Whether `committed` is for such queries: where passes of as many tokens are in C++."""
    fits = query_BNAE.dtype == pool.kv_2LBSHE.dtype == torch.bfloat16
    fits = fits and query_BNAE.device.type == "cpu" and query_BNAE.shape[-1] in WIDTHS
    if not fits or torch.get_num_threads() > 1 or (made := library()) is None:
        return False
    return query_BNAE.shape[:2].numel() <= int(made.most())


def committed(query_BNAE: Tensor, pool: KVPool, layer: int, lens_B: Tensor, width: int) -> Tensor:
    """What queries see in a layer's first `lens` slots of their rows, of which at most `width`:
    [B, N, A, E].
    """
    query_BNAE, lens_B = query_BNAE.contiguous(), lens_B.contiguous()
    rows, many, heads, E = query_BNAE.shape
    body = Body(heads=heads, kv_heads=pool.kv_2LBSHE.shape[4], width=E, scale=E**-0.5)
    call = PassCall(rows, many, width, lens=pointer(lens_B), **laid(pool))
    call.block = call.lens  # of no slots
    out_BNAE = torch.empty_like(query_BNAE)
    at = ctypes.c_int64(layer), *map(place, (query_BNAE, out_BNAE))
    library().attend(ctypes.byref(body), ctypes.byref(call), *at)
    return out_BNAE
