"""Tokens per second, ours against transformers' `generate`: the same models, prompts and machine.

    python bench/generation.py target=runs/quickstart/target/model \\
        drafter=runs/quickstart/distill/drafter

Plain decoding against `generate`; speculative decoding against assisted generation at the same K
(constant, threshold 0) and at its own best of its default, 3, 5 and 8; prompt lookup against prompt
lookup. Each prompt is one pair: every arm decodes it, in an order that rotates. Whole calls are
timed, prefill included, and neither side stops at EOS, so both write the same number of tokens.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rows import publish, row
from transformers import PreTrainedModel

from draftsmith.decode.arguments import parse
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.target import TargetSpec, load_target

Arm = Callable[[list[int]], int]


@dataclass
class Bench:
    target: str = "runs/quickstart/target/model"
    drafter: str = "runs/quickstart/distill/drafter"
    prompts: str = "stdlib"
    limit: int = 16
    prompt_tokens: int = 64
    max_new_tokens: int = 128
    K: int = 4
    dtype: str = "bfloat16"
    threads: int = 1  # of the CPU: models as small as the quickstart's are fastest on one
    device: str = "cpu"
    out: str = "runs/bench"


def main(argv: list[str]) -> None:
    # ------------------------------------------------------------------ setup
    settings = parse(Bench, argv)
    for path in (settings.target, settings.drafter):
        if not os.path.isdir(path):
            raise SystemExit(f"got no folder {path}; run `make quickstart` first, or name another")
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    target, tokenizer = load_target(TargetSpec(settings.target, dtype=settings.dtype), device)
    prompts = load_prompts(
        settings.prompts, tokenizer, limit=settings.limit, prompt_tokens=settings.prompt_tokens
    )
    params = SamplingParams(max_new_tokens=settings.max_new_tokens, ignore_eos=True)

    # ------------------------------------------------------------------- arms
    drafter = load_drafter(settings.drafter, target, tokenizer)
    lookup = load_drafter("ngram", target, tokenizer)
    arms = {
        "ours plain": ours(Decoder(target, tokenizer), params),
        "ours speculative": ours(Decoder(target, tokenizer, drafter, K=settings.K), params),
        "ours prompt lookup": ours(Decoder(target, tokenizer, lookup, K=settings.K), params),
    }
    # transformers decodes with models of its own, on its default attention.
    peer, _ = load_target(TargetSpec(settings.target, dtype=settings.dtype), device)
    arms["generate"] = theirs(peer, settings)
    arms["prompt lookup"] = theirs(peer, settings, prompt_lookup_num_tokens=settings.K)
    for name, tokens in {
        f"K={settings.K}": settings.K,
        "default": None,
        "3": 3,
        "5": 5,
        "8": 8,
    }.items():
        assistant = load_draft(settings.drafter, settings.dtype).to(device).eval()
        if tokens is not None:
            assistant.generation_config.num_assistant_tokens = tokens
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        arms[f"assisted {name}"] = theirs(peer, settings, assistant_model=assistant)

    # ------------------------------------------------------------------ turns
    rates = take_turns(arms, [prompt.tokens for prompt in prompts], settings.max_new_tokens, device)

    # ----------------------------------------------------------------- report
    tuned = [f"assisted {name}" for name in ("default", "3", "5", "8")]
    best = max(tuned, key=lambda name: sum(rates[name]))
    pairs = [
        ("plain", "ours plain", "generate"),
        ("speculative, same K", "ours speculative", f"assisted K={settings.K}"),
        ("speculative, peer's best", "ours speculative", best),
        ("prompt lookup", "ours prompt lookup", "prompt lookup"),
        ("speculative over plain", "ours speculative", "ours plain"),
    ]
    rows = [row(what, b, rates[a], rates[b], "tokens/s") for what, a, b in pairs]
    publish("generation", rows, Path(settings.out))


def ours(decoder: Decoder, params: SamplingParams) -> Arm:
    return lambda prompt: len(decoder.generate([prompt], params)[0].tokens)


def theirs(model: PreTrainedModel, settings: Bench, **options: object) -> Arm:
    """`generate`, greedy, of exactly max_new_tokens."""

    @torch.inference_mode()
    def call(prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            **options,
        )
        return out.shape[1] - ids.shape[1]

    return call


def take_turns(
    arms: dict[str, Arm], prompts: list[list[int]], length: int, device: torch.device
) -> dict[str, list[float]]:
    """Tokens per second of every arm on every prompt, after one warm-up each."""
    for arm in arms.values():
        arm(prompts[0])
    names = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            tokens = arms[name](prompt)
            assert tokens == length, f"{name} wrote {tokens} tokens, expected {length}"
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rates[name].append(tokens / (time.perf_counter() - started))
    return rates


if __name__ == "__main__":
    main(sys.argv[1:])
