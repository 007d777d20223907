"""Long contexts: what drafts over partial keys and values hold, keep and cost as the context grows.

    python bench/evidence/long_context.py                       # a tiny random target, on a CPU
    python bench/evidence/long_context.py target=runs/long/target/model \\
        prompts=runs/long/prompts.jsonl lengths=[1024,8192,32000] batch_size=8 max_new_tokens=48 \\
        'drafters=[streaming:256,snapkv:256,LongSpec=runs/long/moved/drafter]'

Prompts of each length are decoded at temperature 0: plainly, and by each drafter (name=DRAFTER, or
its own name). Of each: tau, bytes of keys and values, and milliseconds a token of the whole batch.
A shorter prompt is the end of a longer one, so that only the context tells them apart. Without a
target it is a random Llama: tau then tells how alike the law over the view is, no more. Rows, page
and picture: <out>/long-context.*, where the rows of other drafters and lengths stay, and what is
known of plain decoding at this commit isn't measured again.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.report.charts import Trend, drawing, scatter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.disk.provenance import git_commit
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import stand_in_tokenizer

HEAD = (
    "tokens before",
    "drafter",
    "K",
    "tau",
    "its KV, MiB",
    "target's KV, MiB",
    "ms a token",
    "ratio",
)
CHARTS = {
    "tau": "tokens a target pass",
    "ms": "milliseconds a token, all rows",
    "drafter_mib": "MiB of keys and values beside the target's",
}


@dataclass(kw_only=True)
class LongContext:
    target: str = ""  # a folder; empty: a random Llama
    prompts: str = "stdlib"  # documents
    lengths: list[int] = field(default_factory=lambda: [256, 1024])  # of prompts
    window: int = 0  # of the texts whose ends prompts are; 0: the longest of `lengths`
    drafters: list[str] = field(default_factory=lambda: ["streaming:128", "snapkv:128"])
    K: int = 4
    batch_size: int = 2
    max_new_tokens: int = 16
    repeats: int = 1  # of each generation, of which the least time counts
    threads: int = 1
    out: str = "runs/bench"


def main(argv: list[str]) -> None:
    settings = parse(LongContext, argv)
    torch.set_num_threads(settings.threads)
    target, tokenizer = opened(settings)
    asked = load_prompts(
        settings.prompts,
        tokenizer,
        limit=settings.batch_size,
        prompt_tokens=max(settings.window, *settings.lengths),
        split="all",
    )
    arms = [("plain", None)]
    for one in settings.drafters:
        name, _, drafter = one.rpartition("=")
        arms.append((name or drafter, drafter))
    file = Path(settings.out) / "long-context.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    about = {"target": settings.target or "random", "batch": len(asked)}
    about |= {"max_new_tokens": settings.max_new_tokens, "window": len(asked[0].tokens)}
    plain = [row for row in rows if row["what"] == "plain" and row["commit"] == git_commit()]
    known = {row["prompt"] for row in plain if about.items() <= row.items()}
    runs = [(n, arm) for n in settings.lengths for arm in arms if arm[1] or n not in known]
    for length, (name, drafter) in track(runs):
        prompts = [prompt.tokens[-length:] for prompt in asked]
        K = settings.K if drafter else 0
        row = about | {"what": name, "prompt": length, "K": K}
        found = measured(settings, target, tokenizer, drafter, prompts)
        rows = beside(file, [row | found | about_run()], *row)
        rows.sort(key=lambda row: int(row["prompt"]))
        write_table(file.parent, file.stem, rows, page(rows), picture(rows))
    print(page(rows))


def opened(settings: LongContext) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer. ValueError: the longest prompt doesn't fit in its context."""
    needed = max(settings.lengths) + settings.max_new_tokens + 1
    if settings.target:
        need("long-target", settings.target)
        target, tokenizer = load_target(TargetSpec(settings.target, dtype="bfloat16"), "cpu")
        if needed > (most := target.config.get_text_config().max_position_embeddings):
            raise ValueError(
                f"lengths: got {settings.lengths} and {settings.max_new_tokens} tokens more, "
                f"expected at most {most} as the target has; give shorter ones, or a longer target "
                "(bench/evidence/longer.py)"
            )
        return target, tokenizer
    tokenizer = stand_in_tokenizer(320)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=needed,
        initializer_range=0.1,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LlamaForCausalLM(config).eval().requires_grad_(False), tokenizer


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
    seconds = []
    for _ in range(settings.repeats):
        done = [c.counters for c in decoder.generate(prompts, params)]
        seconds.append(max(c.decode_seconds for c in done))
    emitted, rounds = sum(c.emitted for c in done), sum(c.rounds for c in done)
    planned = decoder.memory
    assert planned is not None
    return {
        "tau": emitted / max(1, rounds),
        "ms": 1e3 * min(seconds) / max(1, emitted),
        "repeats": settings.repeats,
        "drafter_mib": planned.drafter_kv / 2**20,
        "target_mib": planned.target_kv / 2**20,
    }


def of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is compared within."""
    return tuple(row[key] for key in ("target", "prompt", "batch", "max_new_tokens", "window"))


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a line for each length and drafter."""
    rows = list(rows)
    plain = {of(row): row["ms"] for row in rows if row["what"] == "plain"}
    cells = [
        [
            f"{row['prompt']:,}",
            row["what"],
            str(row["K"]),
            f"{row['tau']:.2f}",
            f"{row['drafter_mib']:.1f}",
            f"{row['target_mib']:.1f}",
            f"{row['ms']:.3g}",
            f"{plain[of(row)] / row['ms']:.2f}",
        ]
        for row in rows
    ]
    words = (
        f"{source(rows)} {rows[0]['batch']} prompts at a time, greedy, chains; ratio: tokens/s "
        "over plain decoding's."
    )
    lines = ["# Drafts at long contexts", "", words, "", *markdown(HEAD, cells)]
    return "\n".join([*lines, "", "![by tokens before](long-context.svg)", ""])


def picture(rows: list[dict[str, Any]]) -> str:
    """tau, time and memory by the tokens before, a line a drafter."""
    charts = []
    names = dict.fromkeys(row["what"] for row in rows)
    colours = dict(zip(names, ("soft", "b", "c", "d", "a", "ink"), strict=False))
    for key, words in CHARTS.items():
        trends = []
        for what in names:
            points = [(float(row["prompt"]), row[key]) for row in rows if row["what"] == what]
            trends.append(Trend(what, colours[what], points, [], points))
        charts.append(scatter(words, trends, x_label="tokens before", y_label=words))
    return drawing(charts)


if __name__ == "__main__":
    run_command(main, LongContext)
