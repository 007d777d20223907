"""Record what a drafter proposes and what becomes of it: the rows that scorers learn from.

    draftsmith trace target=TARGET drafter=DRAFTER prompts=train.jsonl out=runs/trace

    part=train              the training side, for acceptance heads (train/scorers.py)
    part=tune every=true    a round at every position: stopping rules are tuned on it, see
                            `decode/traces/simulate_stops.py`; part=report every=true for the
                            evidence
    source=mixed            SpecDec++'s rows, from the target's answers alone (`mixed.py` beside)

The rows lie in shards (`decode/traces/store.py`). An interrupted command keeps what is whole and
goes on when it is repeated; a larger `limit` or `max_gb` adds to what is there.
"""

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftsmith.command import INTERRUPTED, parse
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.mixed import check_mixing, mixed_rows
from draftsmith.decode.traces.store import TraceWriter, read_traces
from draftsmith.models.disk.provenance import git_commit
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import weights_mark

SOURCES = ("decoder", "mixed")
NUMBERS = 46  # bytes of a row beside its states
# They decide how much is recorded, where and how fast, not what a prompt's rows are.
FREE = ("target", "drafter", "out", "limit", "max_gb", "batch", "device")


@dataclass
class Tracing:
    """Which prompts to decode, how, and what to record of it."""

    target: str
    drafter: str
    prompts: str = "stdlib"
    out: str = "runs/trace"
    part: str = "train"  # train | tune | report
    split: str = "heldout"  # "all" takes a file whole: one that nothing was trained on
    limit: int | None = 256  # prompts, spread evenly; none: all
    prompt_tokens: int = 64
    source: str = "decoder"  # decoder: drafted nodes | mixed: draws along the answers
    mixing: float = 0.15  # of source=mixed: the share of the answer's own tokens
    every: bool = False  # a round at every position, whatever was kept
    K: int = 8
    tree: str = "chain"
    rule: str = "coupled"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    batch: int = 8
    seed: int = 0
    max_gb: float = 4.0  # of rows
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams.of(self)


def main(argv: list[str]) -> int:
    """Trace, print what was recorded."""
    console, started = Console(), time.perf_counter()
    writer, whole = trace(parse(Tracing, argv), console)
    console.print(table(writer, time.perf_counter() - started))
    return 0 if whole else INTERRUPTED


def trace(settings: Tracing, console: Console) -> tuple[TraceWriter, bool]:
    """Decode and record until all prompts are done or the folder is full; with the writer, closed,
    False after Ctrl-C. ValueError for what doesn't load or fit, or `TraceWriter` refuses.
    """
    recorder = Recorder(lambda place, columns: writer.add(left[place].index, columns))
    decoder = open_decoder(settings, recorder)
    prompts = load_prompts(
        settings.prompts,
        decoder.tokenizer,
        limit=settings.limit,
        prompt_tokens=settings.prompt_tokens,
        split=settings.split,
        part=settings.part,
    )
    fitting = [p for p in prompts if len(p.tokens) + settings.max_new_tokens <= decoder.context]
    most = int(settings.max_gb * 1e9)
    writer = TraceWriter(settings.out, about(settings, decoder), max_bytes=most)
    left = [prompt for prompt in fitting if prompt.index not in writer.done]
    console.print(
        f"{len(left)} prompts to trace, {len(writer.done)} done, {len(prompts) - len(fitting)} "
        f"too long for the context; {estimate(settings, decoder, len(left))}",
        markup=False,
    )
    asked, numbers = [prompt.tokens for prompt in left], [prompt.index for prompt in left]
    try:
        with Progress(transient=True, console=console) as progress:
            bar = progress.add_task("decoding", total=len(left))
            for event in decoder.stream(asked, settings.params, numbers):
                if event.completion is not None:
                    take(settings, decoder, writer, event.completion, numbers[event.index])
                    progress.advance(bar)
                if writer.full:
                    console.print(f"full: no further prompt within max_gb={settings.max_gb:g}")
                    break
    except KeyboardInterrupt:
        console.print("interrupted: what is whole is kept; repeat the command to go on")
        return writer, False
    finally:
        writer.close()
    return writer, True


def open_decoder(settings: Tracing, recorder: Recorder) -> Decoder:
    """The pair, set up to record; ValueError for settings that don't go together."""
    if settings.source not in SOURCES:
        raise ValueError(f"source: got {settings.source!r}, expected one of {', '.join(SOURCES)}")
    mixed = settings.source == "mixed"
    if mixed and settings.every:
        raise ValueError("every: got true with source=mixed, which has no rounds; leave one out")
    decoder = Decoder.from_pretrained(
        settings.target,
        settings.drafter,
        device=settings.device,
        dtype=settings.dtype,
        K=settings.K,
        batch_size=settings.batch,
        rule=settings.rule,
        tree=settings.tree,
        same_shape=settings.every,
        recorder=None if mixed else recorder,
    )
    if mixed:
        check_mixing(decoder.drafter, settings.params, settings.mixing)
    return decoder


def take(
    settings: Tracing, decoder: Decoder, writer: TraceWriter, answer: Completion, number: int
) -> None:
    """An answer is whole: its mixed rows, or that it has none; a recorder's have been added."""
    if answer.error:
        warnings.warn(answer.error, stacklevel=2)
    elif settings.source == "mixed":
        draft, params = decoder.drafter, settings.params
        assert isinstance(draft, LMDrafter)
        rows = mixed_rows(decoder.runner, draft, answer, number, params, settings.mixing)
        writer.add(number, rows)
    elif not answer.counters.rounds:
        writer.add(number, {})


def about(settings: Tracing, decoder: Decoder) -> dict[str, Any]:
    """What decides the rows; a later run that differs in it may not go on in the folder."""
    assert decoder.drafter is not None
    return {
        "kind": settings.source,
        "target": fingerprint(decoder.runner.model, decoder.tokenizer),
        "drafter": {
            "path": settings.drafter,
            "kind": decoder.drafter.kind,
            "mark": weights_mark(settings.drafter),
        },
        "settings": {k: v for k, v in asdict(settings).items() if k not in FREE},
        "commit": git_commit(),
    }


def estimate(settings: Tracing, decoder: Decoder, prompts: int) -> str:
    """How much there is to write at most, in words."""
    assert decoder.drafter is not None
    size = decoder.drafter.size
    own = decoder.runner.config.hidden_size
    width = 2 * (own + (own if size is None else size.config.hidden_size))
    nodes = 1 if settings.source == "mixed" else decoder.settings.plan.nodes - 1
    rows = prompts * settings.max_new_tokens * nodes
    return (
        f"at most {rows:,} rows of about {NUMBERS + width} bytes, "
        f"{rows * (NUMBERS + width) / 1e9:.2f} GB; written are max_gb={settings.max_gb:g} at most"
    )


def table(writer: TraceWriter, seconds: float) -> Table:
    """What the folder holds, by depth where there is one; ValueError where it holds nothing."""
    made = Table(box=SIMPLE_HEAD, title=str(writer.folder))
    for name in ("depth", "rows", "kept, where all before are"):
        made.add_column(name, justify="right")
    names = {"kept", "on_path", "depth"} & writer.manifest["columns"].keys()
    columns = read_traces(writer.folder, sorted(names)).columns
    kept, on_path = columns["kept"], columns["on_path"]
    depth = columns.get("depth", torch.ones(len(kept)))
    for level in depth.unique().tolist():
        at = depth == level
        share = kept[at & on_path].float().mean()
        made.add_row(f"{level:g}", f"{int(at.sum()):,}", f"{share:.3f}")
    made.caption = f"{len(kept):,} rows, {writer.bytes / 1e6:.1f} MB, {seconds:.0f} s"
    return made
