"""A draft that is distilled from a tiny target."""

import pytest
from tiny_heads import ROWS, TOKENS, llama
from tiny_llama import build_llama

from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.losses.token_selection import Weighting
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.run.lora import Lora, with_lora
from draftsmith.train.teachers.teachers import StateTeacher


def distilled(dropout: float | None = None, **weighting: object) -> Distillation:
    """dropout: of adapters."""
    draft = build_llama(ROWS, layers=1, hidden=16, seed=1)
    if dropout is not None:
        pytest.importorskip("peft")
        lora = Lora(rank=4, dropout=dropout)
        draft = with_lora(draft, lora, given=True, seed=0)
    return Distillation(
        draft,
        StateTeacher(llama(), TOKENS),
        stages(Losses(), 2),
        vocab_size=TOKENS,
        warp=SamplingParams(1.0),
        weighting=Weighting(**weighting),  # type: ignore[arg-type]
    )
