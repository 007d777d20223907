"""One-pass drafters beside each other and beside EAGLE-3: tau by the number of drafted nodes.

    python bench/evidence/one_pass.py                # trains what isn't trained yet, then measures
    python bench/evidence/one_pass.py kinds=ours,dflash seeds=1 prompts=8 out=runs/one-pass/try

Every drafter sees the same answers of the same target in the same order, for as many steps, by its
gsm8k recipe; what its training took stands beside. Held-out prompts are then decoded with a chain
and with trees of 5, 8, 16 and 32 drafted nodes, all grown by `grow_dynamic` from the drafter's own
scores with the target's noise: the order that published forms lack at temperature above 0, so that
what is compared is the drafters alone. Rows and page: <out>/one-pass.*, where the rows of other
drafters and seeds stay.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.evidence import one_pass_page
from draftsmith.bench.evidence.heads import Heads, Kinds, Trees, trained_and_measured
from draftsmith.bench.rows import beside, write_table
from draftsmith.command import parse, run_command, unknown

LEVELS, WIDTH = 5, 6
NODES = (5, 8, 16, 32)
BLOCK = ("blocks", "block/gsm8k")
PUBLISHED = (*BLOCK, "head.layers=2", "head.taps=[2,4,6]", "head.rank=64", "head.last=false")
PUBLISHED += ("anchors.state=0",)
SIZES = "hidden: 384, heads: 6, kv_heads: 3, intermediate: 1024"
LAYERS = f"draft={{path: '', init: target, layers: 4, {SIZES}}}"
KINDS: Kinds = {
    "draft LM": ("distill", "gsm8k/distill", LAYERS),
    "draft LM, one pass": ("distill", "pard/gsm8k", LAYERS, "pard.levels=5"),
    "eagle3": ("eagle", "eagle3/gsm8k", "head.draft_vocab=0", "unroll.steps=5"),
    "peagle": ("eagle", "peagle/gsm8k", "head.draft_vocab=0", "head.layers=2"),
    "mixture": ("eagle", "mixture/gsm8k"),
    "mixture, begun as the target": ("eagle", "mixture/gsm8k", "head.init=target"),
    "chimera": ("heads", "chimera/gsm8k", "head.heads=5"),
    "clover2": ("heads", "clover2/gsm8k", "head.heads=5"),
    "falcon": ("heads", "falcon/gsm8k"),
    "dflash": (*PUBLISHED, "head.kind=dflash", "loss=ce"),
    "jetspec": (*PUBLISHED, "head.kind=jetspec", "anchors.decay=0"),
    "dspark": (*PUBLISHED, "head.kind=dspark", "loss=0.1*ce+1.8*tv"),
    "dspark, KL": (*PUBLISHED, "head.kind=dspark"),
    "domino": (*PUBLISHED, "head.kind=domino", "loss=ce", "anchors.base=1", "anchors.base_ends=50"),
    "dflash2": (*PUBLISHED, "head.kind=dflash2", "loss=ce"),
    "treeflash": (*PUBLISHED, "head.kind=treeflash"),
    "ours": BLOCK,
    "ours, begun at random": (*BLOCK, "head.init=random"),
    "ours, three taps": (*BLOCK, "head.taps=[2,4,6]"),
    "ours, no state": (*BLOCK, "anchors.state=0"),
    "ours, L1": (*BLOCK, "loss=2*tv"),
    "ours, match": (*BLOCK, "loss=match"),
    "ours, LK": (*BLOCK, "loss=lk"),
    "ours, KL and match": (*BLOCK, "loss=fkl+match"),
    "ours, noise": (*BLOCK, "head.noise=true"),
    "ours, narrow": (*BLOCK, "head.narrow=256"),
    "ours, two layers": (*BLOCK, "head.layers=2"),
    "ours, path head": (*BLOCK, "head.layers=2", "head.light=path", "head.rank=64"),
    "ours, Markov head": (*BLOCK, "head.layers=2", "head.light=markov", "head.rank=64"),
}


@dataclass
class OnePass(Heads):
    kinds: str = ",".join(kind.replace(", ", "+") for kind in KINDS)  # + stands for a comma
    trained: str = "runs/one-pass"
    deepest: int = 0


def main(argv: list[str]) -> None:
    settings = parse(OnePass, argv)
    asked = [kind.replace("+", ", ") for kind in settings.kinds.split(",")]
    if wrong := [kind for kind in asked if kind not in KINDS]:
        raise ValueError(unknown("kind", wrong[0], KINDS))
    rows = trained_and_measured(settings, {kind: KINDS[kind] for kind in asked}, trees)
    rows = [row | {"nodes": row["N"] - 1} for row in rows]
    out = Path(settings.out)
    rows = beside(out / "one-pass.json", rows, "what", "seed")
    write_table(out, "one-pass", rows, one_pass_page.page(rows))
    print(one_pass_page.page(rows))


def trees(settings: Any, levels: int, seed: int) -> Trees:
    """A chain, and a tree for each number of drafted nodes."""
    K = min(LEVELS, levels)
    found = {f"{n} nodes": (f"dynamic:{K},{WIDTH},{n + 1}", K) for n in NODES}
    return {"chain": ("chain", K), **found}


if __name__ == "__main__":
    run_command(main, OnePass)
