"""Tokens per second, ours against transformers' `generate`: the same models, prompts and machine.

    python bench/speed/decode.py target=runs/quickstart/target/model \\
        drafter=runs/quickstart/distill/drafter

Plain decoding against `generate`; chain, tree and cost-aware policy against assisted generation at
the same K and at the best of its settings; prompt lookup against prompt lookup; batches against
`generate` on a padded batch (assisted generation takes none). Each prompt or batch is one pair:
every arm decodes it, in an order by lot. Whole calls are timed, prefill included, and neither
side stops at EOS, so all write the same number of tokens. tau and efficiency (measured / ideal
speed-up, of decoding alone) are over all prompts. Rows, page and picture: runs/bench/decode.*
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import publish, row
from draftsmith.bench.speed.arms import (
    Arm,
    PairBench,
    Turns,
    assisted,
    efficiency,
    generate,
    rate,
    rates_row,
    take_turns,
    tau,
)
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.timing import isolated_times
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.report.charts import LyingBar, drawing, lanes
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.target import TargetSpec

# Assisted generation: drafted tokens, schedule, confidence threshold. "dynamic" is its default,
# which ends a draft at the first token below the threshold.
PEERS = {
    "dynamic": (20, "constant", 0.4),
    "heuristic": (5, "heuristic", 0.0),
    **{str(n): (n, "constant", 0.0) for n in (3, 5, 8)},
}


@dataclass
class Bench(PairBench):
    max_new_tokens: int = 128
    K: int = 4
    tree: str = "eagle-25"  # cut to depth K; or a calibrated tree's file
    policy: str = "cost"
    batches: str = "8,64"
    threads: int = 1  # of the CPU: models as small as the quickstart's are fastest on one
    device: str = "cpu"


def main(argv: list[str]) -> None:
    # ------------------------------------------------------------------ setup
    settings = parse(Bench, argv)
    for path in (settings.target, settings.drafter):
        need("quickstart-runs", path)
    torch.set_num_threads(settings.threads)
    logging.set_verbosity_error()
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_decoded(spec, settings.device)  # transformers decodes with it too
    sizes = [int(size) for size in settings.batches.split(",") if size]
    prompts = load_prompts(
        settings.prompts,
        tokenizer,
        limit=max([settings.limit, *sizes]),
        prompt_tokens=settings.prompt_tokens,
    )
    texts = [prompt.tokens for prompt in prompts]
    params = SamplingParams(max_new_tokens=settings.max_new_tokens, ignore_eos=True)

    # ------------------------------------------------------------------- arms
    def ours(drafter: str | None = settings.drafter, **options: Any) -> Decoder:
        loaded = load_drafter(drafter, target, tokenizer)
        return Decoder(target, tokenizer, loaded, **{"K": settings.K, **options})

    chain, tree = f"chain K={settings.K}", f"tree {Path(settings.tree).stem}"
    plans = {chain: {}, tree: {"tree": settings.tree}}
    # A policy may draft deeper than K, and whatever part of the tree it likes.
    plans[f"policy {settings.policy}"] = {"policy": settings.policy, "tree": settings.tree, "K": 8}
    decoders = {name: ours(**options) for name, options in plans.items()}
    decoders |= {"plain": ours(None), "prompt lookup": ours("ngram")}
    arms = {f"ours {name}": partial(d.generate, params=params) for name, d in decoders.items()}
    arms |= theirs(target, settings)

    # ------------------------------------------------------------------ turns
    spread = texts[:: max(1, len(texts) // settings.limit)][: settings.limit]
    one = take_turns("single prompts", arms, [[text] for text in spread])
    batched = {}
    for size in sizes:
        many = {"plain": ours(None, batch_size=size), chain: ours(batch_size=size)}
        few = {f"ours {name}": partial(d.generate, params=params) for name, d in many.items()}
        few["generate"] = arms["generate"]
        groups = [[texts[(at * size + i) % len(texts)] for i in range(size)] for at in range(3)]
        batched[size] = take_turns(f"batches of {size}", few, groups)

    # ----------------------------------------------------------------- report
    rows = compare(one, chain, list(plans))
    taus = [[tau(one[f"ours {name}"])] for name in (tree, chain)]
    rows.append(row(f"tau, {tree}, equal draft calls", chain, *taus, "tokens/call"))
    rows += [efficiency_row(settings, name, decoders[name], one) for name in (chain, tree)]
    for size, turns in batched.items():
        for name in ("plain", chain):
            both = turns[f"ours {name}"], turns["generate"]
            rows.append(rates_row(f"{name}, batch {size}", "generate, padded", *both))
    about = (
        f"Greedy, {settings.dtype}, {settings.threads} thread(s), prompts of "
        f"{settings.prompt_tokens} tokens, {settings.max_new_tokens} new ones."
    )
    publish("decode", rows, Path(settings.out), about=about, picture=picture(one))


def compare(turns: Turns, chain: str, plans: list[str]) -> list[dict[str, Any]]:
    """Ours against theirs, single prompts; the best assisted setting and our fastest come first."""
    best = max((f"assisted {name}" for name in PEERS), key=lambda name: rate(turns[name]))
    fastest = max(plans, key=lambda name: rate(turns[f"ours {name}"]))
    pairs = [("plain", "generate"), (chain, f"assisted {chain.removeprefix('chain ')}")]
    pairs += [(name, best) for name in dict.fromkeys([fastest, *plans])]
    pairs += [("prompt lookup", "prompt lookup"), (fastest, "ours plain")]
    return [rates_row(mine, other, turns[f"ours {mine}"], turns[other]) for mine, other in pairs]


def efficiency_row(settings: Bench, name: str, decoder: Decoder, turns: Turns) -> dict[str, Any]:
    """The speed-up of decoding alone over the one that isolated forwards promise."""
    assert decoder.drafter is not None
    plan, prompt = decoder.settings.plan, settings.prompt_tokens
    context = prompt + settings.max_new_tokens // 2
    mean = {"batch": 1, "context": context, "prompt": prompt, "nodes": plan.nodes}
    seconds = isolated_times(decoder.runner, decoder.drafter, plan, **mean)
    both = efficiency(seconds, plan.levels, turns[f"ours {name}"], turns["ours plain"])
    return row(f"efficiency, {name}", "ideal speed-up", *([x] for x in both), "x")


def theirs(model: PreTrainedModel, settings: Bench) -> dict[str, Arm]:
    """Every arm of transformers' `generate`."""
    length, lookup = settings.max_new_tokens, {"prompt_lookup_num_tokens": settings.K}
    arms = {"generate": generate(model, length), "prompt lookup": generate(model, length, **lookup)}
    for name, setting in {f"K={settings.K}": (settings.K, "constant", 0.0), **PEERS}.items():
        # An assistant of its own: transformers keeps the state of a schedule in its config.
        assistant = load_draft(settings.drafter, settings.dtype).to(model.device).eval()
        arms[f"assisted {name}"] = assisted(model, length, assistant, setting)
    return arms


def picture(turns: Turns) -> str:
    """Every arm's median rate, the fastest on top."""
    found = sorted(((rate(t), name) for name, t in turns.items()), reverse=True)
    bars = [
        LyingBar(name, [("a" if name.startswith("ours") else "d", speed, "")], f"{speed:.0f}")
        for speed, name in found
    ]
    title = "One prompt at a time, prefill included"
    chart = lanes(title, bars, x_label="tokens/s, median over prompts")
    legend = [("a", "ours"), ("d", "transformers generate")]
    return drawing([chart], legend)


if __name__ == "__main__":
    run_command(main, Bench)
