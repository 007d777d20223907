"""What the runs of all heads share: held-out figures by depth, the measured tau, fit, save.

Depth d of a head is the token d + 2 after the one whose state it read: 0 is the first it drafts.

A result is held against what others published for chat models of 7 to 8 billion parameters on chat
or mathematics, so that a broken run is noticed. Runs differ in the number of drafted tokens, so a
tau is turned into the acceptance a drafted token that a chain of K would need for it, were it the
same at each: tau = 1 + a + ... + a^K.
"""

from bisect import bisect_left
from dataclasses import replace
from itertools import count, takewhile
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.drafters.load import drafter_of
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.disk.store import read_lines
from draftsmith.models.heads.head import Head
from draftsmith.models.target import TargetSpec, vocab_size
from draftsmith.train.heldout.heldout import HeldOut, open_heldout
from draftsmith.train.objectives.block import BlockObjective
from draftsmith.train.objectives.eagle import EagleObjective
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.objectives.medusa import JointMedusa
from draftsmith.train.run.folder import Run
from draftsmith.train.run.frozen_target import offloaded
from draftsmith.train.run.loop import Evaluate, Result, fit
from draftsmith.train.run.result import save_draft, save_model
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batches
from draftsmith.train.text.on_policy import Snapshot, Text

Trained = EagleObjective | HeadObjective | BlockObjective


def check_context(text: Text, head: Head) -> None:
    """ValueError for a head that knows fewer positions than the training text has."""
    if head.context < text.max_length:
        raise ValueError(
            f"text.max_length: got {text.max_length}, expected at most the {head.context} "
            f"positions that the {head.kind} head knows; shorten it, or start from another head or "
            "target"
        )


def head_figures(heldout: HeldOut, objective: Trained, K: int, tree: str) -> Evaluate:
    """Held-out figures of a head in training: `loss`, and `alpha_d` and `top1_d` of each depth, as
    means over the pairs at that depth; `tau`, decoded with a copy of it; and `tau_estimate`, what a
    chain would reach if acceptance at each depth were independent: 1 + sum_k prod_{d < k} alpha_d
    (top1_d if greedy). alpha_d is always that of temperature 1, which heads are trained at; tau is
    as held out.
    """
    target, size = heldout.target, vocab_size(heldout.tokenizer)
    snapshot = Snapshot(objective.head, target.dtype)

    def evaluate() -> dict[str, float]:
        drafter = drafter_of(snapshot.take(), target, size)
        means = heldout.means(objective.measure)
        estimate = along = 1.0
        for depth in count():
            pairs = means.pop(f"count_{depth}", 0.0)
            alpha, top1 = means.pop(f"alpha_{depth}", 0.0), means.pop(f"top1_{depth}", 0.0)
            if not pairs:  # deeper than the head, or than the held-out answers are long
                break
            means |= {f"alpha_{depth}": alpha / pairs, f"top1_{depth}": top1 / pairs}
            along *= (alpha if heldout.params.temperature else top1) / pairs
            estimate += along if depth < K else 0.0
        if objective.begins < 0:
            estimate = sum(along**kept for kept in range(K + 1))
        return means | {"tau_estimate": estimate, "tau": heldout.tau(drafter, K, tree)}

    return evaluate


def kept_figures(
    run: Run, ended: Result, settings: Settings, batches: Batches, processes: int
) -> dict[str, Any]:
    """For the provenance: figures of the weights that were kept, and how many examples it took."""
    found: dict[str, float] = {}
    for record in read_lines(run.metrics):
        found |= record if record["step"] == ended.best_step else {}
    depths = takewhile(found.__contains__, (f"eval_alpha_{depth}" for depth in count()))
    by_depth = [found[depth] for depth in depths]
    assert by_depth, f"{run.metrics} lacks the evaluation after step {ended.best_step}"
    sequences = ended.steps * settings.batch_size * settings.accumulation * processes
    samples = int(min(1.0, sequences / len(batches)) * len(batches.examples))
    figures = {"acceptance": by_depth[0], "acceptance_by_depth": by_depth}
    return figures | {"tau": found["eval_tau"], "samples": samples}


def train_head(
    config: Any,
    argv: list[str],
    accelerator: Accelerator,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    objective: Trained,
    batches: Batches,
    coverage: float | None = None,
) -> None:
    """Train a head, and save the weights that accepted most as a drafter folder; says whether they
    are far below what others reached on as many samples. coverage: share of the text that a draft
    vocabulary has.
    """
    # ---- held-out prompts, and what the target writes to them --------------------------------
    head, target = objective.head, objective.target
    params = config.heldout.params(config.temperature)
    heldout = open_heldout(config, params, accelerator, target, tokenizer, run)

    # ---- fit, and keep what accepted most ----------------------------------------------------
    evaluate = head_figures(heldout, objective, config.K, config.tree)
    ended = fit(accelerator, objective, batches, config, run, offloaded(config, target, evaluate))
    run.load_best(objective)
    if not accelerator.is_main_process:
        return

    # ---- save --------------------------------------------------------------------------------
    made = provenance(argv, config.seed, batches.examples.fingerprint(), ended.best_step)
    made |= {} if coverage is None else {"coverage": coverage}
    made |= kept_figures(run, ended, config, batches, accelerator.num_processes)
    result, K = run.folder / "drafter", min(config.K, head.levels)
    if isinstance(objective, JointMedusa):
        target, tuned = objective.merged(), str(run.folder / "target")
        save_model(run.folder / "target", target, tokenizer, made)
        config = replace(config, target=TargetSpec(tuned))
    # Whole numbers, such as the maps of a draft vocabulary, keep their type.
    head.to("cpu", getattr(torch, config.save_dtype))
    save_draft(result, head, target, tokenizer, replace(config, K=K), made)
    figures = {"tau": made["tau"], "K": K, "first": made["acceptance"]}
    if told := compare(head.kind, made["samples"], **figures, coverage=made.get("coverage", 1.0)):
        print(f"warning: {told}")
    run.finish({"result": str(result), **ended._asdict()})
    print(f"saved {result}")


FAR_BELOW = 0.6  # of the known acceptance


class Known(NamedTuple):
    """samples: dialogues trained on; first: acceptance of the first drafted token, 0 where it isn't
    told; tau: by chains of K tokens, 0 where it isn't told. Where a source leaves out K it is 3,
    the tools' own default.
    """

    kind: str
    samples: int
    first: float = 0.0
    tau: float = 0.0
    K: int = 3


# With what it was, and its source.
KNOWN = {
    Known("eagle3", 5_000, first=0.40, tau=1.53): (
        "a tutorial's run on 5k samples (P-EAGLE) (vllm-project/speculators, "
        "docs/user_guide/tutorials/train.md)"
    ),
    Known("eagle3", 50_000, tau=1.9): (
        "50k ShareGPT dialogues x 5 epochs, Qwen2.5-7B on GSM8K (sgl-project/SpecForge issue 128)"
    ),
    Known("eagle3", 532_000, tau=2.93): (
        "the official head of Llama-3.1-8B (ShareGPT and UltraChat) on MT-bench "
        "(sgl-project/SpecForge, docs/spec_bundle)"
    ),
    Known("eagle1", 68_000, first=0.79, tau=3.0, K=5): (
        "ShareGPT x 20 epochs: Vicuna-7B's first token, LLaMA2-Chat-7B's greedy chain "
        "(arXiv 2401.15077)"
    ),
    Known("medusa", 60_000, first=0.56): (
        "ShareGPT x 2 epochs, Vicuna-7B, top-1 of the first head (then .32, .20, .15) "
        "(FasterDecoding/Medusa, the log of its released run)"
    ),
}
CAUSES = (
    "taps in another counting of layers, or states before the final norm where those after it are "
    "meant (models/taps.py)",
    "text in another chat template than the prompts, or a wrong mask (look at one example with "
    "`python -m draftsmith data show`)",
    "answers that the target did not write itself (train/prepare.py)",
    "a head made elsewhere that pairs states and tokens with another shift",
    "too few steps for the samples, or a learning rate that is too low for this size",
)


def acceptance(tau: float, K: int) -> float:
    """a in [0, 1] with 1 + a + ... + a^K = tau, to 2^-40."""
    one = 2**40
    found = bisect_left(range(one), tau, key=lambda i: sum((i / one) ** k for k in range(K + 1)))
    return found / one


def compare(
    kind: str, samples: int, *, tau: float, K: int, first: float, coverage: float = 1.0
) -> str | None:
    """A warning where a run accepts under 60% of what runs of its kind on no more samples did; None
    where it does better, or where none on so few samples is known.

    samples: different examples that it was trained on; tau: held-out, by chains of K tokens (of a
    tree it is more, so less is noticed); first: held-out acceptance of the first drafted token;
    coverage: share of the text that the draft vocabulary has.
    """
    smaller = [known for known in KNOWN if known.kind == kind and known.samples <= samples]
    if not smaller:
        return None
    known = max(smaller)  # of one kind, so by samples
    mean = acceptance(tau, K), acceptance(known.tau, known.K)  # 0 where it isn't told
    pairs = {"of the first drafted token": (first, known.first)}
    pairs[f"a drafted token (tau {tau:.2f}, K={K})"] = mean
    short = {name: pair for name, pair in pairs.items() if pair[0] < FAR_BELOW * pair[1]}
    low = [f"{got:.2f} {name}, expected about {want:.2f}" for name, (got, want) in short.items()]
    if not low:
        return None
    few = f"a draft vocabulary that covers only {coverage:.1%} of the text"
    causes = [few, *CAUSES] if coverage < 0.95 else CAUSES
    return (
        f"acceptance is far below what such runs reach: got {'; '.join(low)}, as {KNOWN[known]}. "
        "That is a chat model of 7 to 8 billion parameters; a smaller target or other text may "
        f"differ. Likely causes: {'; '.join(causes)}"
    )
