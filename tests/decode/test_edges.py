"""Edges: the context's end, rows that finish early, drafters that are shared, memory, models that
can't be batched.
"""

import gc
import weakref

import pytest
import torch
from tiny_llama import build_llama
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from truths import PROMPTS, SETTINGS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.ngram import NgramDrafter


def free(length: int, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, ignore_eos=True, **options)


@pytest.mark.parametrize("settings", [{"K": 64}, {"tree": "dynamic:80,1,81"}, {"policy": "cost"}])
def test_drafts_may_reach_beyond_the_context(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    settings: dict,
) -> None:
    prompt = [[7] * 490]
    plain = Decoder(tiny_target, tiny_tokenizer).generate(prompt, free(40))[0]
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    got = Decoder(tiny_target, tiny_tokenizer, drafter, **settings).generate(prompt, free(40))[0]
    assert got.tokens == plain.tokens and len(got.tokens) == 22


def test_learned_positions_end_with_the_context(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    vocab = len(tiny_tokenizer)
    config = GPT2Config(
        vocab_size=vocab, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    plain = Decoder(model, tiny_tokenizer).generate([[7] * 58], free(20))[0]
    for drafter in (NgramDrafter(), LMDrafter(model, vocab)):
        got = Decoder(model, tiny_tokenizer, drafter, K=8).generate([[7] * 58], free(20))[0]
        assert got.tokens == plain.tokens and len(got.tokens) == 6


@pytest.mark.parametrize("attention", ["masked", "split", "flex"])
def test_a_finished_row_may_be_longer_than_the_others(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, attention: str
) -> None:
    prompts = [[7] * 300, [5, 9, 30]]
    plain = [Decoder(tiny_target, tiny_tokenizer).generate([p], free(60))[0] for p in prompts]
    params = free(60, stop_token_ids=(plain[0].tokens[1],))
    decoder = Decoder(tiny_target, tiny_tokenizer, batch_size=2, attention=attention)
    short, long = decoder.generate(prompts, params)
    assert short.tokens == plain[0].tokens[:2]
    assert long.tokens == plain[1].tokens[: len(long.tokens)]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafter_given_away_in_mid_stream_is_noticed(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    rows: int,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    first, second = (Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=n) for n in (rows, 1))
    stream = first.stream(PROMPTS[:2], free(30))
    next(stream)
    assert second.generate(PROMPTS[:1], free(5))[0].tokens
    with pytest.raises(ValueError, match="given to another decoder"):
        list(stream)
    # Both work again afterwards.
    expected = Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, free(20))
    for decoder in (first, second):
        got = decoder.generate(PROMPTS, free(20))
        assert [c.tokens for c in got] == [c.tokens for c in expected]


def test_the_old_room_is_gone_when_the_new_one_is_weighed(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2)
    decoder.generate(PROMPTS, free(4))
    assert decoder._batch is not None
    pools = [weakref.ref(decoder._batch.pool), weakref.ref(drafter.pool)]
    alive: list[bool] = []

    def weighing(device: torch.device) -> None:
        gc.collect()
        alive[:] = [pool() is not None for pool in pools]

    monkeypatch.setattr("draftsmith.decode.engine.decoder.available", weighing)
    decoder.generate([[5] * 300], free(4))
    assert alive == [False, False]
    batch = weakref.ref(decoder._batch)
    del decoder
    gc.collect()
    assert batch() is None  # though the drafter lives on


def test_every_call_is_weighed(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    decoder.generate([[5] * 100], free(100))
    room = decoder._batch
    decoder.generate([[5] * 150], free(40))
    assert decoder._batch is room and decoder.memory is not None
    assert decoder.memory.work.prompt == 150
    monkeypatch.setattr("draftsmith.decode.engine.decoder.available", lambda device: 1)
    with pytest.raises(ValueError, match="expected at most"):
        decoder.generate([[5] * 150], free(40, temperature=1.0, top_p=0.9))


def test_rounds_of_other_seeds_and_lengths_share_their_recordings(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    decoder.graphs = Graphs(decoder.stepper, lambda run: run)
    for seed in range(5):
        decoder.generate([[5, 6]], free(30 - seed, temperature=1.0, seed=seed))
    assert len(decoder.graphs.recordings) == 1
    decoder.generate([[5, 6]], free(20, temperature=0.5))
    assert len(decoder.graphs.recordings) == 2


def test_what_cannot_be_recorded_runs_as_it_is(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    def refuse(run: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    expected = Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, SETTINGS[0])
    decoder = Decoder(tiny_target, tiny_tokenizer)
    decoder.graphs = Graphs(decoder.stepper, refuse)
    with pytest.warns(UserWarning, match="rounds run uncaptured: operation not permitted"):
        got = decoder.generate(PROMPTS, SETTINGS[0])
    assert [c.tokens for c in got] == [c.tokens for c in expected]


def test_compiling_one_runner_leaves_others_of_the_model_alone(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    first = Runner(tiny_target, len(tiny_tokenizer))
    plain = first.call.enter
    first.compile(backend="eager")
    second = Runner(tiny_target, len(tiny_tokenizer))
    assert first.call.enter is not plain and second.call.enter is plain


def test_rotary_embeddings_of_the_longest_row_are_refused(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, rope_parameters=rope,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rotary embeddings of type \['dynamic', 'longrope'\]"):
        Decoder(LlamaForCausalLM(config), tiny_tokenizer)


@pytest.mark.parametrize(
    ("drafter", "settings", "temperature", "message"),
    [
        ("lm", {"rule": "block", "same_shape": True}, 1.0, "same_shape: got rule=block"),
        ("ngram", {"rule": "block"}, 1.0, "draws from no distribution"),
        ("ngram", {"lossy": "fuzzy:0.1", "allow_lossy": True}, 0.0, "no distribution to compare"),
        ("lm", {"tree": "dynamic:2,400,20"}, 0.0, "400 children wide"),
        ("short", {}, 0.0, "context of 16"),
    ],
)
def test_what_does_not_fit_is_said_before_decoding(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    drafter: str,
    settings: dict,
    temperature: float,
    message: str,
) -> None:
    vocab = len(tiny_tokenizer)
    short = build_llama(vocab, layers=1, hidden=32, seed=1)
    short.config.max_position_embeddings = 16
    made = {"ngram": NgramDrafter(), "short": LMDrafter(short, vocab)}
    made["lm"] = LMDrafter(build_llama(vocab, layers=1, hidden=32, seed=1), vocab)
    with pytest.raises(ValueError, match=message):
        Decoder(tiny_target, tiny_tokenizer, made[drafter], **settings).generate(
            [[5] * 20], free(9, temperature=temperature)
        )


@pytest.mark.parametrize("rule", ["coupled", "leviathan"])
@pytest.mark.parametrize("lossy", ["typical:0.01,0.01", "lenience:0.2", "fuzzy:0.4"])
def test_lossy_acceptance_keeps_more(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    lossy: str,
    rule: str,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    params = free(40, temperature=1.0)
    kept = []
    for settings in ({}, {"lossy": lossy, "allow_lossy": True}):
        decoder = Decoder(tiny_target, tiny_tokenizer, drafter, rule=rule, **settings)
        done = decoder.generate(PROMPTS, params)
        kept.append(sum(c.counters.emitted - c.counters.rounds for c in done))
    assert kept[1] > kept[0]
