"""What runs of a kind are known to reach, so that a broken one is noticed.

Figures that others published, for chat models of 7 to 8 billion parameters on chat or mathematics.
Runs differ in the number of drafted tokens, so a tau is turned into the acceptance a drafted token
that a chain of K would need for it, were it the same at each: tau = 1 + a + ... + a^K.
"""

from dataclasses import dataclass

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
