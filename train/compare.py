"""Which drafter should I train? Every kind on the same target, data and seconds, beside the others.

    draftsmith compare target=my-model prompts=prompts.jsonl budget=120 out=runs/compare

Without data= the target first answers the prompts (`draftsmith prepare`). On a CPU rounds of each
kind are then timed, with random weights (<out>/rounds.json), by which every row says what was
foretold of it. Each kind is trained for `budget` seconds of its own steps (a draft LM: half of them
pretrained, half distilled), by the command that a user would give, which is printed. How it decodes
best (K, tree, policy) is chosen by `evaluate`'s advice, on prompts of the part for tuning; what it
is worth then is measured on those of the part for reporting, in turns with plain decoding, at each
temperature. Kinds that need no training come after: text that is looked up, the target's own
layers, a store beside the fastest of what was trained.

A row that is finished lies in <out>/rows, and isn't made again; killed, the same command goes on.
The page is <out>/compare.html, its figures <out>/compare.json (and, in flat rows, results.json),
each evaluation's own report <out>/reports.
"""

import json
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.command import check_least, numbers, parse, unknown
from draftsmith.decode.drafters.load import BARE, UNTRAINED, composed
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import Values, evaluate
from draftsmith.decode.predict.draft_sizes import (
    FASTDRAFT,
    RECIPE,
    Draft,
    Sizing,
    config_like,
    least_layers,
    machine_of,
    propose,
)
from draftsmith.decode.predict.load_grid import Grid
from draftsmith.decode.predict.timed_rounds import HEADS, timed_rounds
from draftsmith.decode.prompts.sources import read_source
from draftsmith.decode.report import compared, results
from draftsmith.decode.report.page import write
from draftsmith.launch import run_as_user
from draftsmith.models.disk.provenance import command_line, git_commit, machine, versions
from draftsmith.models.disk.read_lm import load_config
from draftsmith.models.disk.store import Manifest, hold, read_lines, write_atomically
from draftsmith.models.draft_lm import set_mask
from draftsmith.models.folder.drafter_folder import META
from draftsmith.printed import print_table
from draftsmith.progress import watched
from draftsmith.train.text.prepared import is_prepared

INTERRUPTED = 130
WIDE = 256  # of targets that the recipes' learning rates were found on; of wider ones they are less
BEST = "BEST"  # suffix+BEST: the fastest trained drafter of this comparison


class Recipe(NamedTuple):
    """How a kind is trained: entry, recipe, learning rate, what else is unlike the recipe."""

    entry: str
    name: str
    lr: float
    more: tuple[str, ...] = ()


BLOCK = ("head.taps=[]",)
PUBLISHED = (*BLOCK, "head.layers=2", "head.rank=64", "head.last=false", "anchors.state=0")
DRAFT, PARD = "draft", "pard"
LEVELS = 5  # tokens of a pass, of the block drafters too
RECIPES = {
    DRAFT: Recipe("distill", "quickstart/distill", 1e-2),
    PARD: Recipe("distill", "pard/gsm8k", 1e-2, (f"pard.levels={LEVELS}",)),
    "medusa": Recipe("heads", "medusa/quickstart", 5e-3),
    "hydra": Recipe("heads", "hydra/quickstart", 5e-3),
    "hydra++": Recipe("heads", "hydra/gsm8k-plus", 5e-3),
    "clover2": Recipe("heads", "clover2/gsm8k", 1e-3),
    "falcon": Recipe("heads", "falcon/gsm8k", 1e-2),
    "eagle1": Recipe("eagle", "eagle1/quickstart", 1e-2),
    "eagle3": Recipe("eagle", "eagle3/quickstart", 1e-2),
    "block": Recipe("blocks", "block/gsm8k", 1e-2, BLOCK),
    "dspark": Recipe(
        *("blocks", "block/gsm8k", 1e-2),
        (*PUBLISHED, "head.kind=dspark", "loss=0.1*ce+1.8*tv"),
    ),
    "dflash": Recipe("blocks", "block/gsm8k", 1e-2, (*PUBLISHED, "head.kind=dflash", "loss=ce")),
}


@dataclass(kw_only=True)
class KindsCompared:
    """What is compared, on what, and for how long each kind is trained."""

    target: str
    prompts: str = "stdlib"  # what is held out of them is reported on
    data: str = ""  # to train on: rows, or a folder of `prepare`; empty: <out>/answers, made first
    tune: str = ""  # rows that K and trees are chosen on; empty: the prompts' own part for that
    budget: float = 120.0  # seconds of training of each kind
    kinds: str = ""  # such as eagle3,medusa,suffix,suffix+BEST,exit:2; empty: all
    more: dict[str, str] = field(default_factory=dict)  # arguments for a kind's training
    temperatures: str = "0,1"
    limit: int = 32  # prompts that are reported on; choices are made on half as many
    max_new_tokens: int = 64
    prompt_tokens: int = 64
    answers: int = 2000  # that the target writes, where there is no data
    max_length: int = 256  # tokens of a training sequence
    batch_size: int = 8  # of these
    processes: int = 1  # that train
    threads: int = 0  # of the CPU, that decode; 0 as torch has it
    gpu: str = ""  # that the draft LM's size is chosen for, as `size` does; empty: cpu, or h100
    seed: int = 0
    out: str = "runs/compare"

    def __post_init__(self) -> None:
        check_least(self, limit=2, max_new_tokens=2, answers=1, batch_size=1, processes=1)
        if not 0 < self.budget < math.inf:
            raise ValueError(f"budget: got {self.budget:g}, expected seconds above 0, and finite")
        self.heats = numbers("temperatures", self.temperatures, float)
        if wrong := [kind for kind in self.more if kind not in RECIPES]:
            raise ValueError(unknown("kind", wrong[0], RECIPES))

    def chosen(self, layers: int) -> list[str]:
        """The kinds in the order in which they are made: those that need another come last."""
        every = [*RECIPES, "ngram", "suffix", "recycling", f"exit:{max(1, layers // 3)}"]
        every.append(f"suffix+{BEST}")
        asked = self.kinds.split(",") if self.kinds else every
        for kind in asked:
            first, after = composed(kind)
            name = (first or after).partition(":")[0]
            simple, behind = (*BARE[1:], *UNTRAINED), after.partition(":")[0]
            known = kind in RECIPES or name in simple or (Path(kind) / META).is_file()
            # Of a plain LM's folder, or one of the hub, too.
            fits = behind in (BEST, *RECIPES, *simple) or "/" in after or Path(after).exists()
            if not known or (first and not fits):
                raise ValueError(unknown("kind", kind, every))
            if first and after in RECIPES and after not in asked:
                raise ValueError(f"kinds: got {kind} without {after}, expected {after},{kind}")
        return sorted(dict.fromkeys(asked), key=lambda kind: bool(composed(kind)[0]))


# What a draft LM is trained by before its own recipe: entry, recipe, and the run's name.
PRETRAINED = ("pretrain", "quickstart/draft", "pretrained")
DISTILLED = ("distill", "quickstart/distill", "distilled")
BEFORE: dict[str, tuple[tuple[str, str, str], ...]]
BEFORE = {DRAFT: (PRETRAINED,), PARD: (PRETRAINED, DISTILLED)}
DEEP = 3  # layers of a draft LM that drafts in one pass, at least: MASKs see no more by one

# What rows of an earlier command may differ in: which kinds, and where.
ASKED = Manifest("asked.json", "draftsmith compare", decides="settings", free=("kinds", "out"))


def main(argv: list[str]) -> None:
    settings = parse(KindsCompared, argv)
    config = load_config(settings.target).get_text_config()
    kinds = settings.chosen(config.num_hidden_layers)
    for source in {settings.prompts, settings.tune, settings.data} - {""}:
        if not is_prepared(source):
            read_source(source)  # an error before all the training
    out = Path(settings.out)
    lock = hold(out, "wait for it, or give this one another out=", again=True)
    ASKED.claim(out, {"settings": asdict(settings)})
    # What is being trained then ends, too.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        data = settings.data or prepared(settings)
        grids = rounds_before(settings, kinds, config)
        rows: list[Values] = []
        for number, kind in enumerate(kinds, start=1):
            kept = out / "rows" / f"{kind.replace('/', '-')}.json"
            print(f"{number} of {len(kinds)}: {kind}{', done' if kept.exists() else ''}")
            rows.append(json.loads(kept.read_text()) if kept.exists() else {})
            if not rows[-1]:
                rows[-1] = row_of(settings, kind, data, config, rows[:-1])
                if not rows[-1].pop("again", False):
                    kept.parent.mkdir(exist_ok=True)
                    write_atomically(kept, json.dumps(rows[-1], indent=1).encode())
            add_foretold(rows[-1], grids)
        found = {"schema": 1, "settings": asdict(settings), "data": data, "rows": rows}
        found |= {"says": compared.says(rows), "machine": machine(), "command": command_line()}
        found |= {"commit": git_commit(), "versions": versions()}
        write_atomically(out / "compare.json", json.dumps(found, indent=1).encode())
        write_atomically(out / "compare.html", compared.page(found).encode())
        shared = {r["kind"]: {key: r[key] for key in ("training", "bytes")} for r in rows}
        flat = [one | shared[r["kind"]] for r in rows for one in r["results"]]
        if flat:
            results.publish(f"Drafters for {settings.target}", flat, out)
    finally:
        signal.signal(signal.SIGTERM, handler)
        lock.release(force=True)
    print(found["says"])
    print_table(*compared.table(rows), compared.WORDS)
    print(f"written: {out / 'compare.json'}, {out / 'compare.html'}")


def prepared(settings: KindsCompared) -> str:
    """The target's answers to the prompts' training side, made now where they aren't there."""
    data = f"{settings.out}/answers"
    asked: Values = {"target.path": settings.target, "prompts": settings.prompts, "out": data}
    asked |= {"limit": settings.answers, "max_new_tokens": settings.max_length // 2}
    asked |= {"prompt_tokens": settings.prompt_tokens, "seed": settings.seed}
    code, told = run_as_user(["prepare", "processes=1", *(f"{k}={v}" for k, v in asked.items())])
    if code:
        raise ValueError(f"prepare ended with code {code}: {told.removeprefix('error: ')}")
    return data


def rounds_before(settings: KindsCompared, kinds: Sequence[str], config: Any) -> dict[str, Grid]:
    """Of each kind that random weights stand for, what rounds take here; on a CPU."""
    kept = Path(settings.out) / "rounds.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    known = (*HEADS, *BEFORE, "ngram", "suffix")
    asked = [kind for kind in kinds if kind in known or kind.startswith("exit:")]
    asked = [kind for kind in asked if kind not in found]
    drafts = {}
    try:
        for kind in BEFORE.keys() & asked:
            drafts[kind] = config_like(config, best_draft(settings, config, kind))
        if PARD in drafts:
            set_mask(drafts[PARD], 0, LEVELS)
    except ValueError:  # which is said where it would be trained
        asked = [kind for kind in asked if kind not in BEFORE]
    if asked and not torch.cuda.is_available():
        rounds = timed_rounds(config, asked, [1], drafts)
        for kind, grid in watched(rounds, "rounds", len(asked)):
            found[kind] = grid and grid.as_json()
            write_atomically(kept, json.dumps(found).encode())
    return {kind: Grid.of(told, str(kept)) for kind, told in found.items() if told}


def add_foretold(row: Values, grids: dict[str, Grid]) -> None:
    """To each result what was foretold of it, by its tau; None of trees, of longer chains than were
    timed, and where none was.
    """
    grid = grids.get(row["kind"])
    for one in row["results"]:
        one["foretold"], K = None, one["K"]
        if grid is not None and K and one["tree"] == "chain" and grid.nodes[-1] > K:
            one["foretold"] = one["tau"] / grid.cost(K)


def row_of(
    settings: KindsCompared, kind: str, data: str, config: Any, before: list[Values]
) -> Values:
    """All of one kind: what its training took, and a result for each temperature; or `refused`, why
    it has none. again: it ended for a reason that another try may not have.
    """
    row: Values = {"kind": kind, "refused": "", "training": None, "bytes": 0, "results": []}
    try:
        row["kind"] = kind = led(kind, before)
        for out, entry, words in runs_of(settings, kind, data, config):
            code, told = run_as_user(["train", entry, *words])
            if code == INTERRUPTED:
                raise KeyboardInterrupt("the same command goes on")
            if code:
                why = f"its training ended with code {code}: {told.removeprefix('error: ')}"
                if "is being written by" in told:
                    raise SystemExit(f"error: {why}")
                return row | {"refused": why, "again": "memory:" not in told}
            row["training"] = trained(out, row["training"])
        name = composed(kind)[1]
        led_by = [other["training"] for other in before if other["kind"] == name]
        row["training"] = row["training"] or next(iter(led_by), None)
        folder = Path(settings.out) / "runs" / name / "drafter" if name in RECIPES else Path(name)
        row["drafter"] = kind.removesuffix(name) + (str(folder) if folder.is_dir() else name)
        row["bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for temperature in settings.heats:
            row["results"].append(measured(settings, kind, row["drafter"], temperature))
    except ValueError as error:
        print(f"{kind}: {error}")
        return row | {"refused": str(error), "results": [], "again": True}
    return row


def runs_of(
    settings: KindsCompared, kind: str, data: str, config: Any
) -> Iterator[tuple[Path, str, list[str]]]:
    """The training runs of a kind: folder, entry, and arguments. ValueError: no draft LM fits."""
    if kind not in RECIPES:
        return
    recipe, runs = RECIPES[kind], Path(settings.out) / "runs"
    last, before = runs / kind, BEFORE.get(kind, ())
    lr = recipe.lr * min(1.0, WIDE / config.hidden_size)
    shared = {"processes": settings.processes, "target.path": settings.target, "data": data}
    shared |= {"seconds": settings.budget / (1 + len(before)), "lr": f"{lr:.3g}", "eval_every": 0}
    shared |= {"heldout.prompts": settings.tune or settings.prompts, "seed": settings.seed}
    shared |= {"heldout.max_new_tokens": settings.max_new_tokens, "heldout.limit": 16}
    shared |= {"text.max_length": settings.max_length, "batch_size": settings.batch_size}
    own = [*recipe.more, *settings.more.get(kind, "").split()]
    begun: list[str] = []
    for entry, name, run in before:
        out = runs / f"{kind}-{run}"
        if not begun:
            best = best_draft(settings, config, kind)
            begun = [f"model.{size}={getattr(best, size)}" for size in RECIPE]
        said = shared | {"recipe": name, "out": out}
        said |= {"heldout.limit": 0} if entry == "pretrain" else {}
        yield out, entry, [*(f"{k}={v}" for k, v in said.items()), *begun]
        begun = [f"draft.path={out / 'drafter'}"]
    said = shared | {"recipe": recipe.name, "out": last}
    yield last, recipe.entry, [*(f"{k}={v}" for k, v in said.items()), *begun, *own]


def best_draft(settings: KindsCompared, config: Any, kind: str = DRAFT) -> Draft:
    """The draft LM that `draftsmith size` proposes first; ValueError where none fits."""
    gpu = settings.gpu or ("h100" if torch.cuda.is_available() else "cpu")
    least = max(least_layers(config), DEEP * (kind == PARD))
    asked = Sizing(target=settings.target, gpu=gpu, min_layers=least)
    return propose(config, asked, FASTDRAFT, machine_of(asked))[1][0]


def trained(run: Path, before: Values | None) -> Values:
    """What a run's training took, with that of the run before it; without its evaluations."""
    steps = [record for record in read_lines(run / "metrics.jsonl") if "tokens" in record]
    took = {"seconds": sum(record["seconds"] for record in steps), "steps": len(steps)}
    took |= {"tokens": sum(record["tokens"] for record in steps)}
    return took if before is None else {name: took[name] + before[name] for name in took}


def led(kind: str, before: list[Values]) -> str:
    """The kind, with the fastest trained one in BEST's place; ValueError where there is none."""
    if composed(kind)[1] != BEST:
        return kind
    found = [row for row in before if row["kind"] in RECIPES and row["results"]]
    if not found:
        raise ValueError(f"got {kind}, but no drafter was trained")
    return kind.removesuffix(BEST) + max(found, key=compared.mean_speedup)["kind"]


def measured(settings: KindsCompared, kind: str, drafter: str, temperature: float) -> Values:
    """What a drafter is worth at its best setting: a row as in docs/results, with what `compared`
    shows beside. Its report is written.
    """
    asked: Values = {"target": settings.target, "drafter": drafter, "temperature": temperature}
    same = ("limit", "max_new_tokens", "prompt_tokens", "threads", "seed")
    asked |= {key: getattr(settings, key) for key in same}
    few = asked | {"limit": -(-settings.limit // 2), "identity": False, "split": "tune"}
    tune = Evaluation(**few, prompts=settings.tune or settings.prompts)
    advice = evaluate(tune, {kind: drafter})[kind]["advice"]
    how: Values = {"policy": "auto"}  # of those that remember, whose answers would advise them
    if advice:
        # Where nothing pays: as it would be best; `auto` then drafts nothing, of any kind.
        ways = [way for way in advice["depths"][1:] if way["policy"] != "auto"]
        way = {"K": advice["best"], "tree": advice["tree"], "policy": advice["policy"]}
        drafts = advice["best"] and advice["policy"] != "auto"
        way = way if drafts else max(ways, key=lambda one: one["speedup"])
        how = {key: way[key] for key in ("K", "tree", "policy")}
    told = Evaluation(**asked, **how, prompts=settings.prompts, advice=False)
    report = evaluate(told, {kind: drafter})[kind]
    folder = Path(settings.out) / "reports" / kind.replace("/", "-") / f"t{temperature:g}"
    write(report, folder)
    row = results.row(kind, report) | {"report": str(folder.relative_to(settings.out))}
    beside = ("categories", "accepted_histogram", "acceptance_conditional", "lossless", "times")
    return row | {key: report[key] for key in beside} | {"levels": how.get("K")}
