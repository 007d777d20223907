"""Log-probabilities of what was emitted: the target's own at every place, whatever drafted it."""

from functools import cache

import pytest
import torch
from rounds import MODES, record_rounds, started
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion, Request, open_request
from draftsmith.decode.engine.session import Flight
from draftsmith.decode.sampling import LEAST_LOG_P, SamplingParams, told_log_probs

WAYS = [
    SamplingParams(max_new_tokens=24),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=30, seed=6),
    SamplingParams(temperature=1.3, max_new_tokens=12, ignore_eos=True, stop=("e",)),
]


def request_for(decoder: Decoder, index: int, top: int | None) -> Request:
    request = open_request(
        PROMPTS[index % len(PROMPTS)],
        index,
        index,
        tokenizer=decoder.tokenizer,
        params=WAYS[index % len(WAYS)],
        context=200,
        end_ids=decoder.eos_ids,
    )
    request.top = top
    return request


@cache
def alone(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: tuple[int, ...], index: int
) -> Completion:
    """What plain decoding answers, found once."""
    params = WAYS[index % len(WAYS)]
    return Decoder(target, tokenizer).generate([prompt], params, [index])[0]


@torch.inference_mode()
def by_a_whole_pass(target: PreTrainedModel, made: Completion, size: int) -> torch.Tensor:
    """log p [A, V] of the target alone, at temperature 1."""
    whole = torch.tensor([made.prompt_tokens + made.tokens])
    return target(whole).logits[0, len(made.prompt_tokens) - 1 : -1, :size].log_softmax(-1)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "recorded, late"])
@pytest.mark.parametrize("mode", ["chain", "static", "dynamic"])
def test_they_are_the_targets_for_those_who_ask(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
    late: bool,
) -> None:
    size = len(tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, LMDrafter(tiny_draft, size), **MODES[mode])
    decoder.late = late
    if late:
        record_rounds(decoder)
    session = decoder.open_session(3, 200)
    requests = [request_for(decoder, n, (None, 5, 0, 3)[n % 4]) for n in range(10)]
    for request in requests:
        session.submit(request)
    while session.busy:
        session.step()
    for number, request in enumerate(requests):
        made = request.completion
        want = alone(tiny_target, tiny_tokenizer, tuple(made.prompt_tokens), number)
        assert made.tokens == want.tokens
        if request.top is None:
            assert made.listed == []
            continue
        log_p_AV = by_a_whole_pass(tiny_target, made, size)
        assert len(made.listed) == len(made.tokens)
        for token, one, log_p_V in zip(made.tokens, made.listed, log_p_AV, strict=True):
            assert one.log_p == pytest.approx(float(log_p_V[token]), abs=1e-4)
            values, ids = log_p_V.topk(request.top)
            assert [which for which, _ in one.likeliest] == ids.tolist()
            assert [p for _, p in one.likeliest] == pytest.approx(values.tolist(), abs=1e-4)


def test_rounds_pay_for_it_while_someone_asks(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    session = decoder.open_session(2, 200)
    long, short = request_for(decoder, 0, None), request_for(decoder, 2, 2)
    launch, widths = session.launch, []

    def spied() -> Flight:
        asks, flight = short in session.batch.rows.requests, launch()
        widths.append((asks, flight.told.table.shape[1]))
        return flight

    session.launch = spied
    session.submit(short)
    session.submit(long)
    while session.busy:
        session.step()
    assert {*widths} == {(True, 6 + 1 + 2 * 2), (False, 6)}


def test_a_round_that_tells_them_reads_nothing(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree="eagle-25", batch_size=4)
    batch = started(decoder, SETTINGS[1]).batch
    batch.listed = 3
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = decoder.stepper.step(batch, decoder.policy.next_plan(), 64, None)
    length = told.levels + 1
    assert told.table.shape == (4, 2 * length + 4 + 7 * length)


def test_an_impossible_token_has_a_number_that_json_can_spell() -> None:
    logits_V = torch.tensor([0.0, -torch.inf, 1.0])
    told = told_log_probs(logits_V, torch.tensor(1), 3).tolist()
    assert told[0] == LEAST_LOG_P and told[1:4] == [2, 0, 1] and told[6] == LEAST_LOG_P
    assert told_log_probs(logits_V, torch.tensor(2), 0).shape == (1,)
