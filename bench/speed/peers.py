"""Tokens a second of decoding, ours beside transformers', OpenVINO GenAI's and llama.cpp's.

    make peers                        # once: their environments, in .peers
    python bench/speed/peers.py       # the quickstart's pair and its costly twin, 1 and 2 threads
    python bench/speed/peers.py pairs=own threads=1 limit=3 new_tokens=48 out=runs/bench/try

The same weights in every engine: a draft LM and its target, and that target's twin of about 500M
parameters (`twin.py`), where a step costs what such a model's does; what is said of the twin is
acceptance of the small pair at the cost of the large one. Greedy, one prompt at a time, decoding
alone: prefills and their token are outside. Every way of drafting is tried at each K on prompts of
its own, and goes on at its best. Then all arms take turns on each prompt, in an order by lot,
`repeats` times; a prompt's rate is the best of its turns. ratio: ours over the peer's, mean over
prompts, with a 95% interval over them (bootstrap). Files that peers read are made once, in `work`.
Rows, page and picture: <out>/peers.*, where rows of other machines and numbers of threads stay.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, interval, write_table
from draftsmith.bench.speed import twin
from draftsmith.bench.speed.arms import PairBench, by_lot
from draftsmith.bench.speed.peers_arms import (
    DRAFTED,
    PLAIN,
    Call,
    Place,
    Told,
    Who,
    candidates,
    llama_example,
    ours,
)
from draftsmith.bench.speed.peers_page import page, picture
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.timing import isolated_times
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.servers.export import export
from draftsmith.models.target import TargetSpec

TWIN = {"hidden": 1536, "layers": 18, "intermediate": 4608}  # 516M of the quickstart's 5M
CONVERTER = Path(__file__).with_name("peers_gguf.py")
Answers = dict[Who, list[list[Told]]]  # by prompt, then turn


@dataclass
class PeersBench(PairBench):
    pairs: str = "own,twin"
    peers: str = "transformers,openvino,llama.cpp"
    environments: str = ".peers"  # of `make peers`
    limit: int = 12
    trial: int = 2  # more prompts, on which each arm's K is chosen
    new_tokens: int = 64
    K: str = "1,2,3,4,6,8"
    accept_K: int = 4  # at which accepted tokens are compared with llama.cpp's
    accept_tokens: int = 192
    repeats: int = 2
    threads: str = "1,2"
    openvino_isa: str = ""  # the most that its oneDNN may use: in bf16 its drafts die by AMX
    work: str = "runs/peers"


def main(argv: list[str]) -> None:
    # ------------------------------------------------------------------ setup
    settings = parse(PeersBench, argv)
    for path in (settings.target, settings.drafter):
        need("quickstart-runs", path)
    found = [name for name in ("openvino", "llama.cpp") if name in settings.peers]
    if missing := [name for name in found if not Path(settings.environments, name).exists()]:
        raise ValueError(
            f"got no {settings.environments}/{missing[0]}; run first: make peers, or say which "
            "peers=transformers there are"
        )
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    logging.set_verbosity_error()
    work = Path(settings.work)
    work.mkdir(parents=True, exist_ok=True)
    prompts = chosen_prompts(settings)
    rows = accepted(settings, prompts[settings.trial :], work) if "llama.cpp" in found else []
    # ------------------------------------------------------------------ turns
    for pair in settings.pairs.split(","):
        folder = twin_of(settings, work) if pair == "twin" else settings.target
        exported = files_of(settings, folder, work / pair, found)
        for threads in map(int, settings.threads.split(",")):
            torch.set_num_threads(threads)
            target, tokenizer = load_decoded(TargetSpec(folder, dtype=settings.dtype), "cpu")
            with ExitStack() as stack:
                how = settings.drafter, settings.dtype, threads, settings.environments
                place = Place(target, tokenizer, *how, exported, stack, settings.openvino_isa)
                rows += measured(settings, place, pair, prompts, work)
    # ----------------------------------------------------------------- report
    rows = [about_run() | row for row in rows]
    out = Path(settings.out)
    rows = beside(out / "peers.json", rows, "machine", "pair", "threads", "what")
    write_table(out, "peers", rows, page(rows), picture(rows))
    print(page(rows))


def accepted(settings: PeersBench, prompts: list[list[int]], work: Path) -> list[dict[str, Any]]:
    """What share of drafted tokens llama.cpp's example accepts at `accept_K`, and we: in the dtype
    asked for, where rounding parts some answers, and in fp32, where it doesn't.
    """
    K, rows = settings.accept_K, []
    for dtype in dict.fromkeys((settings.dtype, "float32")):
        how = replace(settings, dtype=dtype)
        files = files_of(how, settings.target, work / f"accepted-{dtype}", ["llama.cpp"])
        torch.set_num_threads(1)
        target, tokenizer = load_decoded(TargetSpec(settings.target, dtype=dtype), "cpu")
        with ExitStack() as stack:
            where = settings.drafter, dtype, 1, settings.environments
            place = Place(target, tokenizer, *where, files, stack)
            a, b = same_rounds(place, prompts, K, settings.accept_tokens)
        shares = [share(a), share(b)]
        ratios = [share([x]) / share([y]) for x, y in zip(a, b, strict=True) if y.accepted]
        row = {"what": "accepted", "peer": "llama.cpp example", "ratio": shares[0] / shares[1]}
        row |= {"interval": interval(ratios), "ours": shares[0], "theirs": shares[1]}
        row |= {"pair": "own", "dtype": dtype, "threads": 1, "prompts": len(a)}
        row["parameters"] = parameters(target)
        rows.append(row | counted(a, b, str(K), str(K)))
    return rows


def same_rounds(
    place: Place, prompts: list[list[int]], K: int, new_tokens: int
) -> tuple[list[Told], list[Told]]:
    """Our answers and those of llama.cpp's example, in the same rounds: its first one drafts after
    the prompt, ours after the prefill's token, so it is given that one too; ours go on to where its
    answer ended, so that no last round is cut. Prompts that don't allow that are left out.
    """
    example, mine = llama_example(place, DRAFTED, str(K)), ours(place, DRAFTED, K)
    found = []
    for ids in prompts:
        longer = ids + mine(ids, 1).tokens
        if same_again(longer, place.tokenizer):
            other = example(longer, new_tokens)
            found.append((mine(ids, other.counted + 1), other))
    return [a for a, _ in found], [b for _, b in found]


def parameters(target: PreTrainedModel) -> str:
    return f"{sum(p.numel() for p in target.parameters()) / 1e6:.0f}M"


def counted(a: list[Told], b: list[Told], *Ks: str) -> dict[str, Any]:
    """What was counted of our answers and theirs."""
    found = {}
    for name, told, K in zip(("ours", "theirs"), (a, b), Ks, strict=True):
        found |= {f"{name}_K": K, f"{name}_tau": tau(told), f"{name}_kept": share(told)}
    return found


def measured(
    settings: PeersBench, place: Place, pair: str, prompts: list[list[int]], work: Path
) -> list[dict[str, Any]]:
    """All rows of a pair on so many threads."""
    told = prompts[settings.trial :]
    Ks = [int(K) for K in settings.K.split(",")]
    arms = candidates(place, Ks, settings.peers.split(","), work)
    many = Counter(who[:2] for who in arms)
    tried = {who: call for who, call in arms.items() if many[who[:2]] > 1}
    tries = take_turns(f"{pair}, trial", tried, prompts[: settings.trial], settings.new_tokens, 1)
    kept = [who for who in arms if who not in tried or who in best(tries)]
    for who in [who for who in place.servers if who not in kept]:
        place.servers.pop(who).close()
    what = f"{pair}, {place.threads} thread(s)"
    taken = {who: arms[who] for who in kept}
    answers = take_turns(what, taken, told, settings.new_tokens, settings.repeats)
    about = {"pair": pair, "parameters": parameters(place.target), "threads": place.threads}
    found = [*compared(answers), *efficient(place, answers, settings)]
    return [row | about | {"prompts": len(told), "dtype": settings.dtype} for row in found]


def take_turns(
    what: str, arms: dict[Who, Call], prompts: list[list[int]], new_tokens: int, repeats: int
) -> Answers:
    """Every arm on every prompt, after one warm-up each, in an order by lot."""
    names = list(arms)
    answers: Answers = {who: [[] for _ in prompts] for who in names}
    turns = [(0, 0), *((turn, at) for turn in range(repeats) for at in range(len(prompts)))]
    shown = track(turns, what, transient=True, console=Console(stderr=True))
    for number, (_, at) in enumerate(shown):
        for who in by_lot(names, number):
            told = arms[who](prompts[at], new_tokens)
            if number:
                answers[who][at].append(told)
    return answers


def quickest(turns: list[list[Told]]) -> list[Told]:
    """Of each prompt the turn that was least disturbed."""
    return [max(told, key=lambda one: one.rate) for told in turns]


def rate(turns: list[list[Told]]) -> float:
    """Tokens a second over all prompts."""
    told = quickest(turns)
    return sum(one.counted for one in told) / sum(one.seconds for one in told)


def best(tries: Answers) -> list[Who]:
    """Of each way and peer the K that was fastest."""
    kept: dict[tuple[str, str], Who] = {}
    for who in sorted(tries, key=lambda who: rate(tries[who])):
        kept[who.what, who.peer] = who
    return [who for who in tries if who in kept.values()]


def compared(answers: Answers) -> list[dict[str, Any]]:
    """Ours against each peer, like against like; our drafts against our plain decoding too."""
    ours = {who.what: who for who in answers if who.peer == "ours"}
    pairs = [(ours[who.what], who) for who in answers if who.peer != "ours"]
    pairs += [(ours[what], ours[PLAIN]) for what in ours if what != PLAIN]
    plain = [turns[0].tokens for turns in answers[ours[PLAIN]]]
    rows = []
    for mine, other in pairs:
        a, b = (quickest(answers[who]) for who in (mine, other))
        row = {"what": mine.what, "peer": "ours, plain" if other.peer == "ours" else other.peer}
        ratios = [x.rate / y.rate for x, y in zip(a, b, strict=True)]
        row |= {"ratio": float(np.mean(ratios)), "interval": interval(ratios)}
        row |= {"ours": rate(answers[mine]), "theirs": rate(answers[other])}
        row |= counted(a, b, mine.K, other.K)
        if all(one.tokens for one in b):
            alike = [one.tokens == tokens for one, tokens in zip(b, plain, strict=True)]
            row["same"] = sum(alike) / len(alike)
        rows.append(row)
    return rows


def tau(told: Sequence[Told]) -> float | None:
    """Tokens a pass of the target; None where that isn't told."""
    rounds = sum(one.rounds for one in told)
    return sum(one.counted for one in told) / rounds if rounds else None


def share(told: Sequence[Told]) -> float | None:
    """The share of drafted tokens that were accepted; None where nothing is told of them."""
    drafted = sum(one.drafted for one in told)
    return sum(one.accepted for one in told) / drafted if drafted else None


def efficient(place: Place, answers: Answers, settings: PeersBench) -> list[dict[str, Any]]:
    """Our measured speed-up over the one that isolated forwards promise at its tau."""
    mine = next(who for who in answers if who[:2] == (DRAFTED, "ours"))
    told, plain = quickest(answers[mine]), quickest(answers[Who(PLAIN, "ours")])
    decoder = place.decoders[mine.what, mine.K]
    assert decoder.drafter is not None
    plan = decoder.settings.plan
    mean = {"batch": 1, "context": settings.prompt_tokens + settings.new_tokens // 2}
    mean |= {"prompt": settings.prompt_tokens, "nodes": plan.nodes}
    seconds = isolated_times(decoder.runner, decoder.drafter, plan, **mean)
    cost = seconds["verify"] + plan.levels * seconds["draft"]
    gains = [a.rate / b.rate for a, b in zip(told, plain, strict=True)]
    ideals = [tau([one]) * seconds["plain"] / cost for one in told]
    ratios = [gain / ideal for gain, ideal in zip(gains, ideals, strict=True)]
    row = {"what": "efficiency", "peer": "ideal speed-up", "ratio": float(np.mean(ratios))}
    row |= {"interval": interval(ratios), "ours": float(np.mean(gains))}
    row |= {"theirs": float(np.mean(ideals)), "ours_K": mine.K, "ours_tau": tau(told)}
    return [row | {f"{name}_ms": 1e3 * seconds[name] for name in ("plain", "verify", "draft")}]


# ------------------------------------------------------------------- inputs


def chosen_prompts(settings: PeersBench) -> list[list[int]]:
    """Those of the trial, then the reported: prompts whose text is split into the same tokens again
    and whose answer doesn't end by itself, so that engines that are told a text, or forbid the end
    of an answer, have the same work.
    """
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_decoded(spec, "cpu")
    decoder = Decoder(target, tokenizer)
    params = SamplingParams(max_new_tokens=2 * settings.new_tokens)
    wanted = settings.trial + settings.limit
    found = load_prompts(
        settings.prompts, tokenizer, limit=4 * wanted, prompt_tokens=settings.prompt_tokens
    )
    ids = [one.tokens for one in found if same_again(one.tokens, tokenizer)]
    done = decoder.generate(ids, params)
    kept = [one.prompt_tokens for one in done if one.finish_reason == "length"]
    if len(kept) < wanted:
        raise ValueError(f"prompts: got {len(kept)} that fit (see `same_again`), expected {wanted}")
    return [kept[i * len(kept) // wanted] for i in range(wanted)]


def same_again(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    text = str(tokenizer.decode(ids))
    return tokenizer(text, verbose=False)["input_ids"] == ids and "\0" not in text


def twin_of(settings: PeersBench, work: Path) -> str:
    """The costly twin's folder, made if it isn't there."""
    made = work / "twin/target"
    if not (made / "config.json").exists():
        sizes = [f"{name}={size}" for name, size in TWIN.items()]
        twin.main([f"target={settings.target}", f"out={made.parent}", *sizes])
    return str(made)


def files_of(
    settings: PeersBench, target: str, work: Path, peers: Sequence[str]
) -> dict[str, Path]:
    """What peers read, exported where it isn't there: by optimum-intel, and by llama.cpp's script,
    the draft through `export to=gguf`.
    """
    work.mkdir(parents=True, exist_ok=True)
    made: dict[str, Path] = {}
    for name, folder in (("target", target), ("draft", settings.drafter)):
        if "openvino" in peers:
            made[f"{name}.ov"] = work / f"{name}.ov"
            command = [f"{settings.environments}/openvino/bin/optimum-cli", "export", "openvino"]
            command += ["-m", folder, "--task", "text-generation-with-past"]
            weights = {"bfloat16": "fp16", "float32": "fp32"}[settings.dtype]
            run_once([*command, "--weight-format", weights], made[f"{name}.ov"])
        if "llama.cpp" in peers:
            file = made[f"{name}.gguf"] = work / f"{name}.gguf"
            # `export` keeps the folder's own type, which is bf16.
            if name == "draft" and settings.dtype == "bfloat16" and not file.exists():
                export(folder, settings.target, "gguf", str(file), str(CONVERTER))
            kind = {"bfloat16": "bf16", "float32": "f32"}[settings.dtype]
            command = [sys.executable, str(CONVERTER), folder, "--outtype", kind, "--outfile"]
            run_once(command, file)
    return made


def run_once(command: list[str], makes: Path) -> None:
    """A command whose last argument is what it makes; ValueError with its last words."""
    if makes.exists():
        return
    part = makes.with_name(f"part-{makes.name}")
    run = subprocess.run([*command, str(part)], capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"{command[0]} ended with code {run.returncode}: {run.stderr[-400:]}")
    part.rename(makes)


if __name__ == "__main__":
    run_command(main, PeersBench)
