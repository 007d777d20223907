"""What distils a draft best: arms over paired seeds, each at its own learning rate.

    python bench/evidence/distillation.py                       # GSM8K: whatever is left to do
    python bench/evidence/distillation.py pair=quickstart seeds=3 arms=ce-text,fkl,tv,two-stage
    python bench/evidence/distillation.py worker=1 workers=2 # its share, once worker 0 has the
    drafts

What the runs begin from is made first: the target's answers, or the quickstart's target, and the
drafts. A seed is a draft pretrained with it, and an order of the data: arms of one seed share both.
The learning rate of each arm is chosen on a further seed, by alpha on the part of the held-out
prompts that is for tuning; alpha and tau are then measured on the other part, on text that the
target wrote. No run keeps anything but its last weights. What was measured is kept in <trained>;
the rows and the page are <out>/distillation.*, one file for both pairs.
"""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.bench.evidence import distillation_page
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, write_table
from draftsmith.bench.speed.workers import train
from draftsmith.command import parse, run_command
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import recast
from draftsmith.models.target import load_target, vocab_size
from draftsmith.train.distill import DistillConfig
from draftsmith.train.drafts.start import ModelStart, given_draft, place
from draftsmith.train.heldout.heldout import HeldOut
from draftsmith.train.losses.token_selection import Weighting
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.run import recipe
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import StepBatches, fit
from draftsmith.train.run.recipe import gsm8k
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import StateTeacher, TargetRows, Teacher, open_teacher
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import OnPolicy, OnPolicyText, Snapshot, make_batches
from draftsmith.train.text.prepared import is_prepared, load_prepared
from draftsmith.train.text.tokenise import tokenise

# Of each arm: what differs from forward KL on answers of the target, at `steps` and 8 sequences.
# `text`: the ground truth in place of the answers. The reference draft of adaspec, bottom-k and
# easy-k is the fkl arm of the same seed. Selecting 40% at a batch of 2.5 times the size trains on
# as many tokens as fkl (adaspec-tokens); the reference and the selecting run together cost about
# 2.5 times an fkl run, whose steps fkl-compute has. On-policy, 20 answers of the draft have as many
# tokens as 8 packed sequences. These three keep the rates of adaspec and fkl.
ARMS: dict[str, dict[str, Any]] = {
    "ce-text": {"loss": Losses(name="ce"), "text": True},
    "fkl-text": {"text": True},
    "ce": {"loss": Losses(name="ce")},
    "fkl": {},
    "rkl": {"loss": Losses(name="rkl")},
    "jsd": {"loss": Losses(name="jsd")},
    "tv": {"loss": Losses(name="tv")},
    "lk": {"loss": Losses(name="lk")},
    "ce-fkl": {"loss": Losses(name="0.5*ce+0.5*fkl")},
    "two-stage": {"loss": Losses(second="tv")},
    "by-depth": {"tokens": Weighting(by_depth=4)},
    "on-policy": {
        "on_policy": OnPolicyText(share=1.0, max_new_tokens=160),
        "batch_size": 20,
        "rate_of": "fkl",
    },
    "adaspec": {"tokens": Weighting(select="adaspec")},
    "random-k": {"tokens": Weighting(select="random")},
    "bottom-k": {"tokens": Weighting(select="bottom")},
    "easy-k": {"tokens": Weighting(select="easy")},
    "adaspec-tokens": {
        "tokens": Weighting(select="adaspec"),
        "batch_size": 20,
        "rate_of": "adaspec",
    },
    "fkl-compute": {"longer": 2.5, "rate_of": "fkl"},
}
REFERENCED = ("adaspec", "bottom", "easy")
# Of each pair (recipe=<pair>/draft and recipe=<pair>/distill): its text, how many rows of it, and
# how many held-out prompts the target answers for alpha; and what is made before the drafts.
PAIRS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "text": "",  # `gsm8k`
        "rows": 3600,
        "prompts": 192,
        "before": ("prepare", "runs/gsm8k/answers/answers-00000-of-00001.jsonl"),
    },
    "quickstart": {
        "text": "stdlib",
        "rows": None,
        "prompts": 96,
        "before": ("target", "runs/quickstart/target/model"),
    },
}
ENTRIES = {"prepare": "prepare", "target": "pretrain"}
TUNING_SEED = 5
DECODED = 48  # prompts for tau
ANSWER = 160  # tokens of an answer at most, as in training


@dataclass
class Evidence:
    pair: str = "gsm8k"
    arms: str = ",".join(ARMS)
    seeds: int = 5
    steps: int = 120
    rates: str = "2.5e-3,5e-3,1e-2"
    worker: int = 0
    workers: int = 1
    trained: str = "runs/evidence"
    out: str = "docs/results"
    train: bool = True  # False: only the page of what is there
    threads: int = 1


def main(argv: list[str]) -> None:
    settings = parse(Evidence, argv)
    torch.set_num_threads(settings.threads)
    if settings.train:
        if settings.pair == "gsm8k":
            need("target")
        prepare(settings)
        bench = Bench(settings)
        for number, arm in enumerate(settings.arms.split(",")):
            if number % settings.workers == settings.worker:
                rate = bench.tuned(arm)
                for seed in range(settings.seeds):
                    bench.measured(arm, seed, rate)
    rows = [
        json.loads(file.read_text())
        for file in sorted(Path(settings.trained).glob("*/rows/*.json"))
    ]
    write_table(Path(settings.out), "distillation", rows, distillation_page.page(rows))


def prepare(settings: Evidence) -> None:
    """Make what the runs begin from, by the pair's recipes, unless it is there."""
    pair = settings.pair
    step, result = PAIRS[pair]["before"]
    train(ENTRIES[step], Path(result), f"recipe={pair}/{step}")
    for seed in [*range(settings.seeds), TUNING_SEED]:
        draft = Path(settings.trained) / pair / f"draft-{seed}" / "drafter"
        train("pretrain", draft, f"recipe={pair}/draft", f"seed={seed}")


class Bench:
    """One pair: its target, texts and held-out answers, loaded once for all runs."""

    def __init__(self, settings: Evidence) -> None:
        self.settings, self.pair = settings, PAIRS[settings.pair]
        self.text = self.pair["text"] or gsm8k("data")
        self.folder = Path(settings.trained) / settings.pair
        base = recipe.load(DistillConfig, [f"recipe={settings.pair}/distill", "processes=1"])
        target = base.target.resolved(base.dtype)
        self.base = replace(base, target=target, loss=Losses(), steps=settings.steps)
        self.accelerator = start(self.base)
        self.target, self.tokenizer = load_target(self.base.target, self.accelerator.device)
        self.vocab_size = vocab_size(self.tokenizer)
        self.heldout = {part: self.answered(part) for part in ("tune", "report")}
        self.teachers = {part: self.remembering() for part in self.heldout}

    def tuned(self, arm: str) -> float:
        """The learning rate at which the arm does best on the tuning part."""
        arm = ARMS[arm].get("rate_of", arm)
        rates = [float(rate) for rate in self.settings.rates.split(",")]
        found = {rate: self.measured(arm, TUNING_SEED, rate, "tune")["alpha"] for rate in rates}
        return max(found, key=lambda rate: found[rate])

    def measured(self, arm: str, seed: int, rate: float, part: str = "report") -> dict[str, Any]:
        """The row of one run, which is trained and measured unless it was before."""
        tuning = part == "tune"
        file = self.folder / ("tuning" if tuning else "rows") / f"{arm}-{seed}.json"
        if tuning:
            file = file.with_name(f"{arm}-tune-{rate:g}.json")
        if not file.exists() or json.loads(file.read_text())["lr"] != rate:
            config = self.config(arm, seed, rate, self.run(arm, seed, rate))
            draft, seconds = self.train(config, arm)
            row = {"what": arm, "pair": self.settings.pair, "target": config.target.path}
            row |= {"data": config.data, "seed": seed, "lr": rate, "steps": config.steps}
            row |= self.figures(draft, part) | {"seconds": seconds, **about_run()}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(row))
            figures = f"alpha {row['alpha']:.4f}, tau {row['tau']:.3f}, {seconds:.0f} s"
            print(f"{arm}, seed {seed}, lr {rate:g}: {figures}", flush=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def run(self, arm: str, seed: int, rate: float) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / f"{arm}-{seed}-{rate:g}"

    def config(self, arm: str, seed: int, rate: float, out: Path) -> DistillConfig:
        """The recipe of one run."""
        changes = {name: value for name, value in ARMS[arm].items() if name != "rate_of"}
        steps = round(self.settings.steps * changes.pop("longer", 1))
        if changes.pop("text", False):
            changes["data"] = self.text
        folder = "text-states" if "data" in changes else "states"
        tokens = changes.get("tokens", Weighting())
        if tokens.select in REFERENCED:
            changes["tokens"] = replace(tokens, reference=f"fkl-{seed}")
        draft = ModelStart(path=f"{self.folder}/draft-{seed}/drafter")
        run = {"steps": steps, "seed": seed, "lr": rate, "out": str(out), "draft": draft}
        cache = Cache(path=str(self.folder / folder))
        return replace(self.base, **run, cache=cache, **changes)

    def train(self, config: DistillConfig, arm: str) -> tuple[Any, float]:
        """The draft after a run of `config`, and the seconds that its steps took."""
        weights = Path(config.out) / "draft.safetensors"
        draft = place(
            given_draft(config.draft.path, self.target, self.tokenizer), self.target.device
        )
        if not weights.exists():
            shutil.rmtree(config.out, ignore_errors=True)
            text, batches = self.batches(config, draft)
            objective = Distillation(
                draft,
                open_teacher(
                    *(config.cache, config.data, config.warp, self.accelerator),
                    *(self.target, self.tokenizer, text),
                ),
                stages(config.loss, config.steps),
                vocab_size=self.vocab_size,
                warp=config.warp,
                weighting=config.tokens,
                reference=self.reference(config),
            )
            run = recipe.run_of(config, main=True)
            with contextlib.redirect_stdout(io.StringIO()):
                fit(self.accelerator, objective, batches, replace(config, save_every=0), run)
            self.accelerator.free_memory()
            save_file({name: t.clone() for name, t in draft.state_dict().items()}, weights)
            run.close()
            shutil.rmtree(run.checkpoints)
        lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
        load_into(draft, weights)
        return draft, sum(json.loads(line).get("seconds", 0.0) for line in lines)

    def batches(self, config: DistillConfig, draft: Any) -> tuple[Batches, StepBatches]:
        """The text, and what is trained on: itself, or answers that the draft writes."""
        examples = self.examples(config.data)
        text = make_batches(config.text, config, examples, self.tokenizer)
        if not config.on_policy.share:
            return text, text
        rows = make_batches(config.text, config, examples, self.tokenizer, packing=False)
        copy = Snapshot(draft, self.target.dtype)
        return text, OnPolicy(config.on_policy, rows, copy, self.tokenizer)

    @cache  # noqa: B019
    def examples(self, data: str) -> Examples:
        """The text of `data`; of the ground truth, the rows that were asked for answers."""
        if is_prepared(data):
            return load_prepared(data)
        return tokenise(load_rows(data, "train")[: self.pair["rows"]], self.tokenizer)

    def reference(self, config: DistillConfig) -> Any:
        """The frozen draft of the fkl arm, with the seed of `config`."""
        if not config.tokens.reference:
            return None
        rate = self.tuned("fkl")
        self.measured("fkl", config.seed, rate, "tune" if config.seed == TUNING_SEED else "report")
        draft = given_draft(config.draft.path, self.target, self.tokenizer).requires_grad_(False)
        load_into(draft, self.run("fkl", config.seed, rate) / "draft.safetensors")
        recast(draft, self.target.dtype)
        return draft

    def answered(self, part: str) -> HeldOut:
        """Held-out prompts of a part with the target's answers."""
        many, data = self.pair["prompts"], self.text
        asked = load_prompts(data, self.tokenizer, limit=many, split=part, prompt_tokens=32)
        prompts = [prompt.tokens for prompt in asked]
        params = SamplingParams(1.0, max_new_tokens=ANSWER)
        heldout = HeldOut(
            self.accelerator, self.target, self.tokenizer, prompts, params, batch_size=16
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        heldout.write_answers(self.folder / f"heldout-{part}.safetensors")
        return heldout

    def remembering(self) -> Teacher:
        """The target, asked once about each batch of a part."""
        teacher, known = StateTeacher(self.target, self.vocab_size), {}

        def rows(batch: Batch) -> TargetRows:
            if batch.rows not in known:
                known[batch.rows] = teacher(batch)
            return known[batch.rows]

        return rows

    def figures(self, draft: Any, part: str) -> dict[str, Any]:
        """Held-out alpha over the target's answers; of reported runs, the decoded tau."""
        heldout, K = self.heldout[part], self.base.K
        fkl = Distillation(
            draft,
            self.teachers[part],
            stages(self.base.loss, 1),
            vocab_size=self.vocab_size,
            warp=SamplingParams(1.0),
        )
        fkl.eval()
        means = heldout.means(fkl.measure)
        few = HeldOut(
            self.accelerator,
            self.target,
            self.tokenizer,
            heldout.prompts[:DECODED],
            SamplingParams(1.0, max_new_tokens=64),
            batch_size=16,
        )
        drafter = LMDrafter(Snapshot(draft, self.target.dtype).take(), self.vocab_size)
        tau = few.tau(drafter, K) if part == "report" else 0.0
        return {"alpha": means["alpha"], "fkl": means["loss"], "tau": tau, "K": K}


def load_into(draft: Any, weights: Path) -> None:
    draft.load_state_dict(load_file(weights))


if __name__ == "__main__":
    run_command(main, Evidence)
