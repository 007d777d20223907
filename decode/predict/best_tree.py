"""The best static tree for a draft LM, from a trace: which of its guesses come true.

    draftsmith calibrate target=TARGET drafter=DRAFTER prompts=prompts.jsonl \\
        nodes=16 levels=4 temperature=1 out=tree.json

With shared noise a round keeps a node exactly when the answer's next tokens have, one by one, the
ranks of the node's path in the draft's order. So one teacher-forced pass over plain answers tells
all: a node's value is the share of rounds whose ranks begin with its path; the best tree of n nodes
is the n most valuable paths (a path is never worth more than its beginning); and expected tau is
1 + the sum of the values. Rounds begin where the tree's last round ended, which depends on the
tree: the trace is walked with the tree found so far, and the values taken again where its rounds
began, until they settle.

Medusa and EAGLE calibrate each depth apart and multiply; counting whole paths keeps what depths
have to do with each other. Prompts are of the tune part, never of the one that is reported on.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.command import check_least, parse
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import has_folder
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.asking import Asking
from draftsmith.decode.evaluate.metrics import ratio_interval
from draftsmith.decode.sampling import SamplingParams, request_race
from draftsmith.decode.tree_shapes import RankPath, StaticTree
from draftsmith.models.disk.provenance import command_line, git_commit
from draftsmith.models.folder.drafter_folder import kind_of
from draftsmith.printed import bracket

SHARPNESS = (0.5, 0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8, 3.4, 4.0, 4.8, 5.7, 6.7, 8.0)
PASSES = 4  # of walking the trace; the values change by under a percent after two


@dataclass(kw_only=True)
class Calibration(Asking):
    """What to calibrate a tree for, and how large it may be."""

    drafter: str
    out: str = "runs/tree.json"
    nodes: int = 16  # drafted tokens, the root not counted
    levels: int = 4  # draft calls

    def __post_init__(self) -> None:
        check_least(self, nodes=1, levels=1, batch_size=1, prompt_tokens=1)


class Calibrated(NamedTuple):
    """A tree, the value of each of its paths, over how many rounds; interval: 95%, of tau over
    answers, None of one alone; sharpness: of dynamic trees.
    """

    tree: StaticTree
    values: tuple[float, ...]
    rounds: int
    interval: list[float] | None = None
    sharpness: float = 1.0

    @property
    def tau(self) -> float:
        """Expected tokens a round."""
        return 1 + sum(self.values)


def calibrate(ranks: Sequence[Sequence[int]], nodes: int, levels: int) -> Calibrated:
    """The best tree of `nodes` paths and at most `levels` levels for a trace.

    ranks: of each answer's tokens in the draft's order, the first one (it comes with the prefill)
    left out. ValueError for a trace that is empty or holds fewer different paths.
    """
    if not any(ranks):
        raise ValueError("calibrate: got a trace without tokens, expected some answers")
    starts = [list(range(len(row))) for row in ranks]
    for _ in range(PASSES):
        values = path_values(ranks, starts, levels)
        if len(values) < nodes:
            raise ValueError(
                f"calibrate: got {len(values)} different paths, expected at least nodes={nodes}; "
                "take more prompts, or a smaller tree"
            )
        best = sorted(values, key=lambda path: (-values[path], len(path), path))[:nodes]
        tree = StaticTree.from_paths(best)
        starts = [walk(row, tree) for row in ranks]
    values = path_values(ranks, starts, levels)
    told = [row for row in zip(ranks, starts, strict=True) if row[1]]
    kept = []
    for row, begun in told:
        own = path_values([row], [begun], levels)
        kept.append(len(begun) * (1 + sum(own.get(path, 0.0) for path in tree.paths)))
    rounds = [len(begun) for _, begun in told]
    interval = ratio_interval(kept, rounds) if len(told) > 1 else None
    own_values = tuple(values.get(path, 0.0) for path in tree.paths)
    return Calibrated(tree, own_values, sum(rounds), interval)


def path_values(
    ranks: Sequence[Sequence[int]], starts: Sequence[Sequence[int]], levels: int
) -> dict[RankPath, float]:
    """Rank path -> the share of rounds, begun at `starts`, that it would be kept in."""
    seen: Counter[RankPath] = Counter()
    for row, begun in zip(ranks, starts, strict=True):
        for start in begun:
            ends = range(start + 1, min(start + levels, len(row)) + 1)
            seen.update(tuple(row[start:end]) for end in ends)
    rounds = max(1, sum(map(len, starts)))
    return {path: count / rounds for path, count in seen.items()}


def walk(row: Sequence[int], tree: StaticTree) -> list[int]:
    """Where the rounds begin that decode an answer with this tree."""
    paths = set(tree.paths)
    starts, at = [], 0
    while at < len(row):
        starts.append(at)
        while tuple(row[starts[-1] : at + 1]) in paths and at < len(row):
            at += 1
        at += 1
    return starts


@torch.inference_mode()
def answer_ranks(
    drafter: LMDrafter, answers: Sequence[Completion], params: SamplingParams
) -> tuple[list[list[int]], float]:
    """Each answer token's rank in the draft's order at its position (0: the draft's best), the
    first token of each answer left out; and the factor that makes the softmax of the draft's scores
    the best forecast of these tokens (temperature scaling, Guo et al., arXiv 1706.04599).
    """
    found = []
    losses_S = torch.zeros(len(SHARPNESS))
    for answer in answers:
        if answer.error:
            continue
        first = len(answer.prompt_tokens) + 1
        ids_1T = torch.tensor([answer.prompt_tokens + answer.tokens], device=drafter.runner.device)
        score_TV = params.transform(drafter.teacher_logits(ids_1T))[0, first - 1 : -1]
        positions_T = torch.arange(first, ids_1T.shape[1], device=ids_1T.device)
        race_TV = request_race(params, answer.index, positions_T, score_TV.shape[-1])
        score_TV = score_TV if race_TV is None else score_TV - race_TV
        own_T = score_TV.gather(1, ids_1T[0, first:, None])[:, 0]
        # A token that the filters removed scores -inf and is never drafted.
        drafted_T = own_T > -torch.inf
        rank_T = (score_TV > own_T[:, None]).sum(1) + ~drafted_T * score_TV.shape[-1]
        found.append(rank_T.tolist())
        for i, sharp in enumerate(SHARPNESS):
            log_q_T = sharp * own_T - (sharp * score_TV).logsumexp(-1)
            losses_S[i] -= log_q_T[drafted_T].sum().cpu()
    return found, SHARPNESS[int(losses_S.argmin())]


def main(argv: list[str]) -> None:
    settings = parse(Calibration, argv)
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)  # or an error, before anything is decoded
    made = run(settings)
    about: dict[str, Any] = {"paths": made.tree.paths, "values": made.values}
    about |= {"expected_tau": made.tau, "expected_tau_interval": made.interval}
    about |= {"rounds": made.rounds, "sharpness": made.sharpness}
    about |= {"commit": git_commit(), "command": command_line()}
    out.write_text(json.dumps(about, indent=1))
    dynamic = f"dynamic:{settings.levels},4,{settings.nodes + 1},{made.sharpness:.2g}"
    print(
        f"{made.tree}, {made.tree.levels} levels: expected tau {made.tau:.3f} "
        f"{bracket(made.interval, 3)} over {made.rounds} rounds of the answers it was chosen on\n"
        f"written: {out}; decode with it: tree={out}\n"
        f"the draft's scores foretell the answers best times {made.sharpness:.2g}: tree={dynamic}"
    )


def run(settings: Calibration) -> Calibrated:
    """The calibrated tree of what `settings` name; ValueError for what doesn't load or fit."""
    params = SamplingParams.of(settings)
    _refuse_heads(settings)
    decoder = Decoder.of(settings)
    answers = settings.answers(decoder, params)
    assert isinstance(decoder.drafter, LMDrafter)
    ranks, sharpness = answer_ranks(decoder.drafter, answers, params)
    return calibrate(ranks, settings.nodes, settings.levels)._replace(sharpness=sharpness)


def _refuse_heads(settings: Calibration) -> None:
    """ValueError for anything but a draft LM, by the folder's kind: no model is loaded yet."""
    kind = settings.drafter
    if has_folder(kind):
        kind = kind_of(kind, settings.target)
    if kind != "lm":
        raise ValueError(
            f"drafter: got {settings.drafter!r}, expected the folder of a draft LM, whose guesses "
            "don't depend on how deep they stand as a head's do, and have an order, which prompt "
            "lookup's have not; use tree=eagle-25, medusa-63 or dynamic:levels,width,nodes"
        )
