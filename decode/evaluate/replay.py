"""What an arm that wasn't run would draft and keep, on answers that are known: no decoding.

Greedy, or with shared noise, an answer is the same whatever drafts it. So the drafter is led along
the answers of a run: it drafts round after round, with any tree and policy, and what is kept of a
round is read off the answer. The target's states, where heads read them, come of one pass over each
answer. Of rounds alike drafting takes the least of their times on a CPU; on CUDA, where
rounds are recorded, and for verification everywhere, it is isolated forwards that are timed
(policies/timing.py).

Shapes: R answers that were decoded together, T tokens of prompt and answer, L = D + 1 tokens that
one round can emit, N nodes, U width of the taps.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.decode.drafters.base import Admitted, Drafter, Kept, Round, picked
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.evaluate.arms import Arm
from draftsmith.decode.policies.policy import Costs, Outcome
from draftsmith.decode.policies.timing import with_room
from draftsmith.decode.sampling import SamplingParams, request_seeds
from draftsmith.decode.token_tree import COUPLED, TokenTree
from draftsmith.decode.tree_shapes import Plan, rank_path
from draftsmith.models.taps import target_states


class Drafted(NamedTuple):
    """A round: its plan as far as it went, tokens to verify, seconds of drafting by the clock."""

    plan: Plan
    nodes: int
    seconds: float


def replay(
    decoders: Sequence[Decoder],
    questions: Sequence[Sequence[Completion]],
    params: SamplingParams,
    batch: int,
    costs: Costs,
    tick: Callable[[], None],
) -> list[Arm]:
    """Each decoder's arm, taking turns on each group of `batch` prompts; all have one drafter.
    questions: the answers to each prompt, turn by turn.
    """
    arms, deepest = [Arm() for _ in decoders], max(d.policy.plans[-1].levels for d in decoders)
    rounds: list[list[list[Drafted]]] = [[] for _ in decoders]
    for start in range(0, len(questions), batch):
        together = questions[start : start + batch]
        for own in rounds:
            own.append([])
        for turn in range(max(map(len, together))):
            asked = [turns[turn] for turns in together if turn < len(turns)]
            taps_RTU = _taps(decoders[0], asked, deepest + 1)
            for arm, own, decoder in zip(arms, rounds, decoders, strict=True):
                done, drafted = led(decoder, asked, taps_RTU, params)
                arm.completions += done
                own[-1] += drafted
        tick()
    for arm, own in zip(arms, rounds, strict=True):
        emitted = [
            sum(c.emitted for c in arm.counters[i : i + batch])
            for i in range(0, len(questions), batch)
        ]
        arm.tokens, arm.seconds = emitted, seconds_of(own, costs, decoders[0].runner.device)
    return arms


def seconds_of(
    groups: Sequence[Sequence[Drafted]], costs: Costs, device: torch.device
) -> list[float]:
    """Of each group's rounds, each of them as long as its like takes while nothing else runs."""
    clocked: dict[tuple[Plan, int], list[float]] = defaultdict(list)
    for one in chain.from_iterable(groups):
        clocked[one.plan, one.nodes].append(one.seconds)
    takes = {}
    for (plan, nodes), seconds in clocked.items():
        isolated = costs.of(plan) - costs.verifying(plan)
        drafting = isolated if device.type == "cuda" else min(seconds)
        takes[plan, nodes] = drafting + float(np.interp(nodes, costs.nodes, costs.verify))
    return [sum(takes[one.plan, one.nodes] for one in group) for group in groups]


@torch.inference_mode()
def led(
    decoder: Decoder,
    answers: Sequence[Completion],
    taps_RTU: Tensor | None,
    params: SamplingParams,
) -> tuple[list[Completion], list[Drafted]]:
    """The answers with the counters of a decoder that drafts so, all begun together; and its
    rounds. taps_RTU: the target's states at their tokens, for drafters that read them.
    """
    policy, device = decoder.policy, decoder.runner.device
    rounds: list[Drafted] = []
    texts = [answer.prompt_tokens + answer.tokens for answer in answers]
    counters = [Counters() for _ in texts]
    text_RT = _padded(texts, policy.plans[-1].levels + 1, device)
    lens_R = torch.tensor([len(answer.prompt_tokens) for answer in answers], device=device)
    last_R = torch.tensor([len(text) - 1 for text in texts], device=device)
    seeds = [request_seeds(params.seed, answer.index) for answer in answers]
    seeds_R = torch.tensor(seeds, device=device)
    twin = _begun(decoder, text_RT, lens_R, taps_RTU)
    while bool((active_R := lens_R < last_R).any()):
        plan, lens_R1 = policy.next_plan(), lens_R[:, None]
        step_L = torch.arange(plan.levels + 1, device=device)
        race_RLV = decoder.stepper.race(seeds_R, lens_R1 + step_L + 1, params)
        pending_R, top = text_RT.gather(1, lens_R1)[:, 0], int(lens_R.max())
        asked = Round(plan, lens_R, pending_R, active_R, top, params, COUPLED, race_RLV)
        asked = replace(asked, enough=policy.enough, chance=policy.chance, orders=policy.orders)
        started = time.perf_counter()
        tree = twin.propose(asked)
        drafting = time.perf_counter() - started

        topology, levels = tree.topology, tree.topology.levels
        left = (last_R - lens_R).tolist()
        paths = _kept(tree, [text[len(text) - n :] for text, n in zip(texts, left, strict=True)])
        emitted = [min(1 + len(path), n) for path, n in zip(paths, left, strict=True)]
        running = [row for row, n in enumerate(left) if n]
        for row in running:
            counters[row].record(levels, len(paths[row]), emitted[row], topology.nodes - 1)
        kept = [rank_path(plan, paths[row]) for row in running]
        policy.observe(Outcome(plan, levels, kept))
        path_RL = None
        if not topology.is_chain:  # every row as long as the tree is deep
            path_RL = _padded([range(levels + 1), *([0, *p] for p in paths)], 0, device)[1:]
        at_RL = lens_R1 + step_L[: levels + 1]
        taps_RLU = None if taps_RTU is None else picked(taps_RTU, at_RL)
        n_new_R = torch.tensor(emitted, device=device)
        news = Kept(text_RT.gather(1, at_RL + 1), n_new_R, path_RL, lens_R, taps_RLU, top)
        started = time.perf_counter()
        twin.extend(news)
        drafting += time.perf_counter() - started
        rounds.append(Drafted(plan.cut(max(1, levels)), topology.nodes, drafting))
        lens_R = lens_R + n_new_R
    both = zip(answers, counters, strict=True)
    return [replace(answer, counters=one) for answer, one in both], rounds


def _begun(decoder: Decoder, text_RT: Tensor, lens_R: Tensor, taps_RTU: Tensor | None) -> Drafter:
    """The drafter with a state of its own, all prompts taken in."""
    drafter, widest = decoder.drafter, decoder.policy.plans[-1]
    assert drafter is not None, "plain decoding drafts nothing"
    rows, width = text_RT.shape
    twin = with_room(drafter, rows, width + max(widest.nodes, widest.slots))
    rows_R, prompt = torch.arange(rows, device=lens_R.device), int(lens_R.max())
    inside_RN = torch.arange(prompt, device=lens_R.device) < lens_R[:, None]
    tokens_RN = text_RT[:, :prompt] * inside_RN
    pending_R = text_RT.gather(1, lens_R[:, None])[:, 0]
    taps_RNU = None if taps_RTU is None else taps_RTU[:, :prompt]
    twin.prefill(Admitted(rows_R, tokens_RN, lens_R, pending_R, taps_RNU))
    return twin


def _kept(tree: TokenTree, following: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each row the nodes on the path that the tokens to come take through its tree."""
    parents = tree.topology.parent.expand(len(following), -1).tolist()
    found = []
    for parent, tokens, coming in zip(parents, tree.tokens_BN.tolist(), following, strict=True):
        nodes = {(parent[n], tokens[n]): n for n in reversed(range(1, len(tokens)))}
        path, at = [], 0
        for token in coming:
            if (child := nodes.get((at, token))) is None:
                break
            path.append(child)
            at = child
        found.append(path)
    return found


def _taps(decoder: Decoder, answers: Sequence[Completion], more: int) -> Tensor | None:
    """The target's states [R, T, U] at the tokens of each answer, and zeros after them."""
    drafter, target = decoder.drafter, decoder.runner.model
    if drafter is None or not drafter.taps:
        return None
    texts = [torch.tensor([a.prompt_tokens + a.tokens], device=target.device) for a in answers]
    found = [target_states(target, drafter.taps, input_ids=ids).taps_BTF[0] for ids in texts]
    return F.pad(pad_sequence(found, batch_first=True), (0, 0, 0, more))


def _padded(rows: Sequence[Sequence[int]], more: int, device: torch.device) -> Tensor:
    """Rows of one width, the longest's and `more`, with zeros after their ends."""
    width = max(map(len, rows)) + more
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
