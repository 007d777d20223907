"""SpecDec++'s rows: how would a draft's tokens fare, all along a text that the target wrote?

    Y_i ~ q(. | prompt, X_<i)              the draft's own token, in place of the answer's X_i
    Z_i = X_i with probability r, else Y_i      what the draft then reads
    chance = min(1, p(Y_i | X_<i) / q(Y_i | X_<i))

A row for each i at which Z took Y_i: its chance is known by its two probabilities, and its states
are of the draft's pass over prompt and Z. They have seen drafted tokens before them, as they do
when rounds are decoded, while the chance is that after the target's tokens: the authors'
approximation (Huang et al., arXiv 2405.19715), meant to bring rows close to what a head meets.

Two states of the pass over Z go with a row: `draft_state`, of the token before Y_i, and
`token_state`, which has read Y_i: a head with state="parent" reads the first, "token" the second.
The numbers beside them are of the law that Y_i was drawn from, after X_<i.

Shapes: M prompt tokens, n answer tokens, T = M + n, V vocabulary, H hidden.
"""

import torch
from torch import Tensor

from draftsmith.decode import sampling
from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams, position_keys


def check_mixing(drafter: Drafter | None, params: SamplingParams, share: float) -> LMDrafter:
    """The draft, if rows can be mixed with it; ValueError if not."""
    if not isinstance(drafter, LMDrafter):
        raise ValueError(
            f"source=mixed: got a drafter of kind {drafter.kind if drafter else None}, expected a "
            "draft LM; a head reads the target's states, which a mixed text has not; use "
            "source=decoder"
        )
    if params.greedy:
        raise ValueError(
            "source=mixed: got temperature=0, expected one above 0: the chance p / q is that of a "
            "drawn token; use source=decoder for greedy decoding"
        )
    if not 0 <= share < 1:
        raise ValueError(f"mixing: got {share}, expected the share of the answer's tokens, [0, 1)")
    return drafter


@torch.inference_mode()
def mixed_rows(
    target: Runner,
    draft: LMDrafter,
    answer: Completion,
    number: int,
    params: SamplingParams,
    share: float,
) -> dict[str, Tensor]:
    """The columns (see `traces`) of an answer's rows. number: of the prompt, from which its draws
    are made, so that they are always the same ones; share: r. `kept` is drawn by the chance;
    `on_path` is true.
    """
    first = len(answer.prompt_tokens)
    ids_1T = torch.tensor([answer.prompt_tokens + answer.tokens], device=target.device)
    x_n = ids_1T[0, first:]
    p_states_TH, q_states_TH = (_states(runner, ids_1T) for runner in (target, draft.runner))
    p_logits_nV = params.transform(target.logits(p_states_TH[first - 1 : -1]))
    q_logits_nV = params.transform(draft.runner.logits(q_states_TH[first - 1 : -1]))

    # The answer came of the coupled noise; these streams are independent of it.
    position_1n = torch.arange(first, ids_1T.shape[1], device=x_n.device)[None]
    seed_1 = torch.tensor([sampling.request_seeds(params.seed, number)], device=x_n.device)
    draws, takes, keeps = (
        position_keys(seed_1, position_1n, stream)
        for stream in (sampling.DRAFT, sampling.ACCEPT, sampling.RESIDUAL)
    )
    score_nV = q_logits_nV - sampling.log_race(draws, q_logits_nV.shape[-1])[0]
    y_n = score_nV.argmax(-1)
    takes_x_n = sampling.uniform(takes)[0] < share
    z_1T = ids_1T.clone()
    z_1T[0, first:] = torch.where(takes_x_n, x_n, y_n)
    z_states_TH = _states(draft.runner, z_1T)

    both = (q_logits_nV, p_logits_nV)
    log_q_n, log_p_n = (x_nV.log_softmax(-1).gather(1, y_n[:, None])[:, 0] for x_nV in both)
    best_n2 = score_nV.topk(2).values
    columns = {
        "position": position_1n[0].int(),
        "token": y_n.int(),
        "log_q": log_q_n,
        "log_p": log_p_n,
        "entropy": torch.special.entr(q_logits_nV.softmax(-1)).sum(-1),
        "lead": best_n2[:, 0] - best_n2[:, 1],
        "kept": sampling.uniform(keeps)[0] < (log_p_n - log_q_n).exp(),
        "on_path": torch.ones_like(takes_x_n),
        "draft_state": z_states_TH[first - 1 : -1].bfloat16(),
        "token_state": z_states_TH[first:].bfloat16(),
    }
    return {name: column[~takes_x_n].cpu() for name, column in columns.items()}


def _states(runner: Runner, ids_1T: Tensor) -> Tensor:
    """The states [T, H] after the final norm, of one pass over a text."""
    hidden_1TH: Tensor = runner.body(input_ids=ids_1T, use_cache=False).last_hidden_state
    return hidden_1TH[0]
