"""fp32 identity at length: trained models, drafters that do their worst, chains and trees, batches
of 1, 8 and 64, greedy and at temperature 1, against plain decoding written down separately.
"""

import importlib
import inspect
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from plain_decoding import plain_decode
from scripted import Bushy, Scripted
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.evaluate.metrics import block_efficiency
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.report.schema import AnswerDifference
from draftsmith.decode.sampling import SamplingParams

LEARNT = "json.decoder json.encoder argparse ast bdb calendar cmd codecs configparser copy csv"
ASKED = "textwrap shlex dataclasses difflib"
SETTINGS = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]
BATCHES = {1: 3, 8: 20, 64: 72}  # rows -> prompts: more than rows, so that rows are taken again
VOCAB = 320  # of the tests' tokenizer
MODES = ["lm", "right", "wrong", "random", "eos"]

Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


def source_ids(names: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of some of the standard library's modules, an end token after each."""
    texts = [inspect.getsource(importlib.import_module(name)) for name in names.split()]
    return [i for text in texts for i in (*tokenizer(text, verbose=False).input_ids, 0)]


def trained(ids_T: torch.Tensor, *, layers: int, hidden: int, steps: int) -> LlamaForCausalLM:
    """A tiny Llama after some steps on random windows of a text; the same for the same text."""
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        start_B1 = torch.randint(len(ids_T) - 96, (16, 1))
        ids_BT = ids_T[start_B1 + torch.arange(96)]
        model(ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def models(tiny_tokenizer: PreTrainedTokenizerBase) -> Models:
    ids_T = torch.tensor(source_ids(LEARNT, tiny_tokenizer))
    target = trained(ids_T, layers=2, hidden=64, steps=120)
    return target, trained(ids_T, layers=1, hidden=32, steps=60)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Windows of 1 to 40 tokens of text that nothing was trained on."""
    ids = source_ids(ASKED, tiny_tokenizer)
    starts = range(0, len(ids) - 41, (len(ids) - 41) // max(BATCHES.values()))
    found = [ids[at : at + 1 + 7 * i % 40] for i, at in enumerate(starts)]
    return [prompt for prompt in found if prompt[-1] != 0][: max(BATCHES.values())]


def truths(
    target: LlamaForCausalLM, prompts: list[list[int]], params: SamplingParams
) -> list[Completion]:
    options = {"vocab_size": VOCAB, "stop_ids": (0,)}
    return [
        Completion(i, prompt, plain_decode(target, prompt, params, index=i, **options))
        for i, prompt in enumerate(prompts)
    ]


def arms(
    draft: LlamaForCausalLM, expected: list[Completion]
) -> Iterator[tuple[str, Drafter | None, dict]]:
    """(name, drafter, settings) of every way to decode. The scripted trees have repeated and wrong
    siblings, and leaves at every depth.
    """
    answers = {tuple(c.prompt_tokens): c.tokens for c in expected}
    anything = random.Random(5)
    yield "plain", None, {}
    for mode in MODES:
        for tree, kind in (("chain", Scripted), ("eagle-25", Bushy)):
            drafter = LMDrafter(draft, VOCAB) if mode == "lm" else kind(mode, answers, VOCAB)
            if mode == "random":
                drafter._draft = lambda row, depth: anything.randrange(VOCAB)
            yield f"{mode}, {tree}", drafter, {"K": 3, "tree": tree}


def compare(
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    expected: list[Completion],
    params: SamplingParams,
    batch: int,
) -> tuple[int, list[AnswerDifference], dict[str, float]]:
    """Tokens compared, the differences, and tau by arm."""
    count, found, tau = 0, [], {}
    asked = expected[: BATCHES[batch]]
    for name, drafter, settings in arms(models[1], expected):
        decoder = Decoder(models[0], tokenizer, drafter, batch_size=batch, **settings)
        got = decoder.generate([c.prompt_tokens for c in asked], params)
        differ = divergences(asked, got, models[0], params, vocab_size=VOCAB, dtype="float32")
        for one in differ:
            print(f"{name}, batch {batch}, temperature {params.temperature:g}: {one}")
        count += sum(len(c.tokens) for c in asked)
        found += differ
        tau[name] = block_efficiency([c.counters for c in got])
    return count, found, tau


@pytest.mark.parametrize(
    ("length", "least"), [(10, 10_000), pytest.param(100, 100_000, marks=pytest.mark.slow)]
)
def test_long_identity(
    models: Models,
    prompts: list[list[int]],
    tiny_tokenizer: PreTrainedTokenizerBase,
    length: int,
    least: int,
) -> None:
    total, found = 0, []
    for params in SETTINGS:
        params = replace(params, max_new_tokens=length)
        expected = truths(models[0], prompts, params)
        for batch in BATCHES:
            count, differ, tau = compare(models, tiny_tokenizer, expected, params, batch)
            total, found = total + count, found + differ
            # The arms are what they are called.
            assert tau["right, chain"] > 2.5 and tau["right, eagle-25"] > 2.5
            assert tau["plain"] == 1 and max(tau["wrong, chain"], tau["wrong, eagle-25"]) < 1.1
            assert tau["lm, eagle-25"] > tau["lm, chain"] > 1.1
    print(f"{total:,} tokens compared, {len(found)} differences at near-ties")
    assert total >= least
    assert all(one.near_tie for one in found), found
    assert len(found) <= 5, found


def test_a_decoder_that_loses_the_kept_path_is_caught(
    models: Models,
    prompts: list[list[int]],
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = replace(SETTINGS[0], max_new_tokens=20)
    expected = truths(models[0], prompts[:20], params)
    monkeypatch.setattr(KVPool, "commit", lambda *_: None)
    found = compare(models, tiny_tokenizer, expected, params, 8)[1]
    assert not all(one.near_tie for one in found)
