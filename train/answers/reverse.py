"""Answers that a draft can learn: reverse speculative decoding (arXiv 2509.22230).

Target and draft read the same text. The target draws a token, and the draft accepts it unless it
is too improbable for it; after `TRIES` of them the draft draws one itself. So a token x has the law

    A = {x: q(x) >= min(least, max q)}      m = 1 - p(A), the chance that a draw is refused
    pi(x) = p(x) (1 + m + ... + m^(TRIES - 1)) + m^TRIES q(x) / q(A)      in A, else 0

which is drawn from at once, with the noise that the target alone would be sampled by: where nothing
is refused, the answer is the target's own.

p is the target's law as sampled, q the draft's at temperature 1 without filters, as it is trained;
at temperature 0 the law drawn from is on the best token alone. Where this differs from the paper's
code: A isn't also cut to the draft's 20 best tokens (at the paper's least of 0.01 there are at most
100), the target's law isn't cut to the 20 that its server tells, and what the draft draws itself
obeys the bound too.

Shapes: B rows, N tokens of a prompt, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.request import Event, Request, eos_ids, open_request
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.sampling import SamplingParams, choose, log_race, position_keys
from draftsmith.decode.verify.cascades import sampled
from draftsmith.models.scorers import check_threshold, weights_mark
from draftsmith.models.tokenizer import vocab_size

TRIES = 5  # the paper's


def learnable(
    p_logits_BV: Tensor, q_logits_BV: Tensor, params: SamplingParams, least: float
) -> Tensor:
    """log pi [B, V]. p_logits_BV: after the transform; q_logits_BV: raw."""
    q_BV = q_logits_BV.softmax(-1)
    inside_BV = q_BV >= q_BV.amax(-1, keepdim=True).clamp(max=least)
    p_BV = sampled(p_logits_BV, p_logits_BV.softmax(-1), params) * inside_BV
    own_BV = sampled(q_logits_BV, q_BV, params) * inside_BV
    refused_B1 = (1 - p_BV.sum(-1, keepdim=True)).clamp(min=0)
    accepted_BV = p_BV * sum(refused_B1**tried for tried in range(TRIES))
    return (accepted_BV + refused_B1**TRIES * own_BV / own_BV.sum(-1, keepdim=True)).log()


class ReversePair:
    """A target and the LM in a drafter folder that write answers together, `batch_size` at a time.
    least: of q. ValueError for another drafter, a least outside (0, 1), and as `load_drafter`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: str,
        *,
        least: float,
        batch_size: int,
    ) -> None:
        check_threshold(least, "reverse.least")
        drafter = load_drafter(draft, model, tokenizer)
        if not isinstance(drafter, LMDrafter) or drafter.kind != "lm":
            raise ValueError(
                f"reverse.draft: got {draft}, a drafter of kind {drafter.kind if drafter else None}"
                ", expected a draft LM, which reads text alone; give the folder of one"
            )
        self.target, self.draft = Runner(model, vocab_size(tokenizer)), drafter.runner
        self.tokenizer, self.least, self.batch_size = tokenizer, least, batch_size
        self.mark = {"draft": weights_mark(draft), "least": least}  # what decides its answers

    @property
    def context(self) -> int:
        return min(self.target.context, self.draft.context)

    def stream(
        self, prompts: list[list[int]], params: SamplingParams, indices: list[int]
    ) -> Iterator[Event]:
        """The answers as they end; arguments and errors as of `Decoder.stream`."""
        ends = eos_ids(self.target.model, self.tokenizer)
        opened = partial(open_request, tokenizer=self.tokenizer, params=params)
        opened = partial(opened, context=self.context, end_ids=ends)
        for first in range(0, len(prompts), self.batch_size):
            several = range(len(prompts))[first : first + self.batch_size]
            requests = [opened(prompts[i], i, indices[i]) for i in several]
            for request in self._answered(requests, params):
                made = request.completion
                yield Event(made.index, made.tokens, made.text, made)

    @torch.inference_mode()
    def _answered(self, requests: list[Request], params: SamplingParams) -> Iterator[Request]:
        texts = [torch.tensor(request.completion.prompt_tokens) for request in requests]
        tokens_BN = pad_sequence(texts, batch_first=True).to(self.target.device)
        rows_B = torch.arange(len(texts), device=tokens_BN.device)
        lens_B = torch.tensor([len(text) for text in texts], device=tokens_BN.device)
        seeds_B = torch.tensor([request.seed for request in requests], device=tokens_BN.device)
        slots = tokens_BN.shape[1] + max(request.limit for request in requests)
        pools = [(runner, runner.pool(len(texts), slots)) for runner in (self.target, self.draft)]
        p_BV, q_BV = (runner.prefill(pool, rows_B, tokens_BN, lens_B)[0] for runner, pool in pools)
        left = dict(enumerate(requests))
        while True:
            law_BV = learnable(params.transform(p_BV), q_BV, params, self.least)
            keys_B1 = position_keys(seeds_B, lens_B[:, None])
            race_BV = None if params.greedy else log_race(keys_B1, law_BV.shape[-1])[:, 0]
            tokens_B = choose(law_BV, race_BV)
            told = tokens_B.tolist()
            for row, request in list(left.items()):
                request.completion.tokens.append(told[row])
                full = len(request.completion.tokens) == request.limit
                if full or told[row] in request.stop_ids:
                    request.finish()
                    yield left.pop(row)
            if not left:
                return
            new = tokens_B[:, None], lens_B[:, None], lens_B[:, None]
            p_BV, q_BV = (
                runner.logits(runner.verify(pool, *new, Seen(lens_B, pool.slots))[0])[:, 0]
                for runner, pool in pools
            )
            lens_B = lens_B + 1
