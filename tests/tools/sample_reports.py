"""Reports of a run that never was, for the tests of what is made from reports."""

import copy
from collections.abc import Callable
from typing import Any

Report = dict[str, Any]

DRAFT_LM: Report = {
    "schema": 1,
    "target": "runs/target",
    "drafter": {"kind": "lm", "path": "runs/after"},
    "rule": "coupled",
    "lossless": True,
    "lossy": "",
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": 2,
    "batch": 1,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop": [],
    "seed": 0,
    "policy": "fixed",
    "tree": "chain",
    "attention": "auto",
    "K": 2.0,
    "N": 3.0,
    "max_new_tokens": 64,
    "context": 120,
    "n_prompts": 4,
    "skipped": {"prompts": 0, "of": 4, "context": 2048, "turns": 0},
    "tau": 2.25,
    "tau_interval": [2.1, 2.4],
    "alpha": 0.7912,
    "alpha_interval": [0.779, 0.803],
    "coupled_acceptance": 0.6543,
    "draft_acceptance_rate": 0.625,
    "token_efficiency": 0.625,
    "acceptance_by_position": [0.75, 0.5],
    "acceptance_conditional": [0.75, 0.667],
    "accepted_histogram": [10, 12, 18],
    "tokens_per_s": {"plain": 211.7, "speculative": 345.6},
    "times": {
        "plain": 0.00431,
        "verify": 0.00512,
        "draft": 0.00038,
        "extend": None,
        "prefill": 0.112,
    },
    "speedup": 1.632,
    "speedup_interval": [1.54, 1.71],
    "speedup_specbench": 1.58,
    "ideal_speedup": 1.649,
    "efficiency": 0.9897,
    "c": 0.0882,
    "mbsu": 2.03,
    "loop_rate": 0.0834,
    "task": None,
    "agreement": None,
    "identical": {
        "dtype": "float32",
        "baseline": "native",
        "same": 4,
        "total": 4,
        "worst_margin": None,
    },
    "identical_same_shape": None,
    "divergences": [],
    "categories": {
        "code": {"tau": 2.31, "speedup": 1.7, "speedup_specbench": 1.61, "n_prompts": 3},
        "prose": {"tau": 2.07, "speedup": None, "speedup_specbench": None, "n_prompts": 1},
    },
    "specbench": {},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": None},
    "machine": "2 cores of a Z80",
    "commit": "abc1234",
    "command": "python -m draftsmith evaluate target=runs/target",
    "example": {"prompt": "def f(", "pieces": [["x", True], [" <b>", False], ["\n", True]]},
    "rules": {"coupled": 2.25, "block": 2.37},
    "seconds": 12.0,
}
# What a drafter without a q, without times, on no round, can't say.
UNKNOWN = (
    *("alpha", "alpha_interval", "coupled_acceptance", "draft_acceptance_rate"),
    *("token_efficiency", "speedup_specbench", "ideal_speedup", "efficiency", "c", "mbsu"),
    *("identical", "commit", "example", "rules"),
)
NGRAM: Report = {
    "drafter": {"kind": "ngram", "path": None},
    "rule": "block",
    "temperature": 1.0,
    "acceptance_by_position": [],
    "acceptance_conditional": [],
    "accepted_histogram": [],
    "times": DRAFT_LM["times"] | dict.fromkeys(("draft", "extend", "prefill")),
    "categories": {},
}
LOSSY: Report = {
    "lossless": False,
    "lossy": "typical:0.09,0.3",
    "identical": None,
    "rules": None,
    "agreement": {"share": 0.8125, "interval": [0.7, 0.9]},
}
TASK = {
    "name": "gsm8k",
    "n": 4,
    "plain": 0.5,
    "speculative": 0.25,
    "difference": -0.25,
    "difference_interval": [-0.75, 0.25],
}


def a_report(**changes: Any) -> Report:
    return copy.deepcopy(DRAFT_LM | changes)


def an_ngram_report(**changes: Any) -> Report:
    return a_report(**(dict.fromkeys(UNKNOWN) | NGRAM | changes))


def a_lossy_report(**changes: Any) -> Report:
    return a_report(**(LOSSY | changes))


def a_full_report() -> Report:
    """One that has every object there may be."""
    shapes = DRAFT_LM["identical"] | {"dtype": "bfloat16", "baseline": "same-shape"}
    return a_report(task=TASK, agreement=LOSSY["agreement"], identical_same_shape=shapes)


def divergence(dtype: str, *, near_tie: bool, prompt: int = 0, baseline: str = "native") -> Report:
    return {
        "prompt": prompt,
        "position": 7,
        "dtype": dtype,
        "margin": 3.2e-5 if near_tie else 0.25,
        "near_tie": near_tie,
        "baseline": baseline,
    }


def differing(*found: Report, **changes: Any) -> Report:
    """A report whose fp32 answers differ at each of `found` that is in fp32."""
    report = a_report(divergences=list(found), **changes)
    listed = [d for d in found if d["dtype"] == "float32"]
    report["identical"] |= {"same": 4 - len(listed), "worst_margin": 0.25}
    return report


REPORTS: dict[str, Callable[[], Report]] = {
    "draft LM": a_report,
    "n-gram": an_ngram_report,
    "near-tie": lambda: differing(divergence("float32", near_tie=True)),
    "many": lambda: differing(
        *(divergence("bfloat16", near_tie=False, prompt=i) for i in range(30))
    ),
    "long": lambda: a_report(
        K=30.0,
        acceptance_by_position=[0.9**i for i in range(30)],
        acceptance_conditional=[0.9] * 30,
        accepted_histogram=[100 - i for i in range(31)],
    ),
    "nothing drafted": lambda: a_report(
        acceptance_by_position=[], acceptance_conditional=[], accepted_histogram=[12]
    ),
    "one batch": lambda: a_report(batch=4, speedup_interval=None, speedup_specbench=None),
    "lossy": a_lossy_report,
    "lossy, with a task": lambda: a_lossy_report(task=TASK),
    "full": a_full_report,
    "Spec-Bench": lambda: a_report(
        specbench={"mt_bench": DRAFT_LM["categories"]["code"]},
        skipped={"prompts": 2, "of": 6, "context": 512, "turns": 1},
    ),
}
