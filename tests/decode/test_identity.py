"""Greedy decoding in fp32 equals transformers' `generate`, on many prompts and model families."""

import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.target import TargetSpec, load_target

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def random_prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, vocab) for _ in range(rng.randint(1, 24))] for _ in range(count)]


@torch.inference_mode()
def by_transformers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Completion]:
    """`generate`, prompts of one length together and none padded, cut after the first EOS."""
    answers = []
    end = model.generation_config.eos_token_id
    by_length = sorted(enumerate(prompts), key=lambda pair: len(pair[1]))
    for length, group in groupby(by_length, key=lambda pair: len(pair[1])):
        indices, alike = zip(*group, strict=True)
        ids = torch.tensor([list(prompt) for prompt in alike])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        for index, tokens in zip(indices, out[:, length:].tolist(), strict=True):
            cut = tokens.index(end) + 1 if end in tokens else len(tokens)
            answers.append(Completion(index, list(prompts[index]), tokens[:cut]))
    return sorted(answers, key=lambda answer: answer.index)


def assert_identical(
    expected: list[Completion],
    got: list[Completion],
    model: PreTrainedModel,
    params: SamplingParams,
    vocab: int,
) -> None:
    """Token identity; a difference passes only at a near-tie that fp64 confirms, and is printed."""
    found = divergences(expected, got, model, params, vocab_size=vocab, dtype="float32")
    for difference in found:
        print("near-tie:", difference)
    assert all(d.near_tie for d in found)
    assert len(found) <= 1


def test_300_prompts_equal_generate(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    vocab = len(tiny_tokenizer)
    prompts = random_prompts(300, vocab, seed=1)
    params = SamplingParams(max_new_tokens=24)
    expected = by_transformers(tiny_target, prompts, 24)
    # One row at a time takes as long for 60 prompts as eight for all.
    for batch, drafter, count in (
        (1, tiny_target, 60),
        (8, tiny_draft, 300),
        (8, tiny_target, 300),
    ):
        decoder = Decoder(
            tiny_target, tiny_tokenizer, LMDrafter(drafter, vocab), K=4, batch_size=batch
        )
        got = decoder.generate(prompts[:count], params)
        assert_identical(expected[:count], got, tiny_target, params, vocab)


def test_a_wrong_answer_is_not_excused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(max_new_tokens=8)
    right = Decoder(tiny_target, tiny_tokenizer).generate(["def f("], params)
    wrong = [Completion(0, right[0].prompt_tokens, [*right[0].tokens[:3], 9, *right[0].tokens[4:]])]
    found = divergences(
        right, wrong, tiny_target, params, vocab_size=len(tiny_tokenizer), dtype="float32"
    )
    assert [(d.position, d.near_tie) for d in found] == [(3, False)]


@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (Qwen3Config, Qwen3ForCausalLM),
        (Qwen2Config, Qwen2ForCausalLM),
        (MistralConfig, MistralForCausalLM),
    ],
)
def test_other_families_equal_generate(
    config: type, model_class: type, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    # The output head is wider than the tokenizer, as published models of these families have it.
    extra = {"head_dim": 8} if config is Qwen3Config else {}
    extra |= {"sliding_window": None} if config is MistralConfig else {}
    torch.manual_seed(0)
    model = model_class(config(vocab_size=len(tiny_tokenizer), **SIZES, **extra)).eval()
    prompts = random_prompts(20, len(tiny_tokenizer), seed=2)
    params = SamplingParams(max_new_tokens=30)
    expected = by_transformers(model, prompts, 30)
    vocab = len(tiny_tokenizer)
    for drafter in (None, LMDrafter(model, vocab), NgramDrafter()):
        decoder = Decoder(model, tiny_tokenizer, drafter, K=3, batch_size=5)
        assert_identical(expected, decoder.generate(prompts, params), model, params, vocab)


def test_padded_logits_never_win(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A head wider than the tokenizer: rows beyond it are cut, even where they would win."""
    vocab = len(tiny_tokenizer)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocab + 64, head_dim=8, tie_word_embeddings=False, **SIZES)
    ).eval()
    with torch.no_grad():
        model.lm_head.weight[vocab:] *= 50
    prompts = random_prompts(6, vocab, seed=3)
    for params in (SamplingParams(max_new_tokens=20), SamplingParams(1.0, max_new_tokens=20)):
        plain = Decoder(model, tiny_tokenizer).generate(prompts, params)
        drafter = LMDrafter(model, vocab)
        spec = Decoder(model, tiny_tokenizer, drafter, batch_size=3).generate(prompts, params)
        assert [c.tokens for c in plain] == [c.tokens for c in spec]
        assert max(max(c.tokens) for c in plain) < vocab


def test_15m_target_equals_generate(target_15m: Path, gsm8k_path: Path) -> None:
    target, tokenizer = load_target(TargetSpec(str(target_15m), dtype="float32"), "cpu")
    rows = gsm8k_path.read_text().splitlines()[-300:][:12]
    prompts = [tokenizer(row[14:120]).input_ids for row in rows]
    params = SamplingParams(max_new_tokens=48)
    expected = by_transformers(target, prompts, 48)
    decoder = Decoder(target, tokenizer, NgramDrafter(), K=4, batch_size=4)
    got = decoder.generate(prompts, params)
    assert_identical(expected, got, target, params, len(tokenizer))
