"""What a draft of a foreign vocabulary lacks, and how much of it OmniDraft makes up for.

    python bench/evidence/omni.py                     # trains two drafts, and one online, first

A BPE of Spec-Bench's questions is the foreign tokenizer. The same draft is trained on the same text
with it and with the target's (`upper`), and decodes the same held-out prompts in fp32, a chain of K
tokens a round: by the tokens in common (tli), by text (slem), by the cache of n-grams (omni),
and by the latter after it learned online from a stream of other prompts. `upper, in common` is
`upper` that drafts tokens in common alone: what is lost by that. closed: (tau - tau of tli) / (tau
of upper - tau of tli), its interval over prompts. What is trained stays in `trained`; rows and
page: <out>/omni.*
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown, source, write_table
from draftsmith.bench.speed.workers import launch, train
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import ROLES, train_bpe
from draftsmith.train.run.recipe import gsm8k

BASE, TOP, COMMON = "tli", "upper", "upper, in common"


@dataclass
class OmniBench:
    target: str = field(default_factory=lambda: gsm8k("target"))
    data: str = field(default_factory=lambda: gsm8k("data"))
    text: str = "../shared/data/spec_bench/question.jsonl"  # of the foreign tokenizer
    size: int = 4096  # of its vocabulary
    K: int = 4
    prompts: int = 32
    max_new_tokens: int = 64
    online: tuple[str, ...] = ("replay.stream=gsm8k:3000",)  # more settings of the online run
    threads: int = 1
    trained: str = "runs/evidence/omni"
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(OmniBench, argv)
    need("target", settings.target)
    if not Path(settings.text).exists():
        raise ValueError(f"text: got {settings.text}, expected JSONL of questions with `turns`")
    torch.set_num_threads(settings.threads)
    arms = trained_arms(settings)
    model, tokenizer = load_decoded(TargetSpec(settings.target, dtype="float32"), "cpu")
    asked = load_prompts(settings.data, tokenizer, limit=settings.prompts, split="report")
    rows, about = [], about_run() | {"threads": settings.threads, "K": settings.K}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, max_new_tokens=settings.max_new_tokens)
        made: dict[str, Any] = {}
        for arm, name in {"plain": None, **arms}.items():
            drafter = load_drafter(name, model, tokenizer)
            if arm == COMMON:
                hold_to(load_drafter(arms[BASE], model, tokenizer), drafter)
            decoder = Decoder(model, tokenizer, drafter, K=settings.K, batch_size=8)
            made[arm] = decoder.generate([one.tokens for one in asked], params)
        counted = {
            arm: np.array([[c.counters.emitted, c.counters.rounds] for c in made[arm]])
            for arm in arms
        }
        for arm in arms:
            same = [a.tokens == b.tokens for a, b in zip(made[arm], made["plain"], strict=True)]
            rows.append(
                {"what": arm, "temperature": temperature, "tau": tau(counted[arm])}
                | {"tau_interval": spread(counted, lambda c, arm=arm: tau(c[arm]))}
                | {"closed": closed(counted, arm)}
                | {"closed_interval": spread(counted, lambda c, arm=arm: closed(c, arm))}
                | {"identical": sum(same), "prompts": len(asked), **about}
            )
            print(rows[-1]["what"], temperature, rows[-1]["tau"], rows[-1]["closed"], flush=True)
    write_table(Path(settings.out), "omni", rows, page(rows))


def hold_to(foreign: Any, drafter: Any) -> None:
    """Let a draft LM in the target's tokens draft those alone that the foreign one has."""
    kept_D, head = torch.tensor(sorted(foreign.known)), drafter.runner.head
    drafter.runner.head = VocabHead(head.weight[kept_D], kept_D, head.size)


def trained_arms(settings: OmniBench) -> dict[str, str]:
    """Drafters by name, made where they aren't there yet."""
    place = Path(settings.trained)
    words, foreign, upper = place / "tokenizer", place / "foreign/model", place / "upper/drafter"
    if not words.exists():
        lines = Path(settings.text).read_text("utf-8").splitlines()
        texts = [turn for line in lines for turn in json.loads(line)["turns"]]
        train_bpe(texts, settings.size, ROLES).save_pretrained(words)
    common = ["recipe=gsm8k/draft", f"data={settings.data}"]
    train("pretrain", foreign, *common, "target.path=", f"tokenizer={words}")
    train("pretrain", upper, *common, f"target={settings.target}")
    arms = {BASE: f"tli:{foreign}", "slem": f"slem:{foreign}", "omni": f"omni+{foreign}"}
    arms[TOP] = arms[COMMON] = str(upper)
    done = place / re.sub(r"\W+", "-", "-".join(("online", *settings.online))) / "done.json"
    if not done.exists():
        how = [f"target={settings.target}", f"drafter={arms['omni']}", *settings.online]
        launch("online", "recipe=online/omni", f"out={done.parent}", *how)
    arms["omni, online"] = json.loads(done.read_text())["result"]
    return arms


def tau(counted_P2: np.ndarray) -> float:
    emitted, rounds = counted_P2.sum(0)
    return float(emitted / rounds)


def closed(counted: dict[str, np.ndarray], arm: str) -> float:
    low, high = tau(counted[BASE]), tau(counted[TOP])
    return (tau(counted[arm]) - low) / (high - low)


def spread(counted: dict[str, np.ndarray], figure: Any, draws: int = 2000) -> list[float]:
    """95%, bootstrap over prompts, the same ones for all arms."""
    rng, many = np.random.default_rng(0), len(counted[BASE])
    found = []
    for _ in range(draws):
        drawn = rng.integers(0, many, many)
        found.append(figure({arm: rows[drawn] for arm, rows in counted.items()}))
    return [float(x) for x in np.percentile(found, [2.5, 97.5])]


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    body = []
    for row in rows:
        (a, b), (c, d) = row["tau_interval"], row["closed_interval"]
        figures = f"{row['tau']:.3f} [{a:.3f}, {b:.3f}]", f"{row['closed']:.0%} [{c:.0%}, {d:.0%}]"
        same = f"{row['identical']} of {row['prompts']}"
        body.append([row["what"], f"{row['temperature']:g}", *figures, same])
    head = ("drafter", "temperature", "tau", "of the gap", "answers as plain decoding's")
    words = (
        f"{source(rows)} The same draft of 0.7M with a foreign BPE (tli, slem, omni) and with the "
        f"target's own (upper; in common: held to tokens that the foreign one has), K = "
        f"{rows[0]['K']}, fp32. Of the gap from tli to upper so much is closed; 95% intervals over "
        "prompts, one training each."
    )
    return "\n".join(["# A foreign vocabulary", "", words, "", *markdown(head, body)]) + "\n"


if __name__ == "__main__":
    run_command(main, OmniBench)
