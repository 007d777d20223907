"""Which halves of its layers a target's own draft leaves out best: Draft & Verify's search (Zhang
et al., arXiv 2309.08168).

    draftsmith skip-layers target=TARGET prompts=prompts.jsonl temperature=1

How often a part's choices after the target's answers so far, by the answers' own noise, are their
next tokens is its agreement a. What it is worth at the best K needs no clock:

    MBSU = (1 + a + ... + a^K) / (1 + K c'),    c' = bytes read by the part / by the target

A part alone reads keys and values of its own; when it drafts, those of committed text are the
target's. So the sets that look best are decoded with, and their own tau counted.

The paper asks a Gaussian process for sets and measures tokens a second, a thousand times. Here a
set grows by the half that costs least, and halves are swapped at random while that helps; where
there are few sets, all are tried. What was tried lies in `out`: the same command goes on from it.

Shapes: B answers, T tokens, H hidden, A tokens of an answer, V vocabulary.
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
from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.evaluate.asking import Asking
from draftsmith.decode.evaluate.metrics import block_efficiency
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams, choose, request_race
from draftsmith.decode.untrained.own_layers import (
    Unit,
    joined,
    part_bytes,
    skip_name,
    units_of,
    worth,
)
from draftsmith.models.disk.read_lm import write_json
from draftsmith.models.disk.store import appending, read_lines
from draftsmith.models.target import TargetSpec
from draftsmith.printed import number, print_table, share, times_as
from draftsmith.progress import watched

Units = frozenset[Unit]


@dataclass(kw_only=True)
class LayerSearch(Asking):
    """What may be left out of a target."""

    out: str = "runs/skip-layers"
    K: int = 4  # drafted tokens a round, at most
    share: float = 0.5  # of the halves, left out at most
    swaps: int = 32  # tried after each half that is left out
    finalists: int = 3  # sets that are decoded with

    def __post_init__(self) -> None:
        check_least(self, K=1, swaps=0, finalists=1, batch_size=1, prompt_tokens=1)
        if not 0 < self.share < 1:
            raise ValueError(f"share: got {self.share:g}, expected a number above 0 and below 1")


def main(argv: list[str]) -> None:
    settings = parse(LayerSearch, argv)
    params, how = SamplingParams.of(settings), asdict(DecodeSettings.of(settings))
    model, tokenizer = load_decoded(TargetSpec(settings.target, settings.dtype), settings.device)
    plain = Decoder(model, tokenizer, **how)
    answers = [made for made in settings.answers(plain, params) if len(made.tokens) > 1]
    if not answers:
        raise ValueError(f"prompts: got no answer of 2 tokens in {settings.prompts}; take others")
    rows = searched(plain.runner, answers, params, settings)
    finalists = sorted(rows, key=lambda row: -row["worth"])[: settings.finalists]
    asked = [made.prompt_tokens for made in answers], params, [made.index for made in answers]
    for row in watched(finalists, "decoding", len(finalists)):
        drafter = load_drafter(row["drafter"], model, tokenizer)
        made = Decoder(model, tokenizer, drafter, **how | {"K": row["K"]}).generate(*asked)
        row["tau"] = block_efficiency([one.counters for one in made])
        row["mbsu"] = row["tau"] / (1 + row["K"] * row["c_bytes"])
    best = max(finalists, key=lambda row: row["mbsu"])
    write_json(Path(settings.out) / "best.json", {"best": best, "sets": rows})
    shown: dict[str, Any] = {
        "drafter": str,
        "agreement": share,
        "c_bytes": number,
        "K": str,
        "worth": times_as,
    }
    shown |= {"tau": number, "mbsu": times_as}
    cells = [[show(row.get(name)) for name, show in shown.items()] for row in rows]
    print_table(["drafter", "agreement", "c'", "K", "MBSU, foretold", "tau", "MBSU"], cells)
    print(f"the best: drafter={best['drafter']} K={best['K']}; written: {settings.out}/best.json")


def searched(
    runner: Runner, answers: Sequence[Completion], params: SamplingParams, settings: LayerSearch
) -> list[dict[str, Any]]:
    """The best set found of each size; every agreement is written down as it is taken."""
    depth, whole = runner.config.num_hidden_layers, weights_read(runner.model)
    units = units_of(runner, range(depth))
    texts = [
        str(runner.dtype),
        asdict(params),
        [made.prompt_tokens + made.tokens for made in answers],
    ]
    mark = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]
    tried = Path(settings.out) / f"tried-{mark}.jsonl"
    rows: dict[Units, dict[str, Any]] = {}
    with appending(tried, "wait for it, or choose another folder") as append:
        known = {line["drafter"]: line["agreement"] for line in read_lines(tried)}

        def value(chosen: Units) -> float:
            without = joined(chosen)
            if (name := f"skip:{skip_name(without)}") not in known:
                part = runner.part(depth, without)
                known[name] = agreement(part, answers, params, settings.batch_size)
                append({"drafter": name, "agreement": known[name]})
            c = part_bytes(runner.model, depth, without) / whole
            best, K = max((worth(known[name], K, c), K) for K in range(1, settings.K + 1))
            rows[chosen] = {"drafter": name, "agreement": known[name], "c_bytes": c}
            rows[chosen] |= {"K": K, "worth": best}
            return best

        most = max(1, int(len(units) * settings.share))
        found = best_sets(value, units, most, settings.swaps, random.Random(settings.seed))
        return [rows[best] for best in watched(found, "searching", most)]


def best_sets(
    value: Callable[[Units], float],
    units: Sequence[Unit],
    most: int,
    swaps: int,
    rng: random.Random,
) -> Iterator[Units]:
    """Of 1, 2, ... `most` units the set of most value: of all sets where they are no more than are
    tried otherwise, which is the last set and each unit, then so many swaps, kept where they help.
    """
    kept: Units = frozenset()
    for size in range(1, most + 1):
        others = [unit for unit in units if unit not in kept]
        if comb(len(units), size) <= len(others) + swaps:
            kept = max(map(frozenset, combinations(units, size)), key=value)
            yield kept
            continue
        kept = max((kept | {unit} for unit in others), key=value)
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
    after the text before them, by the noise that they were chosen by.
    """
    same = total = 0
    for first in range(0, len(answers), batch_size):
        batch = answers[first : first + batch_size]
        texts = [torch.tensor(made.prompt_tokens + made.tokens) for made in batch]
        ids_BT = pad_sequence(texts, batch_first=True).to(part.device)
        states_BTH, _ = part.states(ids_BT)
        for row, made in enumerate(batch):
            at_A = torch.arange(len(made.tokens) - 1, device=part.device) + len(made.prompt_tokens)
            logits_AV = params.transform(part.logits(states_BTH[row, at_A])[None])[0]
            race_AV = request_race(params, made.index, at_A + 1, logits_AV.shape[-1])
            same += int((choose(logits_AV, race_AV) == ids_BT[row, at_A + 1]).sum())
            total += len(at_A)
    return same / total
