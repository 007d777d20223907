"""Targets whose layers keep a state: the answers are transformers' own, whatever is drafted."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB
from plain_decoding import plain_decode
from recurrent_targets import RECURRENT, recurrent
from rounds import reads_nothing, started
from scripted import Bushy, Scripted
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion, open_request
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.forward.states import StatePool
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.taps import decoder_layers

GREEDY, COUPLED = SamplingParams(max_new_tokens=24), SamplingParams(1.0, max_new_tokens=24)
MODEL = cache(recurrent)


@cache
def prompts() -> list[list[int]]:
    """Of unequal lengths, one longer than the chunk that prompts are read by."""
    rng = random.Random(4)
    return [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (3, 70, 1, 12, 5, 21)]


@cache
def by_transformers(family: str, params: SamplingParams) -> list[Completion]:
    """Greedy: `generate`; else plain decoding in the model's own cache. A prompt at a time."""
    made, model = [], MODEL(family)
    for index, prompt in enumerate(prompts()):
        if params.greedy:
            ids = torch.tensor([prompt])
            how: Any = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            tokens = model.generate(ids, max_new_tokens=24, **how)[0, len(prompt) :].tolist()
        else:
            how = {"vocab_size": VOCAB, "stop_ids": (0,), "index": index}
            tokens = plain_decode(model, prompt, params, **how)
        made.append(Completion(index, prompt, tokens))
    return made


def truth(family: str, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    return {tuple(c.prompt_tokens): c.tokens for c in by_transformers(family, params)}


def differing(
    model: PreTrainedModel, own: list[Completion], got: list[Completion], params: SamplingParams
) -> int:
    """Answers that differ beyond a confirmed near-tie."""
    found = divergences(own, got, model, params, vocab_size=VOCAB, dtype="float32")
    return sum(not d.near_tie for d in found)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", RECURRENT)
def test_scripted_drafts_change_nothing(
    family: str, params: SamplingParams, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Chains and trees of which all, none or some is kept; rows that come and go."""
    model, own = MODEL(family), by_transformers(family, params)
    trials: list[tuple[type[Scripted], str, int]] = [(Bushy, "half", 3), (Scripted, "half", 3)]
    if family in ("mamba2", "qwen3-next"):
        trials += [(Bushy, "right", 1), (Bushy, "wrong", 3), (Scripted, "right", 3)]
    for made, mode, rows in trials:
        drafter = made(mode, truth(family, params), VOCAB)
        how: dict[str, Any] = {"K": 4} if made is Scripted else {"tree": "dynamic:4,3,8"}
        decoder = Decoder(model, tiny_tokenizer, drafter, batch_size=rows, **how)
        got = decoder.generate(prompts(), params)
        assert differing(model, own, got, params) == 0, (mode, rows)
    got = Decoder(model, tiny_tokenizer, batch_size=3).generate(prompts(), params)
    assert differing(model, own, got, params) == 0


@pytest.mark.parametrize("family", ["mamba2", "qwen3-next"])
def test_drafters_of_every_shape_change_nothing(
    family: str, tiny_draft: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A draft LM that has no state, over chains and both kinds of tree; and prompt lookup."""
    model = MODEL(family)
    for params, tree, rows in [(GREEDY, "eagle-25", 3), (COUPLED, "dynamic:3,3,9", 3)]:
        for drafter, shape in [
            (LMDrafter(tiny_draft, VOCAB), {"tree": tree}),
            (LMDrafter(tiny_draft, VOCAB), {"K": 3}),
            (NgramDrafter(), {"K": 4}),
        ]:
            decoder = Decoder(model, tiny_tokenizer, drafter, batch_size=rows, **shape)
            got = decoder.generate(prompts(), params)
            assert differing(model, by_transformers(family, params), got, params) == 0


def causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree taken for a chain."""
    tree = StatePool.tree
    monkeypatch.setattr(StatePool, "tree", lambda self, block, tokens: tree(self, None, tokens))


def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes are committed, not those of the path."""
    commit = StatePool.commit

    def first(self: StatePool, path_BL: torch.Tensor, n_B: torch.Tensor) -> None:
        commit(self, torch.arange(path_BL.shape[1]).expand_as(path_BL), n_B)

    monkeypatch.setattr(StatePool, "commit", first)


def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected tokens are committed too, as a cache that can't be rolled back does."""
    commit = StatePool.commit

    def whole(self: StatePool, path_BL: torch.Tensor, n_B: torch.Tensor) -> None:
        commit(self, path_BL, torch.full_like(n_B, path_BL.shape[1]))

    monkeypatch.setattr(StatePool, "commit", whole)


def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills a prompt up is taken in."""
    prefill = StatePool.prefill

    def whole(self: StatePool, rows: Any, lens: Any, layer: int, hidden: Any) -> Any:
        return prefill(self, rows, torch.full_like(lens, hidden.shape[1]), layer, hidden)

    monkeypatch.setattr(StatePool, "prefill", whole)


@pytest.mark.parametrize("breaks", [causal, in_order, everything, padded])
@pytest.mark.parametrize("family", ["mamba2", "qwen3.5"])
def test_a_broken_twin_differs(
    family: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model, own = MODEL(family), by_transformers(family, GREEDY)
    drafter = Bushy("half", truth(family, GREEDY), VOCAB)
    decoder = Decoder(model, tiny_tokenizer, drafter, batch_size=3, tree="dynamic:4,3,8")
    breaks(monkeypatch)
    got = decoder.generate(prompts(), GREEDY)
    assert differing(model, own, got, GREEDY) > 0


@pytest.mark.parametrize("family", ["mamba2", "qwen3-next"])
def test_a_session_whose_requests_come_and_go(
    family: str, tiny_draft: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """On a CPU a round computes the first rows alone; one request is cancelled on its way."""
    model, own = MODEL(family), by_transformers(family, GREEDY)
    decoder = Decoder(model, tiny_tokenizer, LMDrafter(tiny_draft, VOCAB), tree="dynamic:4,3,8")
    session = decoder.open_session(4, 128)
    how = {"tokenizer": tiny_tokenizer, "params": GREEDY, "context": 128, "end_ids": (0,)}
    requests = [open_request(prompt, i, i, **how) for i, prompt in enumerate(prompts())]
    for request in requests[:3]:
        session.submit(request)
    rounds, used = 0, set()
    while session.busy:
        session.step()
        rounds, used = rounds + 1, used | {session._part().pool.rows}
        if rounds == 3:
            session.cancel(requests[1])
        if rounds == 5:
            for request in requests[3:]:
                session.submit(request)
    session.close()
    assert len(used) > 1  # of several widths
    for request, answer in zip(requests, own, strict=True):
        made = request.completion
        if request is requests[1]:
            assert (
                made.finish_reason == "abort" and answer.tokens[: len(made.tokens)] == made.tokens
            )
        else:
            assert differing(model, [answer], [made], GREEDY) == 0


@torch.inference_mode()
def states_hold(decoder: Decoder, family: str, params: SamplingParams) -> None:
    """After each of some rounds they are those of transformers' own cache for the text so far."""
    session, model = decoder._open(prompts(), params, None), MODEL(family)
    session.admit()
    pool, rows = session.batch.pool, session.batch.rows
    assert pool.states is not None
    for _ in range(4):
        for row, request in enumerate(rows.requests):
            assert request is not None
            text = request.completion.prompt_tokens + request.completion.tokens
            ids = torch.tensor([text[:-1]])  # the last one is pending
            assert int(rows.lens_B[row]) == ids.shape[1]
            held = DynamicCache(config=model.config)
            named = "cache_params" if family == "mamba2" else "past_key_values"
            model(ids, use_cache=True, **{named: held})
            for layer, state_BJKE in pool.states.state.items():
                state = held.layers[layer].recurrent_states[0][0]
                state = state if "qwen" in family else state.transpose(1, 2)
                assert torch.allclose(state_BJKE[row], state, rtol=1e-3, atol=1e-4)
                conv = held.layers[layer].conv_states[0][0].T  # one more than is read again
                assert torch.allclose(pool.states.conv[layer][row], conv[1:], rtol=1e-3, atol=1e-4)
        session.hear(session.launch())
    session.close()


@pytest.mark.parametrize("family", RECURRENT)
def test_states_are_those_of_a_fresh_prefill(
    family: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = Bushy("half", truth(family, GREEDY), VOCAB)
    how: dict[str, Any] = {"batch_size": 6, "tree": "dynamic:4,3,8"}
    decoder = Decoder(MODEL(family), tiny_tokenizer, drafter, **how)
    states_hold(decoder, family, replace(GREEDY, ignore_eos=True))


@pytest.mark.parametrize(
    "how",
    [
        {"rule": "leviathan", "K": 3},
        {"rule": "recursive", "tree": "eagle-25"},
        {"rule": "traversal", "tree": "eagle-25"},
        {"same_shape": True, "tree": "eagle-25"},
    ],
    ids=lambda how: how.get("rule", "same shape"),
)
def test_states_hold_under_every_rule(
    how: dict[str, Any], tiny_draft: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = LMDrafter(tiny_draft, VOCAB)
    decoder = Decoder(MODEL("mamba2"), tiny_tokenizer, drafter, batch_size=6, **how)
    states_hold(decoder, "mamba2", SamplingParams(3.0, ignore_eos=True, max_new_tokens=24))


@torch.inference_mode()
def test_taps_are_the_models_hidden_states(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    for family in ("mamba2", "qwen3-next"):
        model = MODEL(family)
        runner = Runner(model, VOCAB, taps=(0, 2, "norm"), recurrent=True)
        ids = torch.tensor([prompts()[1]])
        _, taps_BTU = runner.states(ids)
        assert taps_BTU is not None
        seen: list[torch.Tensor] = []
        hook = decoder_layers(model)[1].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output)
        )
        norm = model.base_model(ids, use_cache=False).last_hidden_state
        hook.remove()
        own = torch.cat([model.get_input_embeddings()(ids), seen[0], norm], -1)
        assert torch.allclose(taps_BTU, own, rtol=1e-4, atol=1e-4)
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["mamba2", "qwen3.5"])
def test_a_round_reads_nothing_from_the_device(
    family: str, tiny_tokenizer: PreTrainedTokenizerBase, tiny_draft: LlamaForCausalLM
) -> None:
    for params, how in ((GREEDY, {"K": 3}), (COUPLED, {"tree": "dynamic:3,3,9"})):
        drafter = LMDrafter(tiny_draft, VOCAB)
        decoder = Decoder(MODEL(family), tiny_tokenizer, drafter, batch_size=2, **how)
        reads_nothing(decoder, started(decoder, params))


def test_states_are_planned_to_the_byte(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    for family in RECURRENT:
        decoder = Decoder(MODEL(family), tiny_tokenizer, NgramDrafter(), K=2, batch_size=3)
        decoder.generate(prompts(), SamplingParams(max_new_tokens=2))
        assert decoder.memory is not None and decoder._batch is not None
        pool = decoder._batch.pool
        assert pool.states is not None
        held = [pool.kv_2LBSHE, *pool.states.conv.values(), *pool.states.state.values()]
        assert decoder.memory.target_kv == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """fp64 gives the fp32 answers; bf16 decodes, all rows to their ends."""
    for family in ("mamba2", "qwen3.5"):
        model = recurrent(family).to(dtype)
        drafter = Bushy("half", truth(family, GREEDY), VOCAB)
        decoder = Decoder(model, tiny_tokenizer, drafter, batch_size=3, tree="dynamic:4,3,8")
        got = decoder.generate(prompts(), GREEDY)
        if dtype == torch.float64:
            assert differing(MODEL(family), by_transformers(family, GREEDY), got, GREEDY) == 0
        assert all(len(c.tokens) == 24 or c.tokens[-1] == 0 for c in got)


OWN = ["exit:2", "exits:1+2", "skip:1", "swift", "streaming:64", "snapkv:64", "rapid:64"]


@pytest.mark.parametrize("family", ["mamba2", "qwen3-next"])
def test_what_runs_such_a_model_itself_is_refused(
    family: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """As a draft LM, by some of its layers, by a part of its keys and values."""
    model = MODEL(family)
    with pytest.raises(ValueError, match=r"got a recurrent state.*of targets alone"):
        LMDrafter(model, VOCAB)
    for name in OWN:
        with pytest.raises(ValueError, match=r"got a recurrent state.*of targets alone"):
            load_drafter(name, model, tiny_tokenizer)


def test_layers_that_only_look_alike_are_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A known name on what computes something else: it is compared with its own forward."""
    model = recurrent("mamba2")
    mixer: Any = decoder_layers(model)[1].mixer
    mixer.time_step_limit = (0.0, 0.1)
    Decoder(model, tiny_tokenizer)  # followed
    forward = type(mixer).forward

    def other(self: torch.nn.Module, *args: Any, **how: Any) -> torch.Tensor:
        made: torch.Tensor = 0.9 * forward(self, *args, **how)
        return made

    mixer.__class__ = type("Mamba2Mixer", (type(mixer),), {"forward": other})
    with pytest.raises(ValueError, match="something else than"):
        Decoder(model, tiny_tokenizer)


def test_a_folder_in_bf16_is_loaded(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Mamba-2's residual stream is fp32 then, beside a head in bf16."""
    recurrent("mamba2").bfloat16().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    decoder = Decoder.from_pretrained(str(tmp_path), "ngram", device="cpu", dtype="bfloat16", K=3)
    done = decoder.generate(prompts(), SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [len(c.tokens) for c in done] == [8] * 6
