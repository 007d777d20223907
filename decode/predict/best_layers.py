"""Which halves of a target's layers its own draft leaves out best: Draft & Verify's search (Zhang
et al., arXiv 2309.08168).

    draftsmith skip-layers target=TARGET prompts=prompts.jsonl temperature=1

Prints a drafter for each number of halves left out; the one to take is decoded with by
drafter=skip:... (`decode/untrained/own_layers.py`).

The target answers prompts of the tune part. How often the part's choices, along an answer and with
the answer's own noise, are its tokens is the part's agreement a; what it is worth is

    (1 + a + ... + a^K) / (1 + K c'),    c' = bytes read by the part / by the target

at the best K, which is deterministic: no clock is asked. The sets that look best are then decoded
with, since the part alone reads keys and values of its own, while in decoding those of the
committed text are the target's: there tau and MBSU are counted.

Where we differ from the paper: it asks a Gaussian process for sets and measures tokens a second,
about a thousand times. Here sets grow by the half that costs least, and after each step halves are
swapped at random while that helps; where there are few sets, all are tried. What was tried is kept
in <out>/tried.jsonl: the same command goes on after a stop.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.command import check_least, parse
from draftsmith.decode.drafters.lm import weights_read
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.evaluate.metrics import block_efficiency
from draftsmith.decode.forward.lean import Half
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams, choose, request_race
from draftsmith.decode.untrained.own_layers import part_bytes, skip_name, units_of, worth
from draftsmith.models.disk.store import Manifest, appending, read_lines
from draftsmith.models.target import TargetSpec
from draftsmith.printed import number, print_table, share, times_as
from draftsmith.progress import watched

Unit = frozenset[Half]  # left out or not: a half, or a whole layer
MANIFEST = Manifest("skip-layers.json", "draftsmith skip-layers", schema=1, decides="about")


@dataclass
class LayerSearch:
    """What may be left out of which target, and what it is judged on."""

    target: str
    prompts: str = "stdlib"
    out: str = "runs/skip-layers"
    K: int = 4  # drafted tokens a round, at most: each set has a best K
    share: float = 0.5  # of the halves, left out at most
    swaps: int = 32  # tried after each half that is left out
    finalists: int = 3  # sets that are decoded with
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 64
    limit: int | None = 32  # prompts; none: all
    prompt_tokens: int = 64
    thinking: bool | None = None
    template_kwargs: str = ""
    batch_size: int = 8
    seed: int = 0
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_least(self, K=1, swaps=0, finalists=1, batch_size=1, prompt_tokens=1)
        if not 0 < self.share < 1:
            raise ValueError(f"share: got {self.share:g}, expected a number above 0 and below 1")


def main(argv: list[str]) -> None:
    """Decode plainly, search, decode with the best, print them."""
    settings = parse(LayerSearch, argv)
    params, out = SamplingParams.of(settings), Path(settings.out)
    model, tokenizer = load_decoded(TargetSpec(settings.target, settings.dtype), settings.device)
    set_template(tokenizer, settings.thinking, settings.template_kwargs)
    how = asdict(DecodeSettings.of(settings))
    plain = Decoder(model, tokenizer, **how)
    prompts = load_prompts(
        settings.prompts,
        tokenizer,
        limit=settings.limit,
        prompt_tokens=settings.prompt_tokens,
        split="tune",
    )
    asked = [prompt.tokens for prompt in prompts]
    events = plain.stream(asked, params)
    done = (event.completion for event in events if event.completion is not None)
    answers = [made for made in watched(done, "decoding", len(asked)) if len(made.tokens) > 1]
    if not answers:
        raise ValueError(f"prompts: got no answer of 2 tokens in {settings.prompts}; take others")
    answers.sort(key=lambda made: made.index)
    texts = json.dumps([made.prompt_tokens + made.tokens for made in answers]).encode()
    about = asdict(params) | {"target": settings.target, "dtype": settings.dtype}
    about["answers"] = hashlib.sha256(texts).hexdigest()
    begun = MANIFEST.claim(out, {"about": about})
    rows = searched(plain.runner, answers, params, settings)
    finalists = sorted(rows, key=lambda row: -row["worth"])[: settings.finalists]
    for row in watched(finalists, "decoding", len(finalists)):
        drafter = load_drafter(row["drafter"], model, tokenizer)
        made = Decoder(model, tokenizer, drafter, **how | {"K": row["K"]}).generate(asked, params)
        row["tau"] = block_efficiency([one.counters for one in made])
        row["mbsu"] = row["tau"] / (1 + row["K"] * row["c_bytes"])
    best = max(finalists, key=lambda row: row["mbsu"])
    MANIFEST.write(out, begun | {"sets": rows, "best": best})
    head = ["drafter", "left out", "agreement", "c'", "K", "MBSU, foretold", "tau", "MBSU"]
    print_table(head, [cells(row) for row in rows], head[:1])
    print(f"decode with the best: drafter={best['drafter']} K={best['K']}")
    print(f"written: {out / MANIFEST.name}")


def searched(
    runner: Runner, answers: Sequence[Completion], params: SamplingParams, settings: LayerSearch
) -> list[dict[str, Any]]:
    """The best set found of each size, as the manifest tells it; every agreement is written down
    in `settings.out` as it is taken, and none that is there already is taken again.
    """
    depth, whole = runner.config.num_hidden_layers, weights_read(runner.model)
    units, tried = units_of(runner, range(depth)), Path(settings.out) / "tried.jsonl"
    most = max(1, int(len(units) * settings.share))
    rows: dict[frozenset[Unit], dict[str, Any]] = {}
    with appending(tried, "wait for it, or choose another folder") as append:
        known = {line["drafter"]: line["agreement"] for line in read_lines(tried)}

        def value(chosen: frozenset[Unit]) -> float:
            without = frozenset(half for unit in chosen for half in unit)
            if (name := f"skip:{skip_name(without)}") not in known:
                part = runner.part(depth, without)
                known[name] = agreement(part, answers, params, settings.batch_size)
                append({"drafter": name, "agreement": known[name]})
            c = part_bytes(runner.model, depth, without) / whole
            depths = [(worth(known[name], K, c), K) for K in range(1, settings.K + 1)]
            rows[chosen] = {"drafter": name, "left_out": len(without), "agreement": known[name]}
            rows[chosen] |= {"c_bytes": c} | dict(zip(("worth", "K"), max(depths), strict=True))
            return max(depths)[0]

        found = best_sets(value, units, most, settings.swaps, settings.seed)
        return [rows[best] for best in watched(found, "searching", most)]


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    words = [row["drafter"], number(row["left_out"]), share(row["agreement"])]
    words += [number(row["c_bytes"]), str(row["K"]), times_as(row["worth"])]
    return [*words, number(row.get("tau")), times_as(row.get("mbsu"))]


def best_sets(
    value: Callable[[frozenset[Unit]], float],
    units: Sequence[Unit],
    most: int,
    swaps: int,
    seed: int,
) -> Iterator[frozenset[Unit]]:
    """Of 1, 2, ... `most` units the set that is worth most: of all sets where they are no more than
    a search would try, else as found by adding the best unit to the last set and then trying
    so many random swaps, each kept where it helps.
    """
    rng, kept = random.Random(seed), frozenset[Unit]()
    for size in range(1, most + 1):
        if comb(len(units), size) <= len(units) - size + 1 + swaps:
            kept = max(map(frozenset, combinations(units, size)), key=value)
            yield kept
            continue
        kept = max((kept | {unit} for unit in units if unit not in kept), key=value)
        for _ in range(swaps):
            out = rng.choice([unit for unit in units if unit in kept])
            into = rng.choice([unit for unit in units if unit not in kept])
            kept = max(kept, kept - {out} | {into}, key=value)
        yield kept


@torch.inference_mode()
def agreement(
    part: Runner, answers: Sequence[Completion], params: SamplingParams, batch_size: int
) -> float:
    """The share of the answers' tokens, the first of each left out, that are the part's choices
    after the text before them, with the noise that they were chosen with.
    """
    same = total = 0
    for first in range(0, len(answers), batch_size):
        batch = answers[first : first + batch_size]
        texts = [torch.tensor(made.prompt_tokens + made.tokens) for made in batch]
        ids_BT = pad_sequence(texts, batch_first=True).to(part.device)
        states_BTH, _ = part.states(ids_BT)
        for made, ids_T, states_TH in zip(batch, ids_BT, states_BTH, strict=True):
            begin = len(made.prompt_tokens) + 1
            end = begin + len(made.tokens) - 1
            logits_AV = params.transform(part.logits(states_TH[None, begin - 1 : end - 1]))[0]
            at_A = torch.arange(begin, end, device=part.device)
            race_AV = request_race(params, made.index, at_A, logits_AV.shape[-1])
            same += int((choose(logits_AV, race_AV) == ids_T[begin:end]).sum())
            total += end - begin
    return same / total
