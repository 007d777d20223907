"""What a drafted token costs where the vocabulary is as large as models have it.

    python bench/speed/preview.py                    # the shape of Qwen2.5-0.5B
    python bench/speed/preview.py hidden=4096 intermediate=12288 heads=32 kv_heads=8 layers=36

A block drafter with a layer for the nodes reads an LM head for each token that it drafts: all of
it, the rows of some tokens, or a preview of all and the best rows. Weights are random, so that only
times are measured, not what is accepted (see docs/methods/preview.md): medians of chains of five,
each after the target's pass over one token, a fifth of it for each drafted one. Rows and page:
<out>/preview.*
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from draftsmith.bench.rows import about_run, lower, markdown, source, write_table
from draftsmith.command import numbers, parse, run_command
from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import (
    chain_call,
    clocked,
    draft_call,
    forward_call,
    recorded,
    with_room,
)
from draftsmith.decode.predict.draft_sizes import random_model
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.heads.block import Block, BlockConfig
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.trim import trimmed_head

K = 5
HEAD = ("LM head", "MB a drafted token", "ms", "of a plain step")


@dataclass
class Preview:
    hidden: int = 896
    intermediate: int = 4864
    heads: int = 14
    kv_heads: int = 2
    layers: int = 24
    vocab: int = 151936
    context: int = 256
    sizes: str = "32768"  # tokens of a trimmed one
    ranks: str = "64,112,224"
    device: str = "cpu"
    threads: int = 1
    turns: int = 20
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Preview, argv)
    torch.set_num_threads(settings.threads)
    rows = measured(settings)
    table = [[r["what"], *(f"{r[key]:.3g}" for key in ("mb", "ms", "c"))] for r in rows]
    about = (
        f"{source(rows)} A target of {rows[0]['parameters'] / 1e6:,.0f}M parameters, random ones, "
        f"whose pass over one token takes {rows[0]['plain_ms']:.3g} ms; {settings.context} tokens "
        f"of context, chains of {K}, {settings.threads} thread."
    )
    page = "\n".join(["# bench preview", "", about, "", *markdown(HEAD, table), ""])
    write_table(Path(settings.out), "preview", rows, page)
    print(page)


def measured(settings: Preview) -> list[dict[str, Any]]:
    """A row for each form of the LM head, the whole one first."""
    shape = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    target = random_model(shape, torch.device(settings.device))
    runner = Runner(target, settings.vocab)
    config = BlockConfig(layer_like(target, 1), (1, 2), K, light="layer")
    head = Block(config).init_from(target).requires_grad_(False).to(target.device, target.dtype)
    arms = {"whole": BlockDrafter(head, target, settings.vocab)}
    for size in numbers("sizes", settings.sizes, int, least=1):
        some = DraftVocab(torch.arange(size), settings.vocab)
        fewer = trimmed_head(head, some)
        arms[f"{size:,} tokens"] = BlockDrafter(fewer, target, settings.vocab)
    for rank in numbers("ranks", settings.ranks, int, least=1):
        arms[f"preview of rank {rank}"] = made = BlockDrafter(head, target, settings.vocab)
        made.lm_head.foretell(rank)
    at: Any = {"batch": 1, "context": settings.context}
    calls = {"plain": forward_call(runner, length=1, **at)}
    for what, drafter in arms.items():
        twin = with_room(drafter, 1, settings.context + 2 * K)
        by = draft_call if drafter.native is None else chain_call
        calls[what] = by(twin, chain_plan(K).fed, device=target.device, **at)
    calls = recorded(calls, runner, arms["whole"])
    plain_call, seconds = calls.pop("plain"), {what: list[float]() for what in calls}
    passes = []
    with torch.inference_mode():
        for _ in range(1 + settings.turns):
            for what, call in calls.items():  # each finds the caches as the target leaves them
                passes.append(clocked(plain_call, target.device))
                seconds[what].append(clocked(call, target.device))
    ms = {what: 1e3 * median(took[1:]) / K for what, took in seconds.items()}
    plain, size = 1e3 * median(passes[1:]), sum(p.numel() for p in target.parameters())
    return [
        lower(what, "whole", [took], [ms["whole"]], "ms a drafted token")
        | {"mb": arms[what].parameter_bytes / 1e6, "ms": took}
        | {"plain_ms": plain, "c": took / plain, "parameters": size}
        | about_run()
        for what, took in ms.items()
    ]


if __name__ == "__main__":
    run_command(main, Preview)
