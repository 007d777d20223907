"""Small classifiers on hidden states: will a drafted token be kept, does a token matter?

    acceptance  SpecDec++ (Huang et al., arXiv 2405.19715): reads the draft's state, foretells
                whether the token is accepted; kept in the drafter folder's `acceptance/`
    judge       judge decoding (Bachmann et al., arXiv 2501.19309): reads the target's state at a
                drafted token, tells whether it does no harm; a folder of its own

    x <- enter(state, scalars);  x <- x + silu(W_k x + b_k), D times;  logit = w x + b

A folder holds `config.json`, `model.safetensors` and `scorer.json`, which says for which weights it
was made, how well it foretells, and its threshold.

Where this differs from the papers:
1. The D blocks have weights of their own; the official SpecDec++ code repeats one.
2. One logit in the place of two, whose difference is all that the softmax reads.
3. Numbers of the drafted token may be read beside the state (`scalars`), and the state from which
   it was drawn in the place of the one after it (`state="parent"`), which scores it one draft call
   earlier. A narrower body (`width`) keeps the head cheap beside a one-layer draft. Numbers alone
   (`state="none"`) are what C2T reads (arXiv 2502.13652), to order trees.
4. A trained logit is calibrated: scale * logit + shift is the log-odds that held-out rows bear out.

Shapes: X any leading axes, H width of the state read, S numbers read beside it, I = H + S.
"""

import hashlib
import json
import math
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.models.disk.hub import local_folder
from draftsmith.models.disk.read_lm import check_header, read_json, save_tensors, write_json
from draftsmith.models.disk.store import write_atomically
from draftsmith.models.fingerprint import differences

KINDS = ("acceptance", "judge")
# Of a drafted token: log q; the entropy of q (nats); by how much it won its race; levels before it;
# log q of its whole path; its place among its siblings, the best 0.
SCALARS = ("log_q", "entropy", "lead", "depth", "path", "rank")
STATES = ("token", "parent", "none")
FAR = 30.0  # nats, of log q and lead; at temperature 1 none was above 19
FOLDER = "acceptance"  # of the head in a drafter folder
ABOUT = "scorer.json"
SCHEMA = 1
MARKED_BLOCKS, BLOCK = 64, 1 << 12


@dataclass(frozen=True)
class ScorerConfig:
    """hidden: H; blocks: D; width: of the blocks, 0: H, which needs no entry where there are no
    scalars; scalars: names of SCALARS, in the order read; state: "token", after the scored token
    was read, "parent", from which it was drawn, or "none" (H = 0). ValueError for anything else.
    """

    kind: str
    hidden: int
    blocks: int = 3
    width: int = 0
    scalars: tuple[str, ...] = ()
    state: str = "token"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scalars", tuple(self.scalars))
        once = len(set(self.scalars)) == len(self.scalars) and set(self.scalars) <= set(SCALARS)
        if self.kind not in KINDS or self.state not in STATES or not once:
            raise ValueError(
                f"scorer: got kind={self.kind!r}, state={self.state!r}, scalars={self.scalars}, "
                f"expected one of {KINDS}, one of {STATES}, and names of {SCALARS}, each once"
            )
        stateless = self.state == "none"
        if stateless and (self.hidden or not self.scalars or not self.width):
            raise ValueError(
                f"scorer: got state='none' with hidden={self.hidden}, scalars={self.scalars}, "
                f"width={self.width}, expected hidden=0, numbers to read, and a width"
            )
        if self.hidden < (not stateless) or self.blocks < 0 or self.width < 0:
            raise ValueError(
                f"scorer: got hidden={self.hidden}, blocks={self.blocks}, width={self.width}, "
                "expected at least 1, 0 and 0"
            )
        if self.state == "token" and self.scalars:
            raise ValueError(
                f"scorer: got state='token' with scalars={self.scalars}, expected state='parent': "
                "they are of the token just drawn, one call before its state"
            )
        if self.kind == "judge" and self.state != "token":
            raise ValueError(
                f"scorer: got a judge with state={self.state!r}, expected state='token': it reads "
                "the target's state at the judged token"
            )

    @property
    def inputs(self) -> int:
        """I."""
        return self.hidden + len(self.scalars)

    @property
    def enters(self) -> bool:
        """Whether a linear map comes before the blocks."""
        return bool(self.width or self.scalars)


class Scorer(nn.Module):
    """`forward` gives what the loss trains, `calibrated` makes log-odds of it. Random weights."""

    scale: Tensor
    shift: Tensor

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.width or config.hidden
        self.enter = nn.Linear(config.inputs, inner) if config.enters else None
        self.blocks = nn.ModuleList(nn.Linear(inner, inner) for _ in range(config.blocks))
        self.out = nn.Linear(inner, 1)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, state_XH: Tensor, scalars_XS: Tensor | None = None) -> Tensor:
        """Logits [X] before calibration; above 0: rather kept. scalars_XS: as the config orders."""
        x = state_XH if scalars_XS is None else torch.cat([state_XH, scalars_XS], -1)
        x = x if self.enter is None else self.enter(x)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0]

    def calibrated(self, logit_X: Tensor) -> Tensor:
        """Log-odds of being kept."""
        return self.scale * logit_X + self.shift

    @torch.no_grad()
    def standardise(self, mean_I: Tensor, deviation_I: Tensor) -> None:
        """Fold (x - mean) / deviation into the entry, so that raw inputs are fed from then on.
        ValueError for a scorer without an entry, whose blocks would need them apart.
        """
        first = self.enter or (None if self.blocks else self.out)
        if first is None:
            raise ValueError(
                "scorer: got blocks that read the state itself, expected an entry to fold the "
                "inputs' means into; give a width, or scalars"
            )
        weight = first.weight / deviation_I
        first.bias.sub_(weight @ mean_I)
        first.weight.copy_(weight)


class Scored(NamedTuple):
    """A scorer from a folder and what its scorer.json says."""

    scorer: Scorer
    about: dict[str, Any]

    @property
    def threshold(self) -> float:
        return float(self.about["threshold"])


def save_scorer(folder: str | Path, scorer: Scorer, about: dict[str, Any]) -> None:
    """Write a scorer's folder. about: `made_for` (a mark: `weights_mark` of a drafter, or a
    target's fingerprint), `threshold` in (0, 1), `calibrated`, `figures` (on held-out rows: brier,
    brier_constant, auc, ...), `traced` (rule, sampling and tree of the rows that it learned from),
    `target` (whose verdicts they are), `provenance`. ValueError for a threshold outside, or weights
    that aren't finite.
    """
    check_threshold(about["threshold"], "threshold")
    broken = [name for name, t in scorer.state_dict().items() if not torch.isfinite(t).all()]
    if broken:
        raise ValueError(
            f"scorer: got weights that aren't finite ({', '.join(broken)}); train with a lower lr"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", scorer.state_dict())
    write_json(folder / "config.json", asdict(scorer.config))
    write_json(folder / ABOUT, {"schema": SCHEMA, **about})


def load_scorer(folder: str | Path, kind: str) -> Scored:
    """The scorer in a folder, in eval mode and fp32; warns of one that isn't calibrated. ValueError
    for a missing or cut file, another kind or schema, or other tensors than its config describes.
    """
    folder = Path(folder)
    files = ("config.json", "model.safetensors", ABOUT)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"got {folder} without {' and '.join(missing)}; expected a scorer's folder, as "
            "train/scorers.py writes it; check the path, or train it again"
        )
    config, about = read_json(folder / "config.json"), read_json(folder / ABOUT)
    known = {field.name for field in fields(ScorerConfig)}
    if about.get("schema") != SCHEMA or config.get("kind") != kind or set(config) != known:
        raise ValueError(
            f"got {folder} of schema {about.get('schema')!r} and kind {config.get('kind')!r}; "
            f"expected schema {SCHEMA} and kind {kind!r}; give the folder of such a scorer"
        )
    check_threshold(about.get("threshold"), f"{folder / ABOUT}: threshold")
    scorer = Scorer(ScorerConfig(**config))
    check_header(folder, scorer.state_dict(), "config")
    scorer.load_state_dict(load_file(folder / "model.safetensors"))
    if not about.get("calibrated"):
        figures = {"brier": math.nan, "brier_constant": math.nan} | (about.get("figures") or {})
        warnings.warn(
            f"{folder} isn't calibrated: Brier score {figures['brier']:.4f}, that of a constant "
            f"{figures['brier_constant']:.4f}; its numbers aren't probabilities: tune threshold",
            stacklevel=2,
        )
    return Scored(scorer.float().eval().requires_grad_(False), about)


def load_acceptance(
    drafter: str | Path, hidden: int | None = None, target: dict[str, Any] | None = None
) -> Scored | None:
    """The acceptance head in a drafter's folder, by its path or hub name; None where there is none.
    hidden: width of the draft's states; target: fingerprint of the model to decode, with a warning
    where the head learned what another keeps. ValueError for a head of other weights, or states of
    other width.
    """
    folder = local_folder(drafter) / FOLDER
    if not folder.is_dir():
        return None
    found = load_scorer(folder, "acceptance")
    mark = weights_mark(drafter)
    if found.about.get("made_for") != mark:
        raise ValueError(
            f"got {folder}, an acceptance head for a draft of mark {found.about.get('made_for')}; "
            f"expected {mark}, that of {drafter}; train the head on it, or remove the folder"
        )
    check_width(found.scorer, hidden, f"{folder}")
    differ = differences(found.about.get("target") or {}, target or {})
    if differ:
        warnings.warn(
            f"{folder} learned what another target keeps ({'; '.join(differ)}): answers stay this "
            "target's, its chances may be off",
            stacklevel=2,
        )
    return found


def within(nats_X: Tensor) -> Tensor:
    """log q or lead as a scorer reads it; both are infinite where a filter leaves one token."""
    return nats_X.clamp(-FAR, FAR)


def read_scalar(name: str, column_N: Tensor) -> Tensor:
    """A column of a trace as a scorer reads it, fp32; of depths, the levels before the token."""
    return column_N.float() - 1 if name == "depth" else within(column_N.float())


def set_threshold(folder: str | Path, threshold: float, tuned: dict[str, Any]) -> None:
    """Give a scorer's folder another default threshold, and note how it was found."""
    check_threshold(threshold, "threshold")
    file = Path(folder) / ABOUT
    changed = read_json(file) | {"threshold": threshold, "tuned": tuned}
    write_atomically(file, json.dumps(changed, indent=1).encode())


def check_width(scorer: Scorer, hidden: int | None, where: str) -> None:
    """ValueError where a scorer reads states of another width."""
    if hidden not in (None, scorer.config.hidden) and scorer.config.state != "none":
        raise ValueError(
            f"{where}: got a scorer of states of {scorer.config.hidden}, expected {hidden}, the "
            "hidden size of this model; give the one that was trained for it"
        )


def check_threshold(value: Any, name: str) -> None:
    """ValueError for anything but a number between 0 and 1."""
    if not isinstance(value, float | int) or not 0 < value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a number between 0 and 1")


def weights_mark(drafter: str | Path) -> str:
    """What tells a drafter's weights from others': a digest of their file's size, header and bytes
    sampled evenly. drafter: a folder or a hub name. ValueError where there is no model.safetensors.
    """
    file = local_folder(drafter) / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"got {drafter} without model.safetensors; expected a drafter folder")
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        digest.update(opened.read(min(header, size)))
        for i in range(MARKED_BLOCKS):
            opened.seek(i * max(size - BLOCK, 0) // (MARKED_BLOCKS - 1))
            digest.update(opened.read(BLOCK))
    return digest.hexdigest()[:32]
