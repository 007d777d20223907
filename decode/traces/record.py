"""Record what a drafter proposes and what becomes of it: the rows that scorers learn from.

    draftsmith trace target=TARGET drafter=DRAFTER prompts=train.jsonl out=runs/trace

    split=train             the training side, for acceptance heads (train/scorers.py)
    split=tune every=true   a round at every position: stopping rules are tuned on it, see
                            `decode/traces/simulate_stops.py`; split=report every=true for the
                            evidence
    source=mixed            SpecDec++'s rows, from the target's answers alone (`mixed_rows`)

The rows lie in shards (`decode/traces/store.py`). An interrupted command keeps what is whole and
goes on when it is repeated; a larger `limit` or `max_gb` adds to what is there.

Shapes: M prompt tokens, n answer tokens, T = M + n, V vocabulary, H hidden.
"""

import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.command import check_one_of, parse
from draftsmith.decode import sampling
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.asking import Asking
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams, position_keys
from draftsmith.decode.traces.store import TraceWriter, made_by, read_traces
from draftsmith.models.disk.provenance import git_commit
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.taps import target_states
from draftsmith.printed import print_table
from draftsmith.progress import LongWork

SOURCES = ("decoder", "mixed")
NUMBERS = 52  # bytes of a row beside its states
# They decide how much is recorded, where and how fast, not what a prompt's rows are.
FREE = ("target", "drafter", "out", "limit", "max_gb", "batch_size", "device")


@dataclass(kw_only=True)
class Tracing(Asking):
    """Which prompts to decode, how, and what to record of it."""

    drafter: str
    out: str = "runs/trace"
    split: str = "train"  # train | tune | report | all of a file that nothing was trained on
    limit: int | None = 256  # prompts, spread evenly; none: all
    source: str = "decoder"  # decoder: drafted nodes | mixed: draws along the answers
    mixing: float = 0.15  # of source=mixed: the share of the answer's own tokens
    every: bool = False  # a round at every position, whatever was kept
    K: int = 8
    tree: str = "chain"
    rule: str = "coupled"
    temperature: float = 1.0
    max_gb: float = 4.0  # of rows
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_one_of("source", self.source, SOURCES)
        if self.source == "mixed" and self.every:
            raise ValueError(
                "every: got true with source=mixed, which has no rounds; leave one out"
            )


def main(argv: list[str]) -> None:
    started = time.perf_counter()
    writer = trace(parse(Tracing, argv))
    show(writer, time.perf_counter() - started)


def trace(settings: Tracing) -> TraceWriter:
    """Decode and record until all prompts are done or the folder is full; the writer, closed."""
    mixed = settings.source == "mixed"
    recorder = Recorder(lambda place, columns: writer.add(numbers[place], columns))
    how = {"same_shape": settings.every, "recorder": None if mixed else recorder}
    decoder = Decoder.of(settings, **how)
    params = SamplingParams.of(settings)
    draft = check_mixing(decoder.drafter, params, settings.mixing) if mixed else None
    prompts = settings.asked(decoder.tokenizer, settings.split)
    fitting = [p for p in prompts if len(p.tokens) + settings.max_new_tokens <= decoder.context]
    most = int(settings.max_gb * 1e9)
    writer = TraceWriter(Path(settings.out), about(settings, decoder), most)
    asked = {p.index: p.tokens for p in fitting if p.index not in writer.done}
    print(
        f"{len(asked)} prompts to trace, {len(writer.done)} done, {len(prompts) - len(fitting)} "
        f"too long for the context; {estimate(settings, decoder, len(asked))}"
    )
    numbers = list(asked)
    try:
        with LongWork(transient=True) as progress:
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


def check_mixing(drafter: Drafter | None, params: SamplingParams, share: float) -> LMDrafter:
    """The draft, if rows can be mixed with it; ValueError if not."""
    if not isinstance(drafter, LMDrafter) or drafter.one_pass:
        raise ValueError(
            f"source=mixed: got a drafter of kind {drafter.kind if drafter else None}, expected a "
            "draft LM that drafts token by token; a head reads the target's states, which a mixed "
            "text has not; use source=decoder"
        )
    if params.greedy:
        raise ValueError(
            "source=mixed: got temperature=0, expected one above 0: the chance p / q is that of a "
            "drawn token; use source=decoder for greedy decoding"
        )
    if not 0 <= share < 1:
        raise ValueError(f"mixing: got {share}, expected the share of the answer's tokens, [0, 1)")
    return drafter


@torch.inference_mode()
def mixed_rows(
    target: Runner,
    draft: LMDrafter,
    answer: Completion,
    number: int,
    params: SamplingParams,
    share: float,
) -> dict[str, Tensor]:
    """SpecDec++'s rows: how would a draft's tokens fare, all along a text that the target wrote?

        Y_i ~ q(. | prompt, X_<i)              the draft's own token, in place of the answer's X_i
        Z_i = X_i with probability r, else Y_i      what the draft then reads
        chance = min(1, p(Y_i | X_<i) / q(Y_i | X_<i))

    A row for each i at which Z took Y_i; its numbers are of the law that Y_i was drawn from, after
    X_<i, its states of the draft's pass over prompt and Z: `draft_state` of the token before Y_i,
    which a head with state="parent" reads, `token_state` once it has read Y_i. They have seen
    drafted tokens before them, as when rounds are decoded, while the chance is that after the
    target's: the authors' approximation (Huang et al., arXiv 2405.19715).

    number: of the prompt, from which its draws are made, so that they are always the same ones;
    share: r. `kept` is drawn by the chance; `on_path` is true.
    """
    first = len(answer.prompt_tokens)
    ids_1T = torch.tensor([answer.prompt_tokens + answer.tokens], device=target.device)
    x_n = ids_1T[0, first:]
    models = target.model, draft.runner.model
    p_states_TH, q_states_TH = (target_states(m, (), input_ids=ids_1T).norm_BTG[0] for m in models)
    p_logits_nV = params.transform(target.logits(p_states_TH[first - 1 : -1]))
    q_logits_nV = params.transform(draft.runner.logits(q_states_TH[first - 1 : -1]))

    # The answer came of the coupled noise; these streams are independent of it.
    position_1n = torch.arange(first, ids_1T.shape[1], device=x_n.device)[None]
    seed_1 = torch.tensor([sampling.request_seeds(params.seed, number)], device=x_n.device)
    draws, takes, keeps = (
        position_keys(seed_1, position_1n, stream)
        for stream in (sampling.DRAFT, sampling.ACCEPT, sampling.RESIDUAL)
    )
    score_nV = q_logits_nV - sampling.log_race(draws, q_logits_nV.shape[-1])[0]
    y_n = score_nV.argmax(-1)
    takes_x_n = sampling.uniform(takes)[0] < share
    z_1T = ids_1T.clone()
    z_1T[0, first:] = torch.where(takes_x_n, x_n, y_n)
    z_states_TH = target_states(draft.runner.model, (), input_ids=z_1T).norm_BTG[0]

    both = (q_logits_nV, p_logits_nV)
    log_q_n, log_p_n = (x_nV.log_softmax(-1).gather(1, y_n[:, None])[:, 0] for x_nV in both)
    best_n2 = score_nV.topk(2).values
    columns = {
        "position": position_1n[0].int(),
        "token": y_n.int(),
        "log_q": log_q_n,
        "log_p": log_p_n,
        "entropy": torch.special.entr(q_logits_nV.softmax(-1)).sum(-1),
        "lead": best_n2[:, 0] - best_n2[:, 1],
        "kept": sampling.uniform(keeps)[0] < (log_p_n - log_q_n).exp(),
        "on_path": torch.ones_like(takes_x_n),
        "draft_state": z_states_TH[first - 1 : -1].bfloat16(),
        "token_state": z_states_TH[first:].bfloat16(),
    }
    return {name: column[~takes_x_n].cpu() for name, column in columns.items()}
