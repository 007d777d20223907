"""Rounds of models at hand, recorded for a scorer (by their names, `python -m draftsmith trace`
does it): for a joint head's last part, and in the place of traces under target.shrink=true.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

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
from draftsmith.train.answers.development import prompts_for_development
from draftsmith.train.drafts.draft_start import TINY, DraftSizes, fresh_draft
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


class Finishing(Protocol):
    """What `finish_head` reads of a recipe."""

    target: TargetSpec
    data: str
    heldout_data: str
    head_prompts: int
    prompt_tokens: int

    @property
    def warp(self) -> SamplingParams: ...


def finish_head(
    config: Finishing,
    run: Run,
    result: Path,
    scorer: Scorer,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made: dict[str, Any],
) -> None:
    """Calibrate a trained head on rounds of the saved drafter `result`, check it on others, and
    save it there; by one process alone. The prompts are held out, of the part that choices are made
    on; half of them calibrate. ValueError for rounds that kept all, or nothing.
    """
    asks = prompts_for_development(
        config.heldout_data or config.data,
        tokenizer,
        count=config.head_prompts,
        length=config.prompt_tokens,
    )
    numbers = islice((n for n in count() if part(n) in KEPT_APART), len(asks))
    trace = run.cache / "rounds"
    record(trace, result, target, tokenizer, dict(zip(numbers, asks, strict=True)), config.warp)
    reading = Reading(
        kind="acceptance",
        target=config.target,
        drafter=str(result),
        traces=[str(trace)],
        reads="parent",
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
    print(next_command("acceptance", config.target.path, result, about["threshold"]))


class Trial(Protocol):
    """The part of a recipe that is tried; drafter and traces are set to what was made."""

    kind: str
    target: TargetSpec
    drafter: str
    traces: list[str]


def write_trial(folder: Path, trial: Trial, accelerator: Accelerator) -> None:
    """A drafter folder and traces of it, by the main process alone."""
    drafter, traces = folder / "drafter", folder / "traces"
    trial.drafter = "" if trial.kind == "judge" else str(drafter)
    trial.traces = [str(traces)]
    if accelerator.is_main_process:
        decode(drafter, traces, trial)
    accelerator.wait_for_everyone()


def decode(drafter: Path, traces: Path, trial: Trial) -> None:
    """Decode a few prompts with a random draft. A judge's rows are labelled by the rule, which is
    no judge: they only show that a recipe runs.
    """
    target, tokenizer = load_target(trial.target, "cpu")
    sizes = DraftSizes(
        **{name: TINY[name] for name in DraftSizes.__dataclass_fields__ if name in TINY}
    )
    save_drafter(
        drafter,
        kind="lm",
        model=fresh_draft(sizes, target, tokenizer, seed=0),
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer),
        provenance={},
        defaults={},
    )
    # Random models say almost the same of every token: cold, they disagree.
    params = SamplingParams(temperature=0.1, max_new_tokens=12)
    prompts = {i: f"{i} and" for i in range(PROMPTS)}
    kind = "judge" if trial.kind == "judge" else "decoder"
    record(traces, drafter, target, tokenizer, prompts, params, kind=kind)
