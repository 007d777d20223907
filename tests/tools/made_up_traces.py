"""Traces for tests: chains of which tokens are kept by a logistic law of what a scorer may read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.traces.store import TraceWriter

HIDDEN, PROMPTS, ROUNDS, DEPTHS = 8, 100, 20, 4


def chain_columns(prompt: int, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Rounds of chains. log-odds of being kept: 2 * the first of its state + lead."""
    generator = torch.Generator().manual_seed(prompt)
    count = ROUNDS * DEPTHS
    depth_n = torch.arange(DEPTHS).repeat(ROUNDS) + 1
    state_nH = torch.randn(count, hidden, generator=generator).bfloat16()
    lead_n = torch.randn(count, generator=generator) + 3
    odds_n = 2 * state_nH[:, 0].float() + lead_n - 3
    kept_n = torch.rand(count, generator=generator) < odds_n.sigmoid()
    alive_RD = torch.cat([torch.ones(ROUNDS, 1), kept_n.view(ROUNDS, DEPTHS)[:, :-1]], 1)
    return {
        "round": torch.arange(ROUNDS).repeat_interleave(DEPTHS).int(),
        "node": depth_n.short(),
        "parent": (depth_n - 1).short(),
        "depth": depth_n.short(),
        "token": depth_n.int(),
        "log_q": torch.full((count,), -1.0),
        "log_p": -1.0 + torch.nn.functional.logsigmoid(odds_n),
        "lead": lead_n,
        "kept": kept_n,
        "on_path": alive_RD.cumprod(1).flatten().bool(),
        "draft_state": state_nH,
    }


def write_trace(
    folder: Path, about: dict[str, Any], change: Callable[..., Any] = dict, prompts: int = PROMPTS
) -> str:
    writer = TraceWriter(folder, {"settings": {}, **about}, max_bytes=1 << 30)
    for prompt in range(prompts):
        writer.add(prompt, change(chain_columns(prompt)))
    writer.close()
    return str(folder)
