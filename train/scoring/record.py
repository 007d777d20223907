"""Rounds of models at hand, recorded for a scorer (by their names, `python -m draftsmith trace`
does it): for a joint head's last part, and in the place of traces under target.shrink=true.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Columns, Recorder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.store import TraceWriter
from draftsmith.models.disk.atomic import whole_folder
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.scorers import FOLDER, Scorer, save_scorer, weights_mark
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.drafts.draft_start import TINY, fresh_draft
from draftsmith.train.run.folder import Run
from draftsmith.train.scoring.result import THRESHOLDS, calibrate, describe, next_command, show
from draftsmith.train.scoring.rows import (
    TRACED,
    Reading,
    expected_marks,
    part,
    read_rows,
    traced_settings,
)

JUDGED = ("position", "token", "kept", "target_state")
KEPT_APART = ("calibrate", "check")
DRAFTED = 8  # tokens a round: a policy may draft as deep
ROWS = 40  # decoded together
PROMPTS = 40  # of a trial: enough that each part of them has some


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
    prompts: list[list[int]],
    run: Run,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    warp: SamplingParams,
    target_path: str,
    made: dict[str, Any],
) -> None:
    """Calibrate a trained head on rounds of the drafter that the run has saved, check it on others,
    and save it there; by one process alone. prompts: held out, of the part that choices are made
    on; half of them calibrate. ValueError for rounds that kept all, or nothing.
    """
    numbers = islice((n for n in count() if part(n) in KEPT_APART), len(prompts))
    result, trace = run.folder / "drafter", run.cache / "rounds"
    record(trace, result, target, tokenizer, dict(zip(numbers, prompts, strict=True)), warp)
    reading = Reading(
        kind="acceptance",
        drafter=str(result),
        traces=[str(trace)],
        state="parent",
        scalars=list(scorer.config.scalars),
    )
    made_for, mark = expected_marks(reading)
    parts, counts = read_rows(reading, made_for, mark, KEPT_APART)
    scorer = scorer.cpu().float().eval()
    before, after = calibrate(scorer, *(parts[name] for name in KEPT_APART))
    about = describe(mark or "", before, after, THRESHOLDS["acceptance"], made | {"rows": counts})
    about |= {"traced": traced_settings(reading.traces), "target": made_for}
    with whole_folder(result / FOLDER) as half:
        save_scorer(half, scorer, about)
    show(run.folder, before, after)
    print(next_command("acceptance", target_path, result, about["threshold"]))


PROMPTS = 40  # enough that each part of them has some


def write_trial(
    folder: Path, reading: Reading, spec: TargetSpec, accelerator: Accelerator
) -> Reading:
    """The same reading, of a drafter folder and traces of it that the main process makes here."""
    drafter, traces, judged = folder / "drafter", folder / "traces", reading.kind == "judge"
    if accelerator.is_main_process:
        decode(drafter, traces, spec, "judge" if judged else "decoder")
    accelerator.wait_for_everyone()
    return replace(reading, drafter="" if judged else str(drafter), traces=[str(traces)])


def decode(drafter: Path, traces: Path, spec: TargetSpec, kind: str) -> None:
    """Decode a few prompts with a random draft; kind: of the traces. A judge's rows are labelled by
    the rule, which is no judge: they only show that a recipe runs.
    """
    target, tokenizer = load_target(spec, "cpu")
    save_drafter(
        drafter,
        kind="lm",
        model=fresh_draft(TINY, target, tokenizer, seed=0),
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer),
        provenance={},
        defaults={},
    )
    # Random models say almost the same of every token: cold, they disagree.
    params = SamplingParams(temperature=0.1, max_new_tokens=12)
    prompts = {i: f"{i} and" for i in range(PROMPTS)}
    record(traces, drafter, target, tokenizer, prompts, params, kind=kind)
