"""A replayed rule counts what the decoder counts with it; and what is made of the counts."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.request import Counters
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces.simulate_stops import Rounds, Stop
from draftsmith.decode.traces.store import Trace
from draftsmith.models.scorers import Scored, Scorer, ScorerConfig

K = 5
PROMPTS = [[5 + i, 9, 30 + 7 * i, 12] for i in range(4)]
SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=26, ignore_eos=True),
    "t1": SamplingParams(temperature=1.0, max_new_tokens=26, seed=7),
}
ABOUT = {"kind": "decoder", "settings": {}}
Pair = tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def pair(tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> Pair:
    """A target that is sure of some tokens, and itself with noise on its weights: right often."""
    target = copy.deepcopy(tiny_target)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        target.lm_head.weight.mul_(4)
        draft = copy.deepcopy(target)
        for weight in draft.model.parameters():
            weight += 0.015 * torch.randn(weight.shape, generator=generator)
    return target, draft, tiny_tokenizer


@pytest.fixture(scope="module")
def traces(pair: Pair) -> dict[str, Trace]:
    target, draft, tokenizer = pair
    found = {}
    for name, params in SETTINGS.items():
        parts: list[dict[str, torch.Tensor]] = []
        decoder = Decoder(
            target,
            tokenizer,
            LMDrafter(draft, len(tokenizer)),
            Recorder(partial(keep, parts)),
            K=K,
            same_shape=True,
            batch_size=4,
        )
        decoder.generate(PROMPTS, params)
        found[name] = Trace(ABOUT, {k: torch.cat([part[k] for part in parts]) for k in parts[0]})
    return found


def keep(
    parts: list[dict[str, torch.Tensor]], index: int, columns: dict[str, torch.Tensor]
) -> None:
    parts.append(columns | {"prompt": torch.full_like(columns["position"], index)})


def counted(
    pair: Pair,
    params: SamplingParams,
    head: Scorer | None = None,
    **settings: object,
) -> list[Counters]:
    """What the decoder counts, its times set aside."""
    target, draft, tokenizer = pair
    drafter = LMDrafter(draft, len(tokenizer))
    if head is not None:
        drafter.acceptance = Scored(head, {"threshold": 0.5})
    decoder = Decoder(target, tokenizer, drafter, **{"K": K, **settings})
    found = [completion.counters for completion in decoder.generate(PROMPTS, params)]
    for counters in found:
        counters.prefill_seconds = counters.decode_seconds = 0.0
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replay_counts_what_the_decoder_counts(
    pair: Pair,
    traces: dict[str, Trace],
    name: str,
) -> None:
    rounds = replay.rounds_of(traces[name])
    rules: dict[str, tuple[Stop, dict[str, object]]] = {
        "one": (replay.fixed(1), {"K": 1}),
        "three": (replay.fixed(3), {"K": 3}),
        "all": (replay.fixed(K), {}),
        "confidence": (replay.confidence(0.3), {"policy": "confidence:0.3"}),
        "adaedl": (replay.adaedl(0.2, 0.5), {"policy": "entropy:0.2,0.5"}),
        "depth": (replay.chance(0.8, by="log_q"), {"policy": f"depth:{1 - 0.8}"}),
    }
    totals = {}
    for rule, (stop, settings) in rules.items():
        found = replay.replay(stop, rounds)
        assert found == counted(pair, SETTINGS[name], **settings), rule
        totals[rule] = sum(c.drafted for c in found), sum(c.rounds for c in found)
    # None of them is another one: the trace tells them apart.
    assert len(set(totals.values())) == len(totals)
    assert totals["all"][1] < totals["one"][1]


@pytest.mark.parametrize("state", ["parent", "token"])
def test_an_acceptance_head_is_replayed(
    pair: Pair,
    traces: dict[str, Trace],
    state: str,
) -> None:
    torch.manual_seed(0)
    scalars = ("log_q", "entropy", "lead", "depth") if state == "parent" else ()
    head = Scorer(ScorerConfig("acceptance", 32, 1, width=8, scalars=scalars, state=state)).eval()
    head.scale.fill_(2.0)
    head.shift.fill_(0.7)
    newest = state == "parent"
    trace = traces["t1"]
    score_n = replay.log_chances(head, trace)
    rounds = replay.rounds_of(trace, score_n)
    scores = [r.score_TK[:, : K if newest else K - 1] for r in rounds if r.score_TK is not None]
    paths = np.sort(np.exp(np.concatenate([s.cumsum(1) for s in scores])).ravel())
    # Recorded states are bf16: a threshold in the widest gap of what the head says of them.
    middle = paths[len(paths) // 4 : len(paths) // 2]
    widest = int(np.diff(middle).argmax())
    threshold = 1 - float(middle[widest : widest + 2].mean())
    for least in (1, 3):
        found = replay.replay(replay.chance(threshold, least=least, newest=newest), rounds)
        policy = f"acceptance:{threshold},{least}"
        assert found == counted(pair, SETTINGS["t1"], head, policy=policy)
        drafted = sum(c.drafted for c in found) / sum(c.rounds for c in found)
        assert least < drafted < K


def test_later_rounds_repeat_earlier_ones(traces: dict[str, Trace]) -> None:
    """A chain whose first token is kept goes on as the next position's begins."""
    for trace in traces.values():
        order = np.lexsort([trace.columns[k] for k in ("depth", "round", "prompt")])
        token_TK = trace.columns["token"].numpy()[order].reshape(-1, K)
        kept_T = trace.columns["kept"].numpy()[order].reshape(-1, K)[:, 0]
        prompt_T = trace.columns["prompt"].numpy()[order].reshape(-1, K)[:, 0]
        follows_T = kept_T[:-1] & (prompt_T[:-1] == prompt_T[1:])
        assert (token_TK[:-1, 1:] == token_TK[1:, :-1])[follows_T].all() and follows_T.sum() > 20


def made(kept: list[list[int]]) -> Rounds:
    """Rounds that keep what is said; q is 0.9 for kept tokens and 0.2 for others."""
    kept_TK = np.array(kept, bool)
    log_q_TK = np.where(kept_TK, math.log(0.9), math.log(0.2)).astype(np.float32)
    return Rounds(log_q_TK, -log_q_TK, kept_TK.cumprod(1).astype(bool), log_q_TK)


def test_a_walk_by_hand() -> None:
    # Five tokens after the first: rounds at 0 (keeps 2, emits 3) and at 3 (keeps 1 of 2 left).
    rounds = made([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    [all_] = replay.replay(replay.fixed(3), [rounds])
    assert (all_.rounds, all_.emitted, all_.drafted, all_.histogram) == (2, 5, 6, [0, 0, 2, 0])
    [plain] = replay.replay(replay.fixed(0), [rounds])
    assert (plain.rounds, plain.emitted, plain.drafted) == (5, 5, 0)
    # It drafts 2 of 2, then 1: the fifth token is the target's own.
    [oracle] = replay.replay(replay.oracle(), [rounds])
    assert (oracle.rounds, oracle.emitted, oracle.drafted) == (2, 5, 3)
    [after] = replay.replay(replay.oracle_after(), [rounds])
    assert (after.rounds, after.drafted) == (2, 6)
    assert replay.costs([all_, oracle], 0.1, 1.5) == pytest.approx([3.6, 3.3])
    figures = replay.figures([all_], 0.1)
    assert figures["speedup"] == pytest.approx(5 / 2.6) and figures["tau"] == 2.5
    assert (figures["discard_rate"], figures["verification_rate"]) == (2 / 5, 2 / 5)
    assert replay.gain([oracle], [all_], 0.1)[0] == pytest.approx(2.6 / 2.3)


def test_where_scores_stop() -> None:
    rounds = made([[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]])

    def drafted(stop: Stop) -> list[int]:
        return stop([rounds])[0].tolist()

    # 0.9, 0.81, 0.73, 0.66; a 0.2 ends it at once, or one token later where it isn't scored.
    assert drafted(replay.chance(0.3)) == [4, 3, 1]
    assert drafted(replay.chance(0.15)) == [2, 2, 1]
    assert drafted(replay.chance(0.15, newest=False)) == [3, 3, 2]
    assert drafted(replay.chance(0.3, least=2)) == [4, 3, 2]
    assert drafted(replay.capped(replay.chance(0.3), 2)) == [2, 2, 1]
    assert drafted(replay.confidence(0.5)) == [4, 3, 1]
    # 1 - sqrt(0.2 * 0.105) = 0.855, 1 - sqrt(0.2 * 1.61) = 0.433.
    assert drafted(replay.entropy(0.5)) == [4, 3, 1]


def test_the_oracle_is_the_best_of_all_ways_to_draft(traces: dict[str, Trace]) -> None:
    """Against dynamic programming over every length at every position."""
    c, v = 0.1, 1.2
    for trace in traces.values():
        rounds = replay.rounds_of(trace)
        best = []
        for run_T in (r.run_T for r in rounds):
            cost = [0.0] * (len(run_T) + 1)
            for at in reversed(range(len(run_T))):
                ends = [min(at + min(n, run_T[at]) + 1, len(run_T)) for n in range(K + 1)]
                cost[at] = min(v + n * c + cost[end] for n, end in enumerate(ends))
            best.append(cost[0])
        oracle = replay.replay(replay.oracle(), rounds)
        assert replay.costs(oracle, c, v) == pytest.approx(best)
        assert replay.figures(oracle, c, v)["discard_rate"] == 0


def test_tuning_takes_the_fastest(traces: dict[str, Trace]) -> None:
    rounds = replay.rounds_of(traces["greedy"])
    stops = {str(k): replay.fixed(k) for k in range(K + 1)}
    name, best = replay.tune(stops, rounds, 0.05)
    assert best == max(replay.speedup(replay.replay(s, rounds), 0.05) for s in stops.values()) > 1
    assert name != "0" and replay.tune(stops, rounds, 5.0) == ("0", 1.0)


def test_the_threshold_of_the_decision_process() -> None:
    assert replay.optimal_threshold(0.1, 1.0) == pytest.approx(0.9)
    assert replay.optimal_threshold(0.1, 1.0, 1.0) == pytest.approx(1.9 / 2.0)
    for t_draft, t_verify, delta in ((0, 1, 0), (1, 1, 0), (0.1, 1, -1), (math.nan, 1, 0)):
        with pytest.raises(ValueError, match="0 < t_draft < t_verify"):
            replay.optimal_threshold(t_draft, t_verify, delta)


def test_traces_without_a_round_everywhere_are_refused(traces: dict[str, Trace]) -> None:
    columns = traces["t1"].columns

    def refused(message: str, rows: torch.Tensor, **other: torch.Tensor) -> None:
        changed = {name: column[rows] for name, column in (columns | other).items()}
        with pytest.raises(ValueError, match=message):
            replay.rounds_of(Trace(ABOUT, changed))

    every = torch.ones(len(columns["round"]), dtype=torch.bool)
    refused("skip positions", columns["round"] != 3)
    refused("no whole chains", columns["node"] + 10 * columns["round"] != 22)
    refused("trees", every, parent=torch.zeros_like(columns["parent"]))
    refused("skip positions", every, position=columns["position"] + columns["round"])
    with pytest.raises(ValueError, match="fixed: got 6 tokens, expected 0 to the trace's 5"):
        replay.replay(replay.fixed(6), replay.rounds_of(traces["t1"]))
    drawn = {"kind": "decoder", "settings": {"rule": "leviathan", "temperature": 1.0}}
    with pytest.raises(ValueError, match="rule leviathan"):
        replay.rounds_of(Trace(drawn, columns))
