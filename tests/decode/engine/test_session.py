"""A batch that stays open: requests of every kind come, go and are cancelled, drafters are swapped,
and each answer is the one that plain decoding gives.
"""

import copy
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from block_drafts import drafter
from block_drafts import made as made_block
from head_folders import made as made_head
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.draft_lms.pard import PardDrafter
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafters.hydra import HydraDrafter
from draftsmith.decode.drafters.medusa import MedusaDrafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Completion, Request, open_request
from draftsmith.decode.engine.session import Session
from draftsmith.decode.sampling import RowParams, SamplingParams, together, transform
from draftsmith.decode.top_k import likeliest
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.taps import target_states

Plain = tuple[PreTrainedModel, PreTrainedTokenizerBase]
WAYS = [
    SamplingParams(max_new_tokens=24),
    SamplingParams(temperature=1.0, max_new_tokens=18, seed=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=30, seed=6),
    SamplingParams(temperature=1.3, min_p=0.05, max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=40, stop_token_ids=(40, 41, 42), stop=("e",)),
]


def request_for(decoder: Decoder, index: int, params: SamplingParams) -> Request:
    return open_request(
        PROMPTS[index % len(PROMPTS)],
        index,
        index,
        tokenizer=decoder.tokenizer,
        params=params,
        context=200,
        end_ids=decoder.eos_ids,
    )


@cache
def alone(plain: Plain, index: int, params: SamplingParams) -> Completion:
    """What plain decoding answers, found once."""
    return Decoder(*plain).generate([PROMPTS[index % len(PROMPTS)]], params, [index])[0]


def until_idle(session: Session, each: Callable[[], None] = lambda: None) -> list[Request]:
    ended = []
    while session.busy:
        for request, tokens, end in session.step():
            assert tokens or end
            ended += [request] * end
        each()
    return ended


def behind_masks(model: PreTrainedModel, vocab: int) -> PardDrafter:
    """Its first token is right more often than not."""
    made = copy.deepcopy(model)
    made.config.pard_token, made.config.para_num = 5, 6
    return PardDrafter(made, vocab)


def drafter_of(kind: str, target: PreTrainedModel, draft: PreTrainedModel) -> Drafter | None:
    vocab = draft.config.vocab_size
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "lm": lambda: LMDrafter(draft, vocab),
        "pard": lambda: behind_masks(target, vocab),
        "ngram": NgramDrafter,
        "eagle3": lambda: EagleDrafter(made_head("eagle3", target), target, vocab),
        "medusa": lambda: MedusaDrafter(made_head("medusa", target), target, vocab),
        "hydra": lambda: HydraDrafter(made_head("hydra", target, prefixed=True), target, vocab),
        "block": lambda: drafter(made_block("noise-markov"), target),
        "domino": lambda: drafter(made_block("domino"), target),
    }
    return makers[kind]()


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        *(("lm", "chain"), ("lm", "eagle-25"), ("lm", "dynamic:3,2,6"), ("none", "chain")),
        *(
            ("pard", "chain"),
            ("pard", "eagle-25"),
            ("ngram", "chain"),
            ("eagle3", "eagle-25"),
            ("medusa", "chain"),
            ("hydra", "eagle-25"),
        ),
        *(("block", "dynamic:3,2,6"), ("domino", "dynamic:3,2,6"), ("block", "chain")),
    ],
)
def test_requests_of_every_kind_share_a_batch(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: str,
) -> None:
    """Rounds are of as many rows as need be, and no answer is another for it."""
    plain = tiny_target, tiny_tokenizer
    drafter = drafter_of(kind, tiny_target, tiny_draft)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, K=3)
    session = decoder.open_session(batch_size=6, max_length=200)
    order = random.Random(0)
    left = [request_for(decoder, i, WAYS[i % len(WAYS)]) for i in range(15)]
    cancelled = {4, 9}
    ended: list[Request] = []
    mixed, widths = 0, set()
    while left or session.busy:
        for _ in range(order.choice((0, 0, 0, 1, 2)) if left else 0):
            if left:
                session.submit(left.pop(0))
        for request, _, end in session.step():
            made = request.completion
            if made.index in cancelled and len(made.tokens) > 2 and not end:
                session.cancel(request)
                assert made.finish_reason == "abort"
            ended += [request] * end
        mixed += isinstance(session.batch.params, RowParams)
        widths |= session._parts.keys()
    assert widths & {1, 2, 4}, "no round was narrower than the batch"
    assert mixed > 3, "rows of different laws never shared a round"
    assert {r.completion.index for r in ended} == set(range(15)) - cancelled
    for request in ended:
        made, expected = request.completion, alone(plain, request.completion.index, request.params)
        assert (made.tokens, made.text) == (expected.tokens, expected.text), made.index
        assert made.finish_reason == expected.finish_reason
        assert len(made.accepted) == len(made.corrected) == len(made.tokens)
        assert not any(a and c for a, c in zip(made.accepted, made.corrected, strict=True))


def test_a_cancelled_request_leaves_the_queue_too(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    session = decoder.open_session(batch_size=1, max_length=200)
    first, second = (request_for(decoder, i, WAYS[0]) for i in range(2))
    session.submit(first)
    session.submit(second)
    session.step()
    assert (session.running, len(session.batch.rows.waiting)) == (1, 1)
    session.cancel(second)
    session.cancel(second)  # once more changes nothing
    assert (session.running, len(session.batch.rows.waiting)) == (1, 0)
    assert until_idle(session) == [first]
    assert second.completion.finish_reason == "abort" and not second.completion.tokens


def test_what_a_session_cannot_hold_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    session = decoder.open_session(batch_size=1, max_length=40)
    with pytest.raises(ValueError, match="expected at most 40 and 16 in this session"):
        session.submit(request_for(decoder, 0, SamplingParams(max_new_tokens=60)))
    with pytest.raises(ValueError, match="in the middle of another stream"):
        decoder.generate(["a"], SamplingParams())
    session.close()
    assert decoder.generate(["a"], SamplingParams(max_new_tokens=2))[0].tokens
    for other in ({"rule": "leviathan"}, {"lossy": "typical", "allow_lossy": True}):
        with pytest.raises(ValueError, match="expected rule=coupled alone"):
            Decoder(tiny_target, tiny_tokenizer, **other).open_session(batch_size=1, max_length=40)


def test_a_drafter_is_swapped_between_rounds(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    vocab = len(tiny_tokenizer)
    plain = tiny_target, tiny_tokenizer
    stranger = build_llama(vocab, layers=3, hidden=32, seed=9)
    broken = build_llama(vocab, layers=3, hidden=32, seed=9)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    decoder = Decoder(tiny_target, tiny_tokenizer, LMDrafter(stranger, vocab), K=4)
    session = decoder.open_session(batch_size=2, max_length=200)
    rates = {}
    for name, model in (("broken", broken), ("stranger", stranger), ("itself", tiny_target)):
        early = [request_for(decoder, i, WAYS[i % 3]) for i in range(2)]
        late = [request_for(decoder, i, WAYS[i % 3]) for i in range(2, 6)]
        for request in early:
            session.submit(request)
        for _ in range(3):
            session.step()
        assert session.running == 2, "the swap is to come in the middle of answers"
        session.swap_drafter(LMDrafter(model, vocab))
        for request in late:
            session.submit(request)
        until_idle(session)
        for request in early + late:
            expected = alone(plain, request.completion.index, request.params)
            assert request.completion.tokens == expected.tokens, name
        kept = [request.completion.counters for request in late]
        rates[name] = sum(c.emitted - c.rounds for c in kept) / sum(c.drafted for c in kept)
    assert rates["broken"] < 0.1 and rates["stranger"] < 0.2
    # What isn't kept lies beyond an answer's end.
    assert rates["itself"] > 0.8


def test_a_drafter_of_another_shape_is_refused(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    vocab = len(tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, LMDrafter(tiny_draft, vocab))
    deeper = LMDrafter(build_llama(vocab, layers=2, hidden=32, seed=1), vocab)
    with pytest.raises(ValueError, match=r"swap_drafter: got .*\(2, 2, .*expected .*\(2, 1, "):
        decoder.swap_drafter(deeper)
    assert decoder.drafter is not deeper
    with pytest.raises(ValueError, match="expected one of none"):
        Decoder(tiny_target, tiny_tokenizer).swap_drafter(deeper)


@pytest.mark.parametrize(
    ("kind", "tree"), [("lm", "chain"), ("eagle3", "chain"), ("eagle3", "eagle-25")]
)
def test_the_harvest_is_what_a_pass_over_the_text_gives(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: str,
) -> None:
    vocab = len(tiny_tokenizer)
    drafter: Drafter = LMDrafter(tiny_draft, vocab)
    if kind == "eagle3":
        drafter = EagleDrafter(made_head("eagle3", tiny_target), tiny_target, vocab)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3, tree=tree)
    found: list[tuple[Completion, Harvested]] = []

    def finished(request: Request, harvested: Harvested | None) -> None:
        assert harvested is not None
        found.append((request.completion, harvested))

    session = decoder.open_session(batch_size=2, max_length=200, finished=finished, harvest=True)
    for i in range(6):
        session.submit(request_for(decoder, i, WAYS[i % len(WAYS)]))
    until_idle(session)
    assert len(found) == 6
    for made, harvested in found:
        text = [*made.prompt_tokens, *made.tokens][:-1]
        ids, first = torch.tensor([text]), len(made.prompt_tokens)
        taps = drafter.taps if kind == "eagle3" else ()
        seen = target_states(tiny_target, taps, input_ids=ids)
        assert harvested.norm_AH.shape[0] == len(made.tokens) - 1
        torch.testing.assert_close(
            harvested.norm_AH, seen.norm_BTG[0, first:], atol=1e-4, rtol=1e-4
        )
        assert (harvested.taps_TU is None) == (kind == "lm")
        if harvested.taps_TU is not None:
            torch.testing.assert_close(harvested.taps_TU, seen.taps_BTF[0], atol=1e-4, rtol=1e-4)


def test_each_row_has_its_own_transform() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 50, dtype=torch.bfloat16)
    params = together(WAYS, torch.device("cpu"))
    assert isinstance(params, RowParams)
    for row, way in enumerate(WAYS):
        expected = transform(logits[row], way.temperature, way.top_k, way.top_p, way.min_p)
        assert torch.equal(params.transform(logits)[row], expected)
    quiet = params.quiet(torch.ones(5, 3, 50))
    assert quiet.amax((1, 2)).tolist() == [0, 1, 1, 1, 0]
    assert together([WAYS[0], WAYS[4]], torch.device("cpu")) is WAYS[0]


def test_the_likeliest_and_the_rest() -> None:
    logits = torch.tensor([[3.0, 1.0, -torch.inf, 2.0]])
    ids, log_p = likeliest(logits, 2)
    p = logits.softmax(-1)[0]
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(log_p.exp()[0], torch.stack([p[0], p[3], p[1]]))


@pytest.mark.parametrize("policy,waits", [("table:1-=0", True), ("table:1-2=0,3-=3", False)])
def test_prompts_wait_where_so_many_rows_draft_nothing(
    policy: str,
    waits: bool,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The drafter takes them in before it drafts."""
    drafter, heard = drafter_of("eagle3", tiny_target, tiny_draft), list[int]()
    assert drafter is not None
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4, policy=policy, K=3)
    prefill = drafter.prefill
    drafter.prefill = lambda new: heard.append(len(new.rows_R)) or prefill(new)  # type: ignore
    session = decoder.open_session(4, 96)
    for i, text in enumerate(PROMPTS[:3]):
        how = {"tokenizer": tiny_tokenizer, "params": WAYS[0], "context": 96}
        session.submit(open_request(text, i, 0, **how))
    session.step()
    assert session.running == 3 and heard == ([] if waits else [3])
    decoder.policy.next_plan = lambda *_: decoder.policy.plans[-1]  # type: ignore[method-assign]
    session.step()
    assert heard == ([1, 1, 1] if waits else [3])
    owed = session.batch.owed
    assert owed is not None and not owed.prompts
    session.close()


def test_rounds_compute_few_rows_that_nobody_has(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """So few numbers of rows that policies learn of each."""
    session = Decoder(tiny_target, tiny_tokenizer).open_session(14, 96)
    widths = [session._width(range(used)) for used in range(1, 15)]
    assert widths == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 14, 14]
    assert session._width([4, 0]) == 6 and session._width([]) == 1
    session.narrow = False
    assert session._width([0]) == 14
    session.close()
