"""What the training of a scorer leaves: calibrated, with figures, and how to use it; and rounds of
models at hand, recorded as `python -m draftsmith trace` would, for a joint head's last part and in
the place of traces under target.shrink=true.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Columns, Recorder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.store import TraceWriter
from draftsmith.models.disk.hub import local_folder
from draftsmith.models.disk.store import whole_folder, write_atomically
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import FOLDER, Scorer, save_scorer, weights_mark
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.printed import print_table
from draftsmith.train.answers.asks import prompts_for_development
from draftsmith.train.drafts.start import tiny_drafter
from draftsmith.train.run.folder import Run
from draftsmith.train.scoring.calibration import figures, picture, platt
from draftsmith.train.scoring.objective import logits
from draftsmith.train.scoring.rows import (
    TRACED,
    Reading,
    ScorerRows,
    expected_marks,
    part,
    read_rows,
    traced_settings,
)

THRESHOLDS = {"acceptance": 0.7, "judge": 0.5}  # the papers'
JUDGED = ("position", "token", "kept", "target_state")
KEPT_APART = ("calibrate", "check")
DRAFTED = 8  # tokens a round: a policy may draft as deep
ROWS = 40  # decoded together
PROMPTS = 40  # of a trial: enough that each part of them has some


@torch.no_grad()
def calibrate(
    scorer: Scorer,
    reading: Reading,
    marks: tuple[dict[str, Any], str | None],
    parts: dict[str, ScorerRows],
    made: dict[str, Any],
    threshold: float = 0.0,
) -> dict[str, Any]:
    """Calibrate a folded scorer on the one part, and take its figures on the other, before and
    after: what `save_scorer` wants told. Its probabilities then mean that the rule keeps a token,
    whatever labels and weights it learned from. marks: see `expected_marks`; made: the provenance;
    threshold: 0 for the paper's.
    """
    tune, check, (target, mark) = parts["calibrate"], parts["check"], marks
    scale, shift = platt(logits(scorer, tune), tune.kept_N)
    scorer.scale.fill_(scale)
    scorer.shift.fill_(shift)
    logit_N = logits(scorer, check)
    after = figures(scorer.calibrated(logit_N), check.kept_N)
    return {
        "made_for": mark or target,
        "figures": after,
        "uncalibrated": figures(logit_N, check.kept_N),
        "calibrated": after["brier"] < after["brier_constant"],
        "threshold": threshold or THRESHOLDS[reading.kind],
        "provenance": made,
        "traced": traced_settings(reading.traces),
        "target": target,
    }


def save_result(folder: Path, scorer: Scorer, about: dict[str, Any], drafter: str) -> None:
    """A judge's own folder; or, where there is a drafter, a copy of its folder with the acceptance
    head in it: hard links where the disk allows it, for no file of such a folder is ever written
    in place. Whole or not at all; see `save_scorer` for `about`.
    """
    with whole_folder(folder) as half:
        source = local_folder(drafter)
        for file in sorted(source.rglob("*")) if drafter else ():
            place = half / file.relative_to(source)
            if not file.is_file() or place.is_relative_to(half / FOLDER):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), place)
            except OSError:  # another disk, or one without links
                shutil.copy2(file, place)
        save_scorer(half / FOLDER if drafter else half, scorer, about)


def show(folder: Path, about: dict[str, Any]) -> None:
    """Print the figures, and draw `reliability.svg` into the folder."""
    before, after = about["uncalibrated"], about["figures"]
    title = f"{folder}: {after['rows']:,} rows of prompts kept apart, {after['rate']:.3f} kept"
    rows = [
        [words, *(f"{x:.4f}" for x in (before[name], after[name], constant))]
        for name, words, constant in (
            ("brier", "Brier score", after["brier_constant"]),
            ("auc", "AUC", 0.5),
            ("ece", "expected calibration error", 0.0),
        )
    ]
    print_table(("", "before calibration", "after", "the best constant"), rows, title=title)
    if not about["calibrated"]:
        print(
            "warning: it foretells no better than a constant, so it isn't marked as calibrated: "
            "give it more rows, other inputs (reads, scalars), or longer training"
        )
    chart = picture(after["reliability"], "Kept, by what was foretold")
    write_atomically(folder / "reliability.svg", chart.encode())


def next_command(kind: str, target: str, result: Path, threshold: float) -> str:
    """The line that decodes with it."""
    start = f"python -m draftsmith evaluate target={target}"
    if kind == "acceptance":
        return f"{start} drafter={result} policy=acceptance:{threshold:g}"
    return f"{start} drafter=DRAFTER lossy=judge:{result},{threshold:g} allow_lossy=true"


def record(
    folder: Path,
    drafter: Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, str | list[int]],
    params: SamplingParams,
    *,
    kind: str = "decoder",
) -> None:
    """A trace of a draft LM's rounds on prompts by their numbers, with the columns that scorers of
    this kind of trace read; what an interrupted one has left is kept.
    """
    about: dict[str, Any] = {"kind": kind, "target": fingerprint(target, tokenizer)}
    about["drafter"] = {"path": str(drafter), "kind": "lm", "mark": weights_mark(drafter)}
    settings = {"rule": "coupled", "tree": "chain", **asdict(params)}
    about["settings"] = {name: settings[name] for name in TRACED}
    writer = TraceWriter(folder, about, max_bytes=1 << 30)
    left = [number for number in prompts if number not in writer.done]

    def keep(place: int, columns: Columns) -> None:
        names = JUDGED if kind == "judge" else columns.keys() - {"target_state"}
        writer.add(left[place], {name: columns[name] for name in names})

    loaded, rows = load_drafter(str(drafter), target, tokenizer), min(ROWS, len(prompts))
    decoder = Decoder(target, tokenizer, loaded, Recorder(keep), K=DRAFTED, batch_size=rows)
    decoder.generate([prompts[number] for number in left], params, left)
    writer.close()


def finish_head(
    scorer: Scorer,
    config: Any,
    run: Run,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made: dict[str, Any],
) -> None:
    """Calibrate a trained head on rounds of the drafter that the run of a distillation has saved,
    check it on others, and save it there; by one process alone. The prompts are held out, of the
    part that choices are made on; half of them calibrate. ValueError for rounds that kept all, or
    nothing.
    """
    asked = {"limit": config.head.limit, "prompt_tokens": config.heldout.prompt_tokens}
    prompts = prompts_for_development(config.heldout.prompts or config.data, tokenizer, **asked)
    numbers = (number for number in count() if part(number) in KEPT_APART)
    result, trace = run.folder / "drafter", run.cache / "rounds"
    record(trace, result, target, tokenizer, dict(zip(numbers, prompts, strict=False)), config.warp)
    scalars = list(scorer.config.scalars)
    named: dict[str, Any] = {"drafter": str(result), "traces": [str(trace)], "scalars": scalars}
    reading = Reading(kind="acceptance", state="parent", **named)
    marks = expected_marks(reading)
    parts, counts = read_rows(reading, *marks, KEPT_APART)
    about = calibrate(scorer.cpu().float().eval(), reading, marks, parts, made | {"rows": counts})
    save_result(result / FOLDER, scorer, about, "")
    show(run.folder, about)
    print(next_command("acceptance", config.target.path, result, about["threshold"]))


def write_trial(
    folder: Path, reading: Reading, spec: TargetSpec, accelerator: Accelerator
) -> Reading:
    """The same reading, of a random drafter and traces of it that the main process makes here. A
    judge's rows are labelled by the rule, which is no judge: they only show that a recipe runs.
    """
    drafter, traces, judged = folder / "drafter", folder / "traces", reading.kind == "judge"
    if accelerator.is_main_process:
        target, tokenizer = load_target(spec, "cpu")
        tiny_drafter(drafter, "lm", target, tokenizer, fingerprint(target, tokenizer))
        # Random models say almost the same of every token: cold, they disagree.
        params = SamplingParams(temperature=0.1, max_new_tokens=12)
        prompts = {i: f"{i} and" for i in range(PROMPTS)}
        kind = "judge" if judged else "decoder"
        record(traces, drafter, target, tokenizer, prompts, params, kind=kind)
    accelerator.wait_for_everyone()
    return replace(reading, drafter="" if judged else str(drafter), traces=[str(traces)])
