"""The measured side of specdecpp.py: tokens a second by rule, and the cost of a head."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Call, Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.metrics import block_efficiency, ratio_interval
from draftsmith.decode.policies.policy import Acceptance
from draftsmith.decode.policies.timing import median_times, round_of, with_room
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces.simulate_stops import Rounds, Stop
from draftsmith.decode.traces.tune_stops import by_head, measured, rules
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.scorers import SCALARS, Scored, Scorer, ScorerConfig

CONTEXT = 128  # tokens before a timed call
Rules = dict[str, dict[str, tuple[Stop, dict[str, Any]]]]  # arm -> setting -> replayed, decoded
Open = Callable[..., Decoder]


def decoded_rules(K: int) -> Rules:
    """What the decoder can be told, beside what replays it."""
    policies = {"confidence": "confidence:{}", "entropy": "entropy:{},0.6", "head": "acceptance:{}"}
    found: Rules = {
        "fixed-k": {
            name: (stop, {"K": int(name.removeprefix("K "))})
            for name, stop in rules(K)["fixed-k"].items()
        }
    }
    for arm, options in (rules(K) | {"head": by_head("parent", K)}).items():
        if arm not in policies:
            continue
        found[arm] = {}
        for setting, stop in options.items():
            kind, _, numbers = setting.partition(" ")
            threshold, _, most = numbers.partition(", K ")
            if kind != "limit":  # a fixed limit on entropy is no policy of the decoder
                policy = policies[arm].format(threshold)
                found[arm][setting] = stop, {"K": int(most), "policy": policy}
    return found


def timed_rows(
    open_decoder: Open,
    settings: Rules,
    tuned_on: list[Rounds],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[dict[str, Any]]:
    """Tokens a second of each arm and of plain decoding, one prompt at a time, arms in turn; and
    whether all answers in fp32 are plain decoding's.

    open_decoder: (dtype=, and settings of `Decoder`) -> a decoder of the pair.
    """
    longest = max(s["K"] for arm in settings.values() for _, s in arm.values())
    probe = open_decoder(dtype="bfloat16", K=longest)
    c, v = measured(probe)
    chosen = {}
    for arm, options in settings.items():
        best, _ = replay.tune({name: stop for name, (stop, _) in options.items()}, tuned_on, c, v)
        chosen[arm] = (best, options[best][1])
    fast = {arm: open_decoder(dtype="bfloat16", **how) for arm, (_, how) in chosen.items()}
    fast["plain"] = open_decoder(dtype="bfloat16", plain=True)
    done = in_turn(fast, prompts, params)
    plain = open_decoder(dtype="float32", plain=True).generate(prompts, params)
    rows = []
    for arm, answers in done.items():
        counters = [one.counters for one in answers]
        seconds = [one.decode_seconds for one in counters]
        row: dict[str, Any] = {
            "what": arm,
            "setting": chosen[arm][0] if arm in chosen else "",
            "measured_c": c,
            "measured_v": v,
            "tokens_per_s": sum(one.emitted for one in counters) / sum(seconds),
            "tau": block_efficiency(counters),
            "K": sum(one.drafted for one in counters) / sum(one.rounds for one in counters),
            "timed_prompts": len(prompts),
        }
        if arm in chosen:
            for other in ("plain", "fixed-k", "entropy"):
                base = [one.counters.decode_seconds for one in done[other]]
                row[f"over_{other}"] = sum(base) / sum(seconds)
                row[f"over_{other}_interval"] = ratio_interval(base, seconds)
            exact = open_decoder(dtype="float32", **chosen[arm][1]).generate(prompts, params)
            same = [one.tokens == other.tokens for one, other in zip(exact, plain, strict=True)]
            row |= {"identical": sum(same), "compared": len(same)}
        rows.append(row)
    return rows


def in_turn(
    arms: dict[str, Decoder], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, list[Completion]]:
    """Every arm on every prompt, after two to warm up."""
    names = list(arms)
    done: dict[str, list[Completion]] = {name: [] for name in names}
    for number, prompt in enumerate([*prompts[:2], *prompts]):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            [answer] = arms[name].generate([prompt], params, [number])
            done[name] += [answer] if number >= 2 else []
    return done


@torch.inference_mode()
def head_cost(drafter: Drafter, levels: int = 8) -> dict[str, float]:
    """Seconds of a draft call in a chain, and of asking the drafter's acceptance head about one:
    timed by itself, since the difference of two rounds drowns in a large draft's noise.
    """
    device = torch.device("cpu")
    assert drafter.acceptance is not None
    plan = chain_plan(levels)
    policy = Acceptance(plan, 0.99999)
    policy.read_by(drafter.acceptance, device)
    twin = with_room(drafter, 1, CONTEXT + plan.slots + 1)
    request = round_of(plan, 1, CONTEXT, device)
    made: list[Call] = []
    twin.propose(replace(request, calls=made))

    def ask() -> None:
        for call in made:
            call = replace(call)  # of which nothing has been read yet
            assert policy.chance is not None and policy.enough is not None
            call.path_BC = policy.chance(call)
            bool(policy.enough(call).all())

    times = median_times({"draft": lambda: twin.propose(request), "asked": ask}, device)
    step, asked = times["draft"] / levels, times["asked"] / len(made)
    return {"t_draft": step, "t_head": asked, "share": asked / step}


def real_sizes() -> list[dict[str, Any]]:
    """The same for a draft of Qwen3-0.6B's shape with random weights, and heads of two widths."""
    started = time.perf_counter()
    shape = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    drafter = LMDrafter(model, shape.vocab_size)
    rows = []
    forms: dict[str, dict[str, Any]] = {
        "2 blocks of 64, state and 4 numbers": {
            "blocks": 2,
            "width": 64,
            "scalars": SCALARS,
            "state": "parent",
        },
        "3 blocks of 1024 (the paper's)": {"blocks": 3},
    }
    for name, form in forms.items():
        scorer = Scorer(ScorerConfig("acceptance", shape.hidden_size, **form)).eval()
        drafter.acceptance = Scored(scorer.requires_grad_(False), {"threshold": 0.5})
        cost = head_cost(drafter, levels=4)
        rows.append({"what": "head-cost", "draft": "Qwen3-0.6B's shape", "form": name, **cost})
    print(f"draft of Qwen3-0.6B's shape: {time.perf_counter() - started:.0f} s")
    return rows


def small_size(open_decoder: Open) -> dict[str, Any]:
    """Of the pair's own draft and head."""
    drafter = open_decoder(dtype="bfloat16").drafter
    assert drafter is not None
    return {"what": "head-cost", "draft": "the pair's", "form": "head", **head_cost(drafter)}
