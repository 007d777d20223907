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
from rich.progress import Progress

from draftsmith.command import parse
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.report.printed import print_table
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.mixed import check_mixing, mixed_rows
from draftsmith.decode.traces.store import TraceWriter, made_by, read_traces
from draftsmith.models.disk.provenance import git_commit
from draftsmith.models.fingerprint import fingerprint

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


def main(argv: list[str]) -> None:
    """Trace, print what was recorded."""
    started = time.perf_counter()
    writer = trace(parse(Tracing, argv))
    show(writer, time.perf_counter() - started)


def trace(settings: Tracing) -> TraceWriter:
    """Decode and record until all prompts are done or the folder is full; the writer, closed."""
    recorder = Recorder(lambda place, columns: writer.add(numbers[place], columns))
    decoder, params = open_decoder(settings, recorder), SamplingParams.of(settings)
    mixed = settings.source == "mixed"
    draft = check_mixing(decoder.drafter, params, settings.mixing) if mixed else None
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
    asked = {p.index: p.tokens for p in fitting if p.index not in writer.done}
    print(
        f"{len(asked)} prompts to trace, {len(writer.done)} done, {len(prompts) - len(fitting)} "
        f"too long for the context; {estimate(settings, decoder, len(asked))}"
    )
    numbers = list(asked)
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("decoding", total=len(asked))
            for event in decoder.stream(list(asked.values()), params, numbers):
                if (answer := event.completion) is not None:
                    at = numbers[event.index]
                    if answer.error:
                        warnings.warn(answer.error, stacklevel=2)
                    elif draft is not None:
                        mix = settings.mixing
                        rows = mixed_rows(decoder.runner, draft, answer, at, params, mix)
                        writer.add(at, rows)
                    elif not answer.counters.rounds:  # else the recorder has added them
                        writer.add(at, {})
                    progress.advance(bar)
                if writer.full:
                    print(f"full: no further prompt within max_gb={settings.max_gb:g}")
                    break
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what is whole is kept; repeat the command to go on") from None
    finally:
        writer.close()
    return writer


def open_decoder(settings: Tracing, recorder: Recorder) -> Decoder:
    """The pair, set up to record; ValueError for settings that don't go together."""
    if settings.source not in SOURCES:
        raise ValueError(f"source: got {settings.source!r}, expected one of {', '.join(SOURCES)}")
    mixed = settings.source == "mixed"
    if mixed and settings.every:
        raise ValueError("every: got true with source=mixed, which has no rounds; leave one out")
    return Decoder.from_pretrained(
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


def about(settings: Tracing, decoder: Decoder) -> dict[str, Any]:
    """What decides the rows; a later run that differs in it may not go on in the folder."""
    assert decoder.drafter is not None
    return {
        "kind": settings.source,
        "target": fingerprint(decoder.runner.model, decoder.tokenizer),
        "drafter": made_by(settings.drafter, decoder.drafter),
        "settings": {k: v for k, v in asdict(settings).items() if k not in FREE},
        "commit": git_commit(),
    }


def estimate(settings: Tracing, decoder: Decoder, prompts: int) -> str:
    """How much there is to write at most, in words."""
    assert decoder.drafter is not None
    target, draft = decoder.runner.config, decoder.drafter.size
    width = target.hidden_size + (target if draft is None else draft.config).hidden_size
    nodes = 1 if settings.source == "mixed" else decoder.settings.plan.nodes - 1
    rows, bytes_each = prompts * settings.max_new_tokens * nodes, NUMBERS + 2 * width
    return (
        f"at most {rows:,} rows of about {bytes_each} bytes, {rows * bytes_each / 1e9:.2f} GB; "
        f"written are max_gb={settings.max_gb:g} at most"
    )


def show(writer: TraceWriter, seconds: float) -> None:
    """Print what the folder holds, by depth where there is one; ValueError for an empty one."""
    names = {"kept", "on_path", "depth"} & writer.manifest["columns"].keys()
    columns = read_traces(writer.folder, sorted(names)).columns
    kept, on_path = columns["kept"], columns["on_path"]
    depth = columns.get("depth", torch.ones(len(kept)))
    rows = []
    for level in depth.unique().tolist():
        at = depth == level
        share = kept[at & on_path].float().mean()
        rows.append((f"{level:g}", f"{int(at.sum()):,}", f"{share:.3f}"))
    caption = f"{len(kept):,} rows, {writer.bytes / 1e6:.1f} MB, {seconds:.0f} s"
    head = ("depth", "rows", "kept, where all before are")
    print_table(head, rows, title=str(writer.folder), caption=caption)
