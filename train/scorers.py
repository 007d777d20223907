"""Acceptance heads (SpecDec++, arXiv 2405.19715) and judges (2501.19309) from recorded traces.

    draftsmith train scorers recipe=specdecpp/gsm8k
    accelerate launch train/scorers.py ...           (the same)

    loss = sum_i [w (1 - a_i) (-log P0_i) + a_i (-log P1_i)] / sum_i [w (1 - a_i) + a_i]

P1 = 1 - P0 = sigmoid of the scorer's logit at a drafted token (models/scorers.py), a its label:
`soft`, min(1, p / q), or `hard`, whether the rule kept it; w = `reject_weight`. The rows are those
of `reading.traces` (draftsmith trace, or mined labels). Draft and target stay as they are; a head
that is trained together with its draft: train/distill.py, `head.weight`.

Prompts are split 80 / 10 / 10: to fit; to choose the best weights and calibrate them; to check. The
log-odds scale * logit + shift have the least unweighted cross-entropy with what the rule did: the
shift undoes w. A head goes into a copy of its drafter folder, a judge into a folder of its own.

Where this differs from the papers:
1. The loss is divided by the rows of the step and the mean weight of all fitted rows, not by the
   weight of the batch: so it is the same however a step's rows are divided.
2. One logit, blocks with weights of their own, other inputs: see models/scorers.py. What is read
   has mean 0 and deviation 1 while it trains, where a linear map can take that in.
3. The weights with the best held-out Brier score are kept, not the last ones; then calibrated.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.command import run_command
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.scorers import Scorer, ScorerConfig, check_threshold
from draftsmith.models.target import TargetSpec
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.launch import begin
from draftsmith.train.run.loop import fit
from draftsmith.train.run.settings import Settings
from draftsmith.train.scoring import result as results
from draftsmith.train.scoring import rows
from draftsmith.train.scoring.objective import ScorerObjective
from draftsmith.train.scoring.rows import Reading


@dataclass(kw_only=True)
class ScorersConfig(Settings):
    """What a recipe of this entry can say."""

    entry: str = "scorers"
    target: TargetSpec
    reading: Reading
    blocks: int = 3  # 0: linear
    width: int = 0  # of the blocks; 0: the state's
    reject_weight: float = 6.0  # w; 0: both classes weigh the same
    threshold: float = 0.0  # the result's default; 0: the paper's
    batch_size: int = 1024  # rows in a micro-batch of one process
    dtype: str = "float32"
    save_dtype: str = "float32"
    best_metric: str = "brier"

    def __post_init__(self) -> None:
        super().__post_init__()
        shape_of(self, hidden=1)
        kind, labels, drafter = self.reading.kind, self.reading.labels, self.reading.drafter
        judged = kind == "judge"
        if labels not in rows.LABELS or (judged and labels != "hard"):
            raise ValueError(
                f"reading.labels: got {labels!r} for reading.kind={kind}, expected one of "
                f"{', '.join(rows.LABELS)}, and hard for a judge, whose labels are accept or reject"
            )
        goal = Path(self.out, "drafter").resolve()
        if judged == bool(drafter) or Path(drafter).resolve() == goal:
            raise ValueError(
                f"reading.drafter: got {drafter!r} for reading.kind={kind}, expected a drafter's "
                "folder other than the result for an acceptance head, none for a judge; or another "
                "out="
            )
        if self.threshold:
            check_threshold(self.threshold, "threshold")
        if self.reject_weight < 0:
            raise ValueError(f"reject_weight: got {self.reject_weight}, expected 0 or more")


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(ScorersConfig, argv, shrunk, refuse)
    if run is None:
        return

    # ---- what it is for, and the rows of each part of the prompts ----------------------------
    if config.target.shrink:
        config.reading = results.write_trial(run.cache, config.reading, config.target, accelerator)
    reading = config.reading
    marks = rows.expected_marks(reading, config.target)
    parts, counts = rows.read_rows(reading, *marks)
    accelerator.print(f"rows: {counts}")

    # ---- scorer and objective ----------------------------------------------------------------
    scorer = make_scorer(config, parts["fit"].states_RH.shape[1])
    objective = ScorerObjective(scorer, parts["fit"], config.reject_weight).to(accelerator.device)
    batches = rows.RowBatches(parts["fit"], batch_size=config.batch_size, seed=config.seed)

    # ---- fit, and keep what foretold best ----------------------------------------------------
    def evaluate() -> dict[str, float]:
        return objective.heldout(parts["calibrate"])

    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- calibrate, check, save --------------------------------------------------------------
    if accelerator.is_main_process:
        scorer = objective.folded(getattr(torch, config.save_dtype))
        made = provenance(argv, config.seed, parts["fit"].fingerprint(), ended.best_step)
        made["rows"] = counts
        about = results.calibrate(scorer, reading, marks, parts, made, config.threshold)
        result = run.folder / ("judge" if reading.kind == "judge" else "drafter")
        results.save_result(result, scorer, about, reading.drafter)
        results.show(run.folder, about)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")
        print(results.next_command(reading.kind, config.target.path, result, about["threshold"]))


def shrunk(config: ScorersConfig) -> ScorersConfig:
    """Two steps: shows that a recipe composes and runs."""
    return replace(config, steps=2, warmup=0, batch_size=16, accumulation=1)


def shape_of(config: ScorersConfig, hidden: int) -> ScorerConfig:
    """The scorer that a recipe describes, for states of a width."""
    sizes: dict[str, Any] = {"blocks": config.blocks, "width": config.width}
    read = config.reading
    hidden *= read.state != "none"
    return ScorerConfig(read.kind, hidden, **sizes, scalars=tuple(read.scalars), state=read.state)


def make_scorer(config: ScorersConfig, hidden: int) -> Scorer:
    """A fresh scorer in fp32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return Scorer(shape_of(config, hidden))


if __name__ == "__main__":
    run_command(main, ScorersConfig)
