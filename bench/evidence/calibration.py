"""How well a drafter's own scores foretell what is kept: calibration of the nodes of grown trees.

    python bench/evidence/calibration.py                # of the first drafter of one_pass.py

Every node of a dynamic tree has a chance: the product of the softmax of what its siblings were
ranked by, along its path. Held-out prompts are decoded, and each node counts as kept or not. ECE:
the mean of |chance - share kept| over ten bins of chances, weighed by their nodes. For each
temperature the tree's sharpness (`DynamicTree`) is the one of `sharpness` with the least ECE on
prompts of the tune part; the rows are of the report part, of sharpness 1 beside it. s2 of a depth:
how often a node's second child is in the tree and kept, where the node was kept and its first child
wasn't, which is what breadth is worth. Rows and page: <out>/calibration.*
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.run.recipe import gsm8k

BINS = 10


@dataclass(kw_only=True)
class Calibrating:
    drafter: str = "runs/one-pass/ours-0/drafter"
    target: str = field(default_factory=lambda: gsm8k("target"))
    data: str = field(default_factory=lambda: gsm8k("data"))
    tree: str = "dynamic:5,6,33"
    sharpness: list[float] = field(default_factory=lambda: [1.0, 1.15, 1.3, 1.5, 1.75, 2.0])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    prompts: int = 48
    max_new_tokens: int = 64
    batch_size: int = 16
    threads: int = 1
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Calibrating, argv)
    need("target", settings.target)
    need("ours-alone", settings.drafter)
    torch.set_num_threads(settings.threads)
    target, tokenizer = load_target(TargetSpec(settings.target, dtype="bfloat16"), "cpu")
    drafter = load_drafter(settings.drafter, target, tokenizer)
    asked = {
        part: [
            p.tokens
            for p in load_prompts(settings.data, tokenizer, limit=settings.prompts, split=part)
        ]
        for part in ("tune", "report")
    }

    def nodes(part: str, sharpness: float, temperature: float) -> np.ndarray:
        tree = f"{settings.tree},{sharpness:g}"
        decoder = Decoder(target, tokenizer, drafter, tree=tree, batch_size=settings.batch_size)
        params = SamplingParams(temperature, max_new_tokens=settings.max_new_tokens)
        return judged(decoder, asked[part], params)

    about = {"what": settings.drafter, "target": settings.target, "data": settings.data}
    about |= about_run()
    rows: list[dict[str, Any]] = []
    for temperature in settings.temperatures:
        tuned = {
            sharpness: ece(nodes("tune", sharpness, temperature))
            for sharpness in settings.sharpness
        }
        best = min(tuned, key=lambda sharpness: tuned[sharpness])
        for sharpness in sorted({1.0, best}):
            found = nodes("report", sharpness, temperature)
            how = {"temperature": temperature, "sharpness": sharpness, "tuned": tuned}
            for level in [0, *range(1, int(found[:, 0].max()) + 1)]:
                of = found if level == 0 else found[found[:, 0] == level]
                figures = {"depth": level, "nodes": len(of), "s2": second(of)}
                rows.append(about | how | figures | bins(of))
    write_table(Path(settings.out), "calibration", rows, page(rows))
    print(page(rows))


def judged(decoder: Decoder, prompts: list[list[int]], params: SamplingParams) -> np.ndarray:
    """Of every drafted node of rows that decode: its depth, its chance, whether it was kept, its
    rank among its siblings from 1 on, and whether one of this rank or a later one may be kept, as
    its parent was and no sibling before it.
    """
    chances: list[torch.Tensor] = []
    found: list[np.ndarray] = []
    step, nodes = decoder.stepper.step, decoder.settings.plan.nodes

    def keep(log_chance_BN: torch.Tensor, active_B: torch.Tensor) -> int:
        chances.append(torch.where(active_B[:, None], log_chance_BN.exp(), -1.0))
        return nodes

    def watched(batch: Any, plan: Any, *given: Any) -> Any:
        told = step(batch, plan, *given)
        length, rows = told.levels + 1, torch.arange(len(told.table))[:, None]
        path_BL, accepted_B = told.table[:, length : 2 * length], told.table[:, 2 * length]
        chance_BN = chances.pop()
        kept_BN = torch.zeros_like(chance_BN)
        inside_BL = torch.arange(length) <= accepted_B[:, None]
        kept_BN[rows.expand_as(path_BL)[inside_BL], path_BL[inside_BL]] = 1.0
        tree = trees.pop()
        depth_BN = tree.topology.depth.expand(tree.tokens_BN.shape).float()
        assert tree.rank_BN is not None, "the path names nodes by their places in order of worth"
        kept_BN = kept_BN.gather(1, tree.rank_BN)
        parent_BN = tree.topology.parent.expand(depth_BN.shape)
        # Siblings stand in their order; the root has none.
        before_BNN = (parent_BN[:, :, None] == parent_BN[:, None]).tril(-1)
        taken_BN = (before_BNN * kept_BN[:, None]).sum(-1)
        open_BN = kept_BN.gather(1, parent_BN.clamp(min=0)) * (1 - taken_BN)
        live_BN = (chance_BN >= 0) & (depth_BN > 0)
        columns = (depth_BN, chance_BN, kept_BN, 1 + before_BNN.sum(-1), open_BN)
        found.append(torch.stack(columns, -1)[live_BN].numpy())
        return told

    trees: list[TokenTree] = []
    assert decoder.drafter is not None
    propose = decoder.drafter.propose

    def proposed(request: Any) -> Any:
        trees.append(propose(request))
        return trees[-1]

    decoder.policy.keep, decoder.stepper.step = keep, watched  # type: ignore[method-assign]
    decoder.drafter.propose = proposed  # type: ignore[method-assign]
    try:
        decoder.generate(prompts, params)
    finally:
        del decoder.drafter.propose  # type: ignore[attr-defined]
    return np.concatenate(found)


def bins(nodes: np.ndarray) -> dict[str, Any]:
    """ECE, and of each bin of chances: nodes, mean chance, share kept. nodes: as `judged` says."""
    chance, kept = nodes[:, 1], nodes[:, 2]
    of = np.minimum((chance * BINS).astype(int), BINS - 1)
    parts = [(chance[of == b], kept[of == b]) for b in range(BINS) if (of == b).any()]
    each = [(len(c), float(c.mean()), float(k.mean())) for c, k in parts]
    error = sum(n * abs(told - seen) for n, told, seen in each) / max(1, len(chance))
    return {"ece": error, "bins": each}


def second(nodes: np.ndarray) -> float | None:
    """s2 of nodes as `judged` says; None without a case."""
    _, _, kept, rank, may = nodes.T
    failed = ((rank == 1) & (may == 1) & (kept == 0)).sum()
    return float(kept[(rank == 2) & (may == 1)].sum() / failed) if failed else None


def ece(nodes: np.ndarray) -> float:
    """The expected calibration error of nodes as `judged` says."""
    return bins(nodes)["ece"]


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: ECE and bins by temperature, sharpness and depth."""
    rows = list(rows)
    cells = []
    for row in rows:
        told = "  ".join(f"{said:.2f}/{seen:.2f}" for _, said, seen in row["bins"])
        depth = "all" if row["depth"] == 0 else str(row["depth"])
        about = [f"{row['temperature']:g}", f"{row['sharpness']:g}", depth]
        s2 = "-" if row["s2"] is None else f"{row['s2']:.2f}"
        about += [f"{row['nodes']:,}", f"{row['ece']:.3f}", s2]
        cells.append([*about, told])
    last = "chance/share kept, by tenths of the chance"
    head = ("temperature", "sharpness", "depth", "nodes", "ECE", "s2", last)
    lines = ["# Calibration of a drafter's scores", "", f"{source(rows)} {rows[0]['what']}.", ""]
    return "\n".join([*lines, *markdown(head, cells)]) + "\n"


if __name__ == "__main__":
    run_command(main, Calibrating)
