"""Acceptance where the target's own text is the context: alpha and coupled agreement."""

from typing import NamedTuple

import torch

from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams, choose, request_race
from draftsmith.models.taps import target_states


class TeacherForced(NamedTuple):
    """Over the positions of one prompt's answer: sums of alpha and coupled agreement, and count."""

    alpha: float
    coupled: float
    positions: int


@torch.inference_mode()
def teacher_forced(
    target: Runner, drafter: Drafter, completions: list[Completion], params: SamplingParams
) -> list[TeacherForced]:
    """Acceptance on the contexts that the target itself wrote (`completions`, of plain decoding):
    of a head, that of the first token it drafts. alpha is sum_v min(p, q) after the transform, at
    temperature 0 the agreement of argmaxes; coupled is whether both pick the same token with the
    request's own noise.
    """
    results = []
    for completion in completions:
        ids_1T = torch.tensor([completion.prompt_tokens + completion.tokens], device=target.device)
        first = len(completion.prompt_tokens)
        norm_1TH, taps_1TU = target_states(target.model, drafter.taps, input_ids=ids_1T)
        q_logits_1TV = drafter.teacher_logits(ids_1T, taps_1TU)
        assert q_logits_1TV is not None, f"a drafter of kind {drafter.kind} has no q"
        raw = target.logits(norm_1TH), q_logits_1TV
        p_TV, q_TV = (params.transform(logits)[0, first - 1 : -1] for logits in raw)
        length, vocab = p_TV.shape
        positions_T = torch.arange(first, first + length, device=p_TV.device)
        race_TV = request_race(params, completion.index, positions_T, vocab)
        alike = (choose(p_TV, race_TV) == choose(q_TV, race_TV)).sum()
        alpha = alike
        if not params.greedy:
            alpha = torch.minimum(p_TV.softmax(-1), q_TV.softmax(-1)).sum()
        results.append(TeacherForced(float(alpha), float(alike), length))
    return results
