"""Long contexts: what drafts over partial keys and values hold, keep and cost as the context grows.

    python bench/evidence/long_context.py                                     # tiny, on a CPU
    python bench/evidence/long_context.py target=../shared/models/target-15m lengths=[8192,16384]

Prompts of each length are decoded at temperature 0: plain, and by each drafter. Of each: tau, bytes
of the drafter's keys and values, and milliseconds a token of the whole batch. Without a target it
is a random Llama of `layers` layers: tau then tells how alike the law over the view is, no more. A
target of a shorter context gets a copy with linear rope scaling by the factor that the longest
prompt needs: the same weights, not trained for it. Each row says which. Prompts are running text of
the standard library. Rows and page: <out>/long-context.*
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.bench.rows import about_run, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import stand_in_tokenizer


@dataclass(kw_only=True)
class LongContext:
    target: str = ""  # a folder; empty: a random Llama
    layers: int = 2  # of the random one
    hidden: int = 64
    lengths: list[int] = field(default_factory=lambda: [256, 1024])  # of prompts
    budget: int = 128
    drafters: list[str] = field(default_factory=lambda: ["streaming", "snapkv"])  # and folders
    K: int = 4
    batch_size: int = 2
    max_new_tokens: int = 16
    device: str = "cpu"
    threads: int = 1
    out: str = "runs/bench"


HEAD = ("drafter", "prompt", "tau", "drafter's KV, MiB", "target's KV, MiB", "ms a token", "plain")


def main(argv: list[str]) -> None:
    settings = parse(LongContext, argv)
    torch.set_num_threads(settings.threads)
    target, tokenizer, which = opened(settings)
    rows: list[dict[str, Any]] = []
    for length in settings.lengths:
        asked = load_prompts(
            "stdlib", tokenizer, limit=settings.batch_size, prompt_tokens=length, split="all"
        )
        prompts = [prompt.tokens for prompt in asked]
        plain = measured(settings, target, tokenizer, None, prompts)
        for name in settings.drafters:
            name = name if Path(name).is_dir() else f"{name}:{settings.budget}"
            found = measured(settings, target, tokenizer, name, prompts)
            about = {"target": which, "drafter": name, "prompt": length, "batch": len(prompts)}
            rows.append(about | found | {"plain_ms": plain["ms"], "K": settings.K} | about_run())
    write_table(Path(settings.out), "long-context", rows, page(rows))
    print(page(rows))


def opened(settings: LongContext) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The target, its tokenizer, and in words what it is."""
    needed = max(settings.lengths) + settings.max_new_tokens + 1
    if settings.target:
        spec = TargetSpec(settings.target, dtype="bfloat16")
        target, tokenizer = load_target(spec, settings.device)
        config = target.config.get_text_config()
        factor = -(-needed // config.max_position_embeddings)
        if factor == 1:
            return target, tokenizer, settings.target
        if config.rope_parameters.get("rope_type", "default") != "default":
            raise ValueError(
                f"target: got rope_parameters={config.rope_parameters} and prompts of {needed}, "
                "expected plain rotary embeddings, which this can scale; give shorter prompts"
            )
        config.rope_parameters = config.rope_parameters | {
            "rope_type": "linear",
            "factor": float(factor),
        }
        config.max_position_embeddings *= factor
        scaled = type(target)(config).to(target.device, target.dtype).eval().requires_grad_(False)
        scaled.load_state_dict(target.state_dict())
        return scaled, tokenizer, f"{settings.target}, rope scaled linearly by {factor}"
    tokenizer = stand_in_tokenizer(320)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=needed,
        initializer_range=0.1,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        target = LlamaForCausalLM(config).to(settings.device).eval().requires_grad_(False)
    return target, tokenizer, f"random Llama, {settings.layers} layers of {settings.hidden}"


def measured(
    settings: LongContext,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str | None,
    prompts: list[list[int]],
) -> dict[str, Any]:
    """tau, milliseconds a token of the batch (decoding alone), MiB of keys and values."""
    drafter = load_drafter(name, target, tokenizer)
    decoder = Decoder(
        target, tokenizer, drafter, K=settings.K, batch_size=settings.batch_size, fast=False
    )
    params = SamplingParams(max_new_tokens=settings.max_new_tokens, ignore_eos=True)
    done = [c.counters for c in decoder.generate(prompts, params)]
    emitted, rounds = sum(c.emitted for c in done), sum(c.rounds for c in done)
    planned = decoder.memory
    assert planned is not None
    seconds = max(c.decode_seconds for c in done)
    mib = {"drafter": planned.drafter_kv / 2**20, "target": planned.target_kv / 2**20}
    return {"tau": emitted / max(1, rounds), "ms": 1e3 * seconds / max(1, emitted)} | {
        f"{whose}_mib": size for whose, size in mib.items()
    }


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a line for each drafter and length."""
    rows = list(rows)
    cells = [
        [
            row["drafter"],
            f"{row['prompt']:,}",
            f"{row['tau']:.2f}",
            f"{row['drafter_mib']:.2f}",
            f"{row['target_mib']:.2f}",
            f"{row['ms']:.3g}",
            f"{row['plain_ms']:.3g}",
        ]
        for row in rows
    ]
    lines = ["# Drafts at long contexts", "", f"{source(rows)} Target: {rows[0]['target']}.", ""]
    return "\n".join([*lines, *markdown(HEAD, cells)]) + "\n"


if __name__ == "__main__":
    run_command(main, LongContext)
