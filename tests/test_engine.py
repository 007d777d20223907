"""Losslessness: whatever drafts, however batched, the answer is the plain decoder's, token by
token.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter, Round
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.drafters.ngram import NgramDrafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.reference import plain_decode
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, Topology, chain

PROMPTS = [
    "def main(",
    "import os, sys\nfor x in",
    "a",
    "class Foo:\n    def __init__(self, name):\n",
]


class Scripted:
    """A drafter told what the true answers are: always right, always wrong, half right, or EOS
    spam.
    """

    kind, parameter_bytes, context = "scripted", 0, 1 << 30

    def __init__(self, mode: str, truth: dict[tuple[int, ...], list[int]], vocab: int) -> None:
        self.mode, self.truth, self.vocab = mode, truth, vocab

    def nodes(self, levels: int) -> int:
        return 8

    def reset(self, rows: int, slots: int) -> None:
        self.known: list[list[int]] = [[] for _ in range(rows)]
        self.full: list[list[int]] = [[] for _ in range(rows)]

    def prefill(self, rows_R: Tensor, tokens_RN: Tensor, lens_R: Tensor, pending_R: Tensor) -> None:
        for i, row in enumerate(rows_R.tolist()):
            prompt = tokens_RN[i, : lens_R[i]].tolist()
            self.full[row] = prompt + self.truth[tuple(prompt)]
            self.known[row] = [*prompt, int(pending_R[i])]

    def _draft(self, row: int, depth: int) -> int:
        at = len(self.known[row]) + depth
        right = self.full[row][at] if at < len(self.full[row]) else 5
        wrong = (right + 1) % self.vocab
        choice = {"right": right, "wrong": wrong, "eos": 0, "half": wrong if at % 2 else right}
        return choice[self.mode]

    def propose(self, request: Round) -> TokenTree:
        drafted = [
            [self._draft(row, d) if known else 0 for d in range(request.levels)]
            for row, known in enumerate(self.known)
        ]
        tokens = torch.cat([request.pending_B[:, None], torch.tensor(drafted)], 1)
        return TokenTree(tokens, chain(request.levels, tokens.device), DETERMINISTIC)

    def extend(self, tokens_BL: Tensor, n_new_B: Tensor) -> None:
        for row, n in enumerate(n_new_B.tolist()):
            self.known[row] += tokens_BL[row, :n].tolist()


class Bushy(Scripted):
    """The same guesses spread over a tree with repeated and wrong siblings."""

    def propose(self, request: Round) -> TokenTree:
        topology = Topology.from_parents([-1, 0, 0, 0, 2, 2, 3, 5], torch.device("cpu"))
        rows = []
        for row, known in enumerate(self.known):
            d = [self._draft(row, i) if known else 0 for i in range(3)]
            wrong = [(t + 3) % self.vocab for t in d]
            rows.append([wrong[0], d[0], d[0], wrong[1], d[1], d[1], d[2]])
        tokens = torch.cat([request.pending_B[:, None], torch.tensor(rows)], 1)
        return TokenTree(tokens, topology, DETERMINISTIC)


SETTINGS = [
    SamplingParams(max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=40, seed=7),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=40, seed=8),
]


def truths(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> list[list[int]]:
    stops = () if params.ignore_eos else (0,)
    return [
        plain_decode(
            target,
            tokenizer(text).input_ids,
            params,
            vocab_size=len(tokenizer),
            stop_ids=stops,
            index=i,
        )
        for i, text in enumerate(PROMPTS)
    ]


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
    for name, drafter in drafters(tiny_draft, tiny_target, answers, len(tiny_tokenizer)).items():
        for K in (3,) if name.startswith("tree") else (1, 4):
            decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=K, batch_size=batch)
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
        decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=4, batch_size=4)
        batch = decoder._open(PROMPTS, params, None)
        decoder._admit(batch)
        for _ in range(6):
            _, emitted_BL, n_accepted_B = decoder._round(batch)
            n_new_B = decoder._commit(batch, emitted_BL, n_accepted_B)
            for row, request in enumerate(batch.rows.requests):
                request.completion.tokens += emitted_BL[row, : n_new_B[row]].tolist()
            batch.top = max(request.length for request in batch.rows.requests)
            check_kv(decoder, batch)


@torch.inference_mode()
def check_kv(decoder: Decoder, batch: object) -> None:
    for row, request in enumerate(batch.rows.requests):
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
