"""Rows that scorers learn from: traces read, states found, labels made, prompts split in three.

    fit         80 % of the prompts: the weights
    calibrate   10 %: which weights are kept, and the two numbers of the calibration
    check       10 %: the figures that are told

A prompt's part is a hash of its number, the same in every trace and run: all its rows are in one.

Shapes: N rows, R rows of the traces before any is left out, X of a batch, H hidden, S numbers read
beside a state, I = H + S.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.prompts.splits import HELD_OUT_PARTS
from draftsmith.decode.traces.store import Trace, read_traces
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.scorers import read_scalar, weights_mark
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.text.batches import EpochOrder

PARTS = {"fit": 0.8, "calibrate": 0.9, "check": 1.0}  # where each ends, in shares of the prompts
TRACES = {"acceptance": ("decoder", "mixed"), "judge": ("judge",)}  # that a scorer learns from
LABELS = ("soft", "hard")
TRACED = ("rule", "temperature", "top_k", "top_p", "min_p", "tree")  # a head is good for these
CHUNK = 1 << 14  # rows turned to fp32 at a time


@dataclass(kw_only=True)
class Reading:
    """The group `reading` of a recipe: what a scorer reads, and learns to foretell."""

    kind: str  # acceptance | judge
    drafter: str = ""  # acceptance: the folder whose tokens are scored
    traces: list[str] = field(default_factory=list)  # folders, of one target and draft
    labels: str = "hard"  # what the rule did | soft: min(1, p / q)
    off_path: bool = False  # also rows after a rejected one, which no decoder would have come to
    state: str = "token"  # the one after it | parent: the one that it was drawn from | none
    scalars: list[str] = field(default_factory=list)  # of log_q, entropy, lead, depth, path, rank


@dataclass(frozen=True)
class RowBatch:
    """Some rows, with their numbers for messages."""

    x_XI: Tensor  # fp32, states and scalars side by side
    label_X: Tensor
    rows: tuple[int, ...]

    def to(self, device: torch.device | str) -> "RowBatch":
        return RowBatch(self.x_XI.to(device), self.label_X.to(device), self.rows)


@dataclass(frozen=True)
class ScorerRows:
    """Rows, or a part of them; states are kept once, in bf16, and cast batch by batch."""

    states_RH: Tensor
    at_N: Tensor  # which of the states a row reads
    scalars_NS: Tensor
    label_N: Tensor  # in [0, 1], what is learned
    kept_N: Tensor  # bool, what happened
    prompt_N: Tensor

    def __len__(self) -> int:
        return len(self.at_N)

    def take(self, index_X: Tensor) -> RowBatch:
        states_XH, scalars_XS = self.states_RH[self.at_N[index_X]], self.scalars_NS[index_X]
        x_XI = torch.cat([states_XH.float(), scalars_XS], 1)
        return RowBatch(x_XI, self.label_N[index_X], tuple(index_X.tolist()))

    def chunks(self) -> Iterator[RowBatch]:
        """All rows, in order."""
        return map(self.take, torch.arange(len(self)).split(CHUNK))

    def where(self, chosen_N: Tensor) -> "ScorerRows":
        return replace(self, **{name: getattr(self, name)[chosen_N] for name in BY_ROW})

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [I] of what is read; 1 for what is always the same."""
        whole = (batch.x_XI.double() for batch in self.chunks())
        sums_2I: Any = sum(torch.stack([x_XI.sum(0), x_XI.square().sum(0)]) for x_XI in whole)
        mean_I, square_I = sums_2I / len(self)
        deviation_I = (square_I - mean_I.square()).clamp(min=0).sqrt()
        same_I = deviation_I <= 1e-6 * mean_I.abs().clamp(min=1.0)
        return mean_I.float(), deviation_I.masked_fill(same_I, 1.0).float()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in (*BY_ROW, "states_RH"):
            column = getattr(self, name).contiguous()
            bits = column.view(torch.int16) if column.dtype == torch.bfloat16 else column
            digest.update(bits.numpy().data)
        return digest.hexdigest()


BY_ROW = ("at_N", "scalars_NS", "label_N", "kept_N", "prompt_N")


class RowBatches:
    """Which rows train when: each step takes the next batch_size * world * accumulation."""

    def __init__(self, rows: ScorerRows, *, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        self._order = EpochOrder(len(rows), seed)

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> RowBatch:
        first = ((step * accumulation + micro) * world + rank) * self.batch_size
        return self.rows.take(torch.tensor(self._order.take(first, self.batch_size)))


def expected_marks(
    reading: Reading, spec: TargetSpec | None = None
) -> tuple[dict[str, Any], str | None]:
    """(fingerprint of the target, mark of the draft's weights) that traces must bear. An acceptance
    head's target is the one that its drafter was made for, {} where that isn't known; a judge's has
    to be loaded, and any draft will do (None).
    """
    if reading.kind == "acceptance":
        meta = open_drafter(reading.drafter, None).meta
        return meta["target"] or {}, weights_mark(reading.drafter)
    assert spec is not None, "a judge's target has to be loaded"
    target, tokenizer = load_target(spec, "cpu")
    return fingerprint(target, tokenizer, spec.path), None


def read_rows(
    reading: Reading,
    made_for: dict[str, Any],
    mark: str | None,
    names: Sequence[str] = tuple(PARTS),
) -> tuple[dict[str, ScorerRows], dict[str, int]]:
    """The rows of parts of PARTS, and counts of what there was and what was left out.

    made_for, mark: see `expected_marks`; {}: that of the first trace. ValueError for traces of
    another kind, target, draft or width, numbers that aren't finite, or a part without rows of both
    classes.
    """
    if not reading.traces:
        raise ValueError(
            "reading.traces: got none, expected folders of `python -m draftsmith trace`"
        )
    found, counts = [], {"rows": 0}
    for folder in reading.traces:
        about = read_traces(folder, ["prompt"]).about
        made_for = made_for or about["target"] or {}
        check_about(folder, about, reading, made_for, mark)
        rows, total = open_trace(folder, reading, mixed=about["kind"] == "mixed")
        found.append(rows)
        counts["rows"] += total
    widths = {f: rows.states_RH.shape[1] for f, rows in zip(reading.traces, found, strict=True)}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"reading.traces: got states of widths {widths}, expected one width; give "
            "traces of one model"
        )
    rows = joined(found)
    counts["used"] = len(rows)
    parts, known = {}, rows.prompt_N.unique().tolist()
    for name in names:
        prompts = [prompt for prompt in known if part(prompt) == name]
        mine = rows.where(torch.isin(rows.prompt_N, torch.tensor(prompts, dtype=torch.int64)))
        parts[name], counts[name] = mine, len(mine)
        kept, soft = int(mine.kept_N.sum()), float(mine.label_N.sum())
        if not 0 < kept < len(mine) or not 0 < soft < len(mine):
            raise ValueError(
                f"the {name} part has {len(mine)} rows of {len(prompts)} prompts, {kept} kept and "
                f"{len(mine) - kept} rejected (labels sum to {soft:.1f}); expected some of both: "
                "trace more prompts (80, 10 and 10 % of them fit, calibrate and check), or another "
                "drafter"
            )
    return parts, counts


def open_trace(folder: str, reading: Reading, *, mixed: bool) -> tuple[ScorerRows, int]:
    """The rows of one trace that a scorer learns from, and how many rows the trace has. mixed: of
    `traces.record.mixed_rows`, which brings the states after a token with it.
    """
    judged = reading.kind == "judge"
    state = "target_state" if judged else "draft_state"
    linked = not judged and reading.state == "token"
    if linked and mixed:
        state, linked = "token_state", False
    columns = {"prompt", "kept", state, *reading.scalars}
    columns |= {"log_p", "log_q"} if reading.labels == "soft" else set()
    columns |= set() if judged or reading.off_path else {"on_path"}
    columns |= {"round", "node", "parent"} if linked else set()
    trace = read_traces(folder, sorted(columns))
    found, total = trace.columns, len(trace.columns["prompt"])
    at_N, there_N = torch.arange(total), torch.ones(total, dtype=torch.bool)
    if linked:
        at_N, there_N = state_after(trace)
    if "on_path" in found:
        there_N &= found["on_path"]
    read = [read_scalar(name, found[name]) for name in reading.scalars]
    scalars_NS = torch.stack(read, 1) if read else torch.empty(total, 0)
    label_N = found["kept"].float()
    if reading.labels == "soft":
        label_N = (found["log_p"] - found["log_q"]).clamp(max=0.0).exp()
    states_RH = found[state][:, :0] if reading.state == "none" else found[state]
    rows = ScorerRows(states_RH, at_N, scalars_NS, label_N, found["kept"], found["prompt"])
    rows = rows.where(there_N)
    names = ("its labels", *reading.scalars)
    for name, column_N in zip(names, (rows.label_N, *rows.scalars_NS.T), strict=True):
        if bad := int((~column_N.isfinite()).sum()):
            raise ValueError(
                f"{folder}: got {bad} of {len(rows)} rows where {name} isn't a number, expected "
                "numbers; look at the drafter's logits there, or leave it out of reading.scalars="
            )
    return rows, total


def state_after(trace: Trace) -> tuple[Tensor, Tensor]:
    """(row [N] whose state is the draft's after it read row n's token, whether there is one [N]). A
    node's own state is what its children were drawn from; leaves were never read by the draft.
    """
    prompt_N, round_N, node_N, parent_N = (
        trace.columns[name].long() for name in ("prompt", "round", "node", "parent")
    )
    tree_N = (prompt_N * (round_N.max() + 1) + round_N) * (node_N.max() + 1)
    node_N, parent_N = tree_N + node_N, tree_N + parent_N
    order_N = parent_N.argsort(stable=True)
    sorted_N = parent_N[order_N]
    place_N = torch.searchsorted(sorted_N, node_N).clamp(max=len(sorted_N) - 1)
    return order_N[place_N], sorted_N[place_N] == node_N


def traced_settings(folders: Sequence[str]) -> dict[str, Any]:
    """Rule, sampling and tree of traces, as far as they say; ValueError where two differ."""
    found: dict[str, Any] = {}
    for folder in folders:
        settings = read_traces(folder, ["prompt"]).about.get("settings", {})
        for name in (name for name in TRACED if name in settings):
            if found.setdefault(name, settings[name]) != settings[name]:
                raise ValueError(
                    f"reading.traces: got {name}={settings[name]} in {folder} and {found[name]} "
                    "before, expected one way to decode; train one head for each"
                )
    return found


def check_about(
    folder: str, about: dict[str, Any], reading: Reading, made_for: dict[str, Any], mark: str | None
) -> None:
    """ValueError for a trace of another kind, target or draft."""
    kinds = TRACES[reading.kind]
    if about["kind"] not in kinds:
        raise ValueError(
            f"{folder}: got a trace of kind {about['kind']!r}, expected {' or '.join(kinds)} for "
            f"reading.kind={reading.kind}; give the folder of such a trace"
        )
    differ = differences(made_for, about["target"] or {})
    if differ:
        raise ValueError(
            f"{folder}: got a trace of another target ({'; '.join(differ)}), expected the one that "
            "the scorer is for; trace that target"
        )
    settings = about.get("settings", {})
    part = settings.get("part", settings.get("split"))  # older traces have the one for the other
    if part in HELD_OUT_PARTS:
        raise ValueError(
            f"{folder}: got a trace of split={part}, which stopping rules are tuned "
            "or reported on, expected split=train; trace the training side"
        )
    if reading.labels == "soft" and settings.get("temperature") == 0:
        raise ValueError(
            f"{folder}: got reading.labels=soft with a trace at temperature 0, where a token is "
            "kept or not, expected hard ones"
        )
    traced = about["drafter"] or {}
    if mark not in (None, traced.get("mark")):
        raise ValueError(
            f"{folder}: got a trace of another drafter ({traced.get('path')}, of mark "
            f"{traced.get('mark')}), expected the weights of mark {mark}; trace this drafter, or "
            "give the one that was traced as reading.drafter="
        )


def joined(parts: Sequence[ScorerRows]) -> ScorerRows:
    """The rows of several traces; of one, without a copy."""
    if len(parts) == 1:
        return parts[0]
    starts = accumulate((len(one.states_RH) for one in parts), initial=0)
    at_N = torch.cat([one.at_N + start for one, start in zip(parts, starts, strict=False)])
    names = ("states_RH", *BY_ROW)
    whole = {name: torch.cat([getattr(one, name) for one in parts]) for name in names}
    return ScorerRows(**whole | {"at_N": at_N})


def part(prompt: int) -> str:
    """The part of PARTS that a prompt is in."""
    digest = hashlib.sha256(str(prompt).encode()).digest()
    share = int.from_bytes(digest[:8], "little") / 2**64
    return next(name for name, end in PARTS.items() if share < end)
