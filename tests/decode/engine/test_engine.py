"""Losslessness: whatever drafts, however batched, the answer is the plain decoder's, token by
token.
"""

import pytest
import torch
from scripted import Bushy, Scripted
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.engine.round import DecodeBatch
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.ngram import NgramDrafter


def drafters(
    draft: PreTrainedModel, target: PreTrainedModel, answers: dict, vocab: int
) -> dict[str, Drafter | None]:
    found: dict[str, Drafter | None] = {
        "none": None,
        "lm": LMDrafter(draft, vocab),
        "self": LMDrafter(target, vocab),
        "ngram": NgramDrafter(),
    }
    for mode in ("right", "wrong", "half", "eos"):
        found[mode] = Scripted(mode, answers, vocab)
        found[f"tree-{mode}"] = Bushy(mode, answers, vocab)
    return found


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "t1", "filtered"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_drafter_gives_the_plain_answer(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    batch: int,
) -> None:
    expected = truths(tiny_target, tiny_tokenizer, params)
    answers = {
        tuple(tiny_tokenizer(t).input_ids): e for t, e in zip(PROMPTS, expected, strict=True)
    }
    Ks = (4,) if batch == 1 else (1, 4)
    for name, drafter in drafters(tiny_draft, tiny_target, answers, len(tiny_tokenizer)).items():
        tree = "eagle-25" if name.startswith("tree") else "chain"
        for K in (3,) if name.startswith("tree") else Ks[: None if drafter else 1]:
            decoder = Decoder(
                tiny_target, tiny_tokenizer, drafter, K=K, batch_size=batch, tree=tree
            )
            got = [c.tokens for c in decoder.generate(PROMPTS, params)]
            assert got == expected, f"{name}, K={K}, batch={batch}"


def test_order_of_arrival_and_batch_change_nothing(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    params = SETTINGS[1]
    expected = truths(tiny_target, tiny_tokenizer, params)
    order = [2, 0, 3, 1]
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3, batch_size=2)
    got = decoder.generate([PROMPTS[i] for i in order], params, indices=order)
    assert [c.tokens for c in got] == [expected[i] for i in order]


@pytest.mark.parametrize("rule", ["coupled", "leviathan"])
def test_seed_and_number_make_the_noise(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    rule: str,
) -> None:
    """The run's seed and the prompt's number; the same two again give the same answer."""
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=2, rule=rule)
    answers = []
    for seed, number in ((7, 0), (8, 0), (7, 1), (7, 0)):
        params = SamplingParams(temperature=1.0, max_new_tokens=12, seed=seed, ignore_eos=True)
        answers.append(decoder.generate(PROMPTS[:1], params, [number])[0].tokens)
    assert answers[0] == answers[3]
    assert len({tuple(tokens) for tokens in answers}) == 3


def test_counters_of_an_always_right_draft(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(max_new_tokens=42, ignore_eos=True)
    decoder = Decoder(tiny_target, tiny_tokenizer, LMDrafter(tiny_target, len(tiny_tokenizer)), K=4)
    counters = decoder.generate(PROMPTS[:1], params)[0].counters
    # 41 tokens after the prefill's: 8 full rounds of 5, and one cut to the last token.
    assert (counters.rounds, counters.emitted, counters.drafted) == (9, 41, 36)
    assert counters.histogram == [0, 1, 0, 0, 8]
    assert counters.reached == [9, 9, 9, 9]


def test_stops_at_a_stop_token_inside_an_accepted_run(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    free = Decoder(tiny_target, tiny_tokenizer).generate(
        PROMPTS[:1], SamplingParams(max_new_tokens=30, ignore_eos=True)
    )[0]
    stop = free.tokens[12]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    got = Decoder(tiny_target, tiny_tokenizer, drafter, K=8).generate(PROMPTS[:1], params)[0]
    assert got.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert got.finish_reason == "stop"
    assert got.text == tiny_tokenizer.decode(got.tokens[:-1])
    assert free.finish_reason == "length"


def test_block_verification_is_lossless_at_temperature_0_and_runs_at_1(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3, batch_size=4, rule="block")
    got = [c.tokens for c in decoder.generate(PROMPTS, SETTINGS[0])]
    assert got == truths(tiny_target, tiny_tokenizer, SETTINGS[0])
    own = LMDrafter(tiny_target, len(tiny_tokenizer))
    same = Decoder(tiny_target, tiny_tokenizer, own, K=3, batch_size=4, rule="block")
    counters = [c.counters for c in same.generate(PROMPTS, SETTINGS[1])]
    # p = q up to rounding: block verification keeps (nearly) every draft.
    kept = sum(c.emitted - c.rounds for c in counters)
    assert kept >= 0.95 * sum(min(c.drafted, c.emitted) - c.rounds / 3 for c in counters)
    with pytest.raises(ValueError, match="rule block"):
        Decoder(tiny_target, tiny_tokenizer, NgramDrafter(), rule="block").generate(
            ["x x x x x x"], SETTINGS[1]
        )


def test_stream_adds_up_and_keeps_characters_whole(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    decoder = Decoder(
        tiny_target, tiny_tokenizer, LMDrafter(tiny_draft, len(tiny_tokenizer)), batch_size=2
    )
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    text = dict.fromkeys(range(4), "")
    for event in decoder.stream(PROMPTS, SETTINGS[1]):
        tokens[event.index] += event.tokens
        text[event.index] += event.text
        if event.completion is not None:
            assert event.completion.tokens == tokens[event.index]
            assert event.completion.text == text[event.index]
    assert all(tokens.values())


def test_two_streams_of_one_decoder_do_not_mix(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer, NgramDrafter())
    first = decoder.stream(PROMPTS[:1], SETTINGS[0])
    next(first)
    with pytest.raises(ValueError, match="another stream"):
        next(decoder.stream(PROMPTS[:1], SETTINGS[0]))
    first.close()
    assert decoder.generate(PROMPTS[:1], SETTINGS[0])[0].tokens


def test_same_shape_baseline_accepts_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SETTINGS[1]
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3, same_shape=True)
    got = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in got] == truths(tiny_target, tiny_tokenizer, params)
    assert all(c.counters.rounds == c.counters.emitted for c in got)


@pytest.mark.parametrize("params", SETTINGS[:2], ids=["greedy", "t1"])
def test_kv_after_each_commit_equals_a_fresh_prefill(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
) -> None:
    expected = truths(tiny_target, tiny_tokenizer, params)
    answers = {
        tuple(tiny_tokenizer(t).input_ids): e for t, e in zip(PROMPTS, expected, strict=True)
    }
    for drafter in (
        Scripted("half", answers, len(tiny_tokenizer)),
        Bushy("half", answers, len(tiny_tokenizer)),
    ):
        tree = "eagle-25" if isinstance(drafter, Bushy) else "chain"
        decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=4, batch_size=4, tree=tree)
        session = decoder._open(PROMPTS, params, None)
        session.admit()
        for _ in range(6):
            session.hear(session.launch())
            check_kv(decoder, session.batch)


@torch.inference_mode()
def check_kv(decoder: Decoder, batch: DecodeBatch) -> None:
    for row, request in enumerate(batch.rows.requests):
        if request is None:
            continue
        text = request.completion.prompt_tokens + request.completion.tokens
        length = int(batch.rows.lens_B[row])
        assert length <= len(text)
        fresh = decoder.runner.pool(1, length)
        decoder.runner.prefill(
            fresh, torch.tensor([0]), torch.tensor([text[:length]]), torch.tensor([length])
        )
        for ours, theirs in (
            (batch.pool.keys_LBSHE, fresh.keys_LBSHE),
            (batch.pool.values_LBSHE, fresh.values_LBSHE),
        ):
            gap = (ours[:, row, :length] - theirs[:, 0, :length]).abs().max()
            assert float(gap) < 1e-5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "got no tokens"), ([1] * 600, "context of 512"), ([5, 99999], "another tokenizer")],
)
def test_bad_prompts_get_a_clear_error(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(tiny_target, tiny_tokenizer).generate([prompt], SETTINGS[0])


def test_bad_settings_get_a_clear_error(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="K: got 0"):
        Decoder(tiny_target, tiny_tokenizer, NgramDrafter(), K=0)
    with pytest.raises(ValueError, match=r"rule: got 'blok'"):
        Decoder(tiny_target, tiny_tokenizer, NgramDrafter(), rule="blok")
    with pytest.raises(ValueError, match="batch_size"):
        Decoder(tiny_target, tiny_tokenizer, batch_size=0)


def test_answers_are_capped_at_the_context(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    got = Decoder(tiny_target, tiny_tokenizer, NgramDrafter()).generate([[7] * 500], params)[0]
    assert (len(got.tokens), got.finish_reason) == (12, "length")


class Breaks:
    """Makes a target's final norm give NaN for every row that holds a token."""

    def __init__(self, target: PreTrainedModel, token: int) -> None:
        self.embedding, self.token = target.get_input_embeddings(), token
        self.hook = self.embedding.register_forward_hook(self)

    def __call__(self, module: object, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == self.token)[..., None], torch.nan)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_broken_logits_end_their_own_row_only(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, where: str, late: bool
) -> None:
    """The row is named, the others don't notice, and what it leaves behind hurts nobody."""
    target = type(tiny_target)(tiny_target.config).eval()  # trainable: decodes by its own forward
    target.load_state_dict(tiny_target.state_dict())
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    params = SETTINGS[0]
    expected = truths(tiny_target, tiny_tokenizer, params)
    prompts = [tiny_tokenizer(text).input_ids for text in PROMPTS]
    if where == "prompt":
        poison = next(t for t in range(99, 320) if not any(t in e for e in expected + prompts))
        prompts.insert(1, [7, poison, 9])
        expected.insert(1, [])
    else:
        others = {t for i, e in enumerate(expected) if i != 1 for t in e}
        others |= {t for p in prompts for t in p}
        at, poison = next((i, t) for i, t in enumerate(expected[1]) if t not in others)
        assert at >= 1
        expected[1] = expected[1][: at + 1]
    breaks = Breaks(target, poison)
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=2)
    decoder.late = late
    done = decoder.generate(prompts, params)
    breaks.hook.remove()
    assert [c.finish_reason for c in done].count("error") == 1
    assert done[1].finish_reason == "error" and "prompt 1: got NaN logits" in done[1].error
    for i, (got, want) in enumerate(zip(done, expected, strict=True)):
        if i == 1:
            # The poison is fed with a draft, so that round's earlier tokens may be lost with it.
            assert want[: len(got.tokens)] == got.tokens
        else:
            assert got.tokens == want


@pytest.fixture(scope="module")
def stopping(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], SamplingParams, list[Completion]]:
    """Plain answers, a way that stops at a string of the first, and its plain answers."""
    free = SamplingParams(temperature=1.0, max_new_tokens=40, seed=7)
    texts = [c.text for c in Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, free)]
    params = SamplingParams(temperature=1.0, max_new_tokens=40, seed=7, stop=(texts[0][9:12],))
    return texts, params, Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, params)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("batch", [1, 3])
def test_reading_late_changes_nothing(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    stopping: tuple[list[str], SamplingParams, list[Completion]],
    batch: int,
    late: bool,
) -> None:
    """Stop strings, stop tokens and full lengths all end rows while a round is on its way."""
    texts, params, expected = stopping
    assert expected[0].text == texts[0][: texts[0].index(params.stop[0])]
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=batch, tree="eagle-25")
    decoder.late = late
    for _ in range(2):
        got = decoder.generate(PROMPTS, params)
        assert [(c.tokens, c.text) for c in got] == [(c.tokens, c.text) for c in expected]
        assert all(c.counters.emitted == len(c.tokens) - 1 for c in got)


def test_room_is_kept_between_calls_and_given_up_when_it_does_not_fit(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    first, second = (Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2) for _ in range(2))
    expected = truths(tiny_target, tiny_tokenizer, SETTINGS[0])
    rooms = []
    for decoder in (first, first, second, first):
        assert [c.tokens for c in decoder.generate(PROMPTS, SETTINGS[0])] == expected
        rooms.append(decoder._batch)
    assert rooms[0] is rooms[1]
    assert rooms[3] is not rooms[1]  # the drafter had worked for another decoder meanwhile
    first.generate(["x" * 200], SETTINGS[0])
    assert first._batch is not rooms[3]


def test_a_run_that_memory_does_not_hold_is_refused(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer, batch_size=64)
    monkeypatch.setattr("draftsmith.decode.engine.decoder.available", lambda device: 3 << 20)
    with pytest.raises(
        ValueError, match=r"memory: got batch_size=64 .* batch_size=\d+ .*would fit"
    ):
        decoder.generate(PROMPTS * 16, SETTINGS[0])


def test_a_context_too_small_for_the_draft_is_refused(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    small = build_llama(len(tiny_tokenizer), layers=1, hidden=32, seed=0)
    small.config.max_position_embeddings = 8
    with pytest.raises(ValueError, match="8 levels deep, expected less than the context of 8"):
        Decoder(small, tiny_tokenizer, LMDrafter(small, len(tiny_tokenizer)), K=8)
