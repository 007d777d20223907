"""What the runs of all heads share: held-out figures by depth, the measured tau, the saved folder.

Depth d of a head is the token d + 2 after the one whose state it read: 0 is the first it drafts.

What runs of a kind are known to reach, so that a broken one is noticed.

Figures that others published, for chat models of 7 to 8 billion parameters on chat or mathematics.
Runs differ in the number of drafted tokens, so a tau is turned into the acceptance a drafted token
that a chain of K would need for it, were it the same at each: tau = 1 + a + ... + a^K.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.head import Head
from draftsmith.models.servers.serve_lines import serve_line
from draftsmith.train.objectives.heldout import HeldOut
from draftsmith.train.run.folder import Run
from draftsmith.train.run.frozen_target import FrozenTarget
from draftsmith.train.run.loop import Result, StepOutput
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import Cache
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Text, text_at_hand


@dataclass(kw_only=True)
class HeadRun(Settings, FrozenTarget, Text, Cache):
    """The part of a recipe that all heads share; the best weights are those of the best tau."""

    temperature: float = 1.0  # of held-out tau, and of the answers that figures are taken on
    heldout_data: str = ""  # empty: the held-out side of data
    heldout_prompts: int = 32
    prompt_tokens: int = 32  # of a document, where an answer to it is wanted
    max_new_tokens: int = 128
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    tree: str = "chain"  # for tau
    best_metric: str = "tau"
    best_mode: str = "max"

    @property
    def params(self) -> SamplingParams:
        """How the target writes the held-out answers, and how tau is decoded."""
        return SamplingParams(self.temperature, max_new_tokens=self.max_new_tokens)


SomeRun = TypeVar("SomeRun", bound=HeadRun)


def shrunk(config: SomeRun) -> SomeRun:
    """Two steps on a tiny random target, whose states aren't worth keeping: shows that a recipe
    composes and runs.
    """
    prompts_from = text_at_hand(config.heldout_data or config.data)
    data = config.data if Path(config.data).exists() else prompts_from
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2, "prompt_tokens": 8}
    few: dict[str, Any] = {"max_new_tokens": 8, "heldout_prompts": 2, "heldout_data": prompts_from}
    short |= {"max_length": min(config.max_length, 256), "cache": "", "cache_int8": False}
    return replace(config, data=data, **short, **few)


def check_context(config: HeadRun, head: Head) -> None:
    """ValueError for a head that knows fewer positions than the training text has."""
    if head.context < config.max_length:
        raise ValueError(
            f"max_length: got {config.max_length}, expected at most the {head.context} positions "
            f"that the {head.kind} head knows; shorten it, or start from another head or target"
        )


def evaluate_head(
    config: HeadRun, heldout: HeldOut, measure: Callable[[Batch], StepOutput], drafter: Drafter
) -> dict[str, float]:
    """Held-out figures of a head: `loss`, and `alpha_d` and `top1_d` of each depth, as means over
    the pairs at that depth; `tau`, decoded; and `tau_estimate`, what a chain would reach if
    acceptance at each depth were independent: 1 + sum_k prod_{d < k} alpha_d (top1_d if greedy).
    alpha_d is always that of temperature 1, which heads are trained at; tau is at `temperature`.

    Args:
        measure: the objective's; gives the sums alpha_d, top1_d and count_d.
        drafter: around a copy of the head as it is now.
    """
    means = heldout.means(measure)
    estimate = along = 1.0
    for depth in count():
        pairs = means.pop(f"count_{depth}", 0.0)
        alpha, top1 = means.pop(f"alpha_{depth}", 0.0), means.pop(f"top1_{depth}", 0.0)
        if not pairs:  # deeper than the head, or than the held-out answers are long
            break
        means |= {f"alpha_{depth}": alpha / pairs, f"top1_{depth}": top1 / pairs}
        along *= (alpha if config.temperature else top1) / pairs
        estimate += along if depth < config.K else 0.0
    tau = heldout.tau(drafter, config.K, config.tree)
    return means | {"tau_estimate": estimate, "tau": tau}


def kept_figures(run: Run, ended: Result) -> dict[str, Any]:
    """For the provenance: what `evaluate_head` found for the weights that were kept."""
    lines = run.metrics.read_text("utf-8").splitlines()
    found: dict[str, float] = {}
    for record in map(json.loads, lines):
        found |= record if record["step"] == ended.best_step else {}
    depths = takewhile(lambda depth: f"eval_alpha_{depth}" in found, count())
    by_depth = [found[f"eval_alpha_{depth}"] for depth in depths]
    assert by_depth, f"{run.metrics} lacks the evaluation after step {ended.best_step}"
    return {"acceptance": by_depth[0], "acceptance_by_depth": by_depth, "tau": found["eval_tau"]}


def samples_seen(
    config: HeadRun, examples: Examples, batches: Batches, ended: Result, accelerator: Accelerator
) -> int:
    """How many different examples a run was trained on."""
    sequences = ended.steps * config.batch_size * config.accumulation * accelerator.num_processes
    return int(min(1.0, sequences / len(batches)) * len(examples))


def save_head(
    config: HeadRun,
    folder: Path,
    head: Head,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    target_path: str,
    made: dict[str, Any],
) -> None:
    """A drafter folder for `target` in the recipe's dtype; prints the line that serves it.

    made: the provenance (`result.made_by`, with `acceptance`); where it has `samples`, a result far
    below what others reached on as many is told. target_path: where the target is.
    """
    # Whole numbers, such as the maps of a draft vocabulary, keep their type.
    head.to("cpu", getattr(torch, config.save_dtype))
    K = min(config.K, head.levels)
    save_drafter(
        folder,
        kind=head.kind,
        model=head,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer, target_path),
        provenance=made,
        defaults={"K": K},
    )
    print(serve_line(folder, head.kind, target_path))
    if "samples" in made:
        figures = {"tau": made["tau"], "K": K, "first": made["acceptance"]}
        coverage = made.get("coverage", 1.0)
        told = compare(head.kind, made["samples"], **figures, coverage=coverage)
        if told:
            print(f"warning: {told}")


FAR_BELOW = 0.6  # of the known acceptance


@dataclass(frozen=True)
class Known:
    """samples: dialogues trained on; first: acceptance of the first drafted token, 0 where it isn't
    told; tau: by chains of K tokens, 0 where it isn't told. Where a source leaves out K it is 3,
    the tools' own default.
    """

    kind: str
    samples: int
    what: str
    source: str
    first: float = 0.0
    tau: float = 0.0
    K: int = 3


KNOWN = (
    Known(
        "eagle3",
        5_000,
        "a tutorial's run on 5k samples (P-EAGLE)",
        "vllm-project/speculators, docs/user_guide/tutorials/train.md",
        first=0.40,
        tau=1.53,
    ),
    Known(
        "eagle3",
        50_000,
        "50k ShareGPT dialogues x 5 epochs, Qwen2.5-7B on GSM8K",
        "sgl-project/SpecForge issue 128",
        tau=1.9,
    ),
    Known(
        "eagle3",
        532_000,
        "the official head of Llama-3.1-8B (ShareGPT and UltraChat) on MT-bench",
        "sgl-project/SpecForge, docs/spec_bundle",
        tau=2.93,
    ),
    Known(
        "eagle1",
        68_000,
        "ShareGPT x 20 epochs: Vicuna-7B's first token, LLaMA2-Chat-7B's greedy chain",
        "arXiv 2401.15077",
        first=0.79,
        tau=3.0,
        K=5,
    ),
    Known(
        "medusa",
        60_000,
        "ShareGPT x 2 epochs, Vicuna-7B, top-1 of the first head (then .32, .20, .15)",
        "FasterDecoding/Medusa, the log of its released run",
        first=0.56,
    ),
)


def acceptance(tau: float, K: int) -> float:
    """a in [0, 1] with 1 + a + ... + a^K = tau, by halving."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(middle**k for k in range(K + 1)) < tau
        low, high = (middle, high) if below else (low, middle)
    return low


def compare(
    kind: str, samples: int, *, tau: float, K: int, first: float, coverage: float = 1.0
) -> str | None:
    """A warning where a run accepts under 60% of what runs of its kind on no more samples did.

    None where it does better, or where none on so few samples is known.

    Args:
        kind: of the head.
        samples: different examples that it was trained on.
        tau: held-out, by chains of K tokens; of a tree it is more, so less is noticed.
        first: held-out acceptance of the first drafted token.
        coverage: share of the text that the draft vocabulary has.
    """
    smaller = [known for known in KNOWN if known.kind == kind and known.samples <= samples]
    if not smaller:
        return None
    known = max(smaller, key=lambda known: known.samples)
    pairs = {"of the first drafted token": (first, known.first)}
    if known.tau:
        mean = acceptance(tau, K), acceptance(known.tau, known.K)
        pairs[f"a drafted token (tau {tau:.2f}, K={K})"] = mean
    low = [
        f"{got:.2f} {name}, expected about {want:.2f}"
        for name, (got, want) in pairs.items()
        if got < FAR_BELOW * want
    ]
    if not low:
        return None
    causes = list(CAUSES)
    if coverage < 0.95:
        causes.insert(0, f"a draft vocabulary that covers only {coverage:.1%} of the text")
    return (
        f"acceptance is far below what such runs reach: got {'; '.join(low)}, as {known.what} "
        f"({known.source}). That is a chat model of 7 to 8 billion parameters; a smaller target or "
        f"other text may differ. Likely causes: {'; '.join(causes)}"
    )


CAUSES = (
    "taps in another counting of layers, or states before the final norm where those after it are "
    "meant (models/taps.py)",
    "text in another chat template than the prompts, or a wrong mask (look at one example with "
    "`python -m draftsmith data show`)",
    "answers that the target did not write itself (train/prepare.py)",
    "a head made elsewhere that pairs states and tokens with another shift",
    "too few steps for the samples, or a learning rate that is too low for this size",
)
