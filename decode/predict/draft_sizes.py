"""Which draft for a target: depth and width by predicted speed-up, before anything is trained.

    draftsmith size target=Qwen/Qwen3-8B gpu=h100 budget=300e6

    speed-up = tau t_plain / (t_verify + K t_draft)
    tau = 1 + alpha + ... + alpha^K,   alpha = a log10(parameters) + b
    t = call + layers * layer + bytes of weights / bandwidth      (`machines`; or measured here)

The target's config.json is all that is read of it. At equal parameters a layer costs time that
width doesn't, and with a large vocabulary width costs an output head that depth doesn't: between
them is a best shape, a shallow and wide one (FastDraft, arXiv 2411.11055).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftsmith.command import check_one_of, parse
from draftsmith.decode.engine.memory import size
from draftsmith.decode.forward.product import lay_side_by_side
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.forward.size import available
from draftsmith.decode.policies.foretold import extended, taus
from draftsmith.decode.policies.timing import Call, forward_call, graphed, median_times
from draftsmith.decode.predict.machines import MACHINES, Machine, Pass
from draftsmith.decode.predict.scaling_laws import fit_line, read_rows
from draftsmith.models.disk.read_lm import load_config
from draftsmith.models.draft_lm import draft_config
from draftsmith.printed import duration, print_table, short_count, times_as

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SHALLOW = 12  # layers of a target whose draft may have one
RECIPE = ("layers", "hidden", "heads", "kv_heads", "intermediate")
LONGEST = 12  # drafted tokens a round, where K is to be chosen
CONTEXT = 256  # tokens before a measured forward


class Law(NamedTuple):
    """alpha = slope log10(parameters) + intercept; source: where it was seen, in words."""

    slope: float
    intercept: float
    source: str
    with_tables: bool = False  # whether parameters count the embedding and the output head

    def alpha(self, parameters: int) -> float:
        """Kept inside (0, 1), as far as that goes."""
        return min(0.99, max(0.01, self.slope * math.log10(parameters) + self.intercept))


# FastDraft's accepted / drafted at three tokens is (a + a^2 + a^3) / 3. Slope: Phi-3-mini's drafts
# of 50M and 120M after 5B tokens, means over CNN, TinyStories and Dolly (.278, .325: a = .485,
# .535). Level: the mean of the aligned 50M draft and Llama-3.1-8B's of 150M, over those and
# HumanEval (.402, .389: a = .609, .597). Their sizes count the tables, which aren't told apart.
FASTDRAFT = Law(
    0.132,
    -0.448,
    "FastDraft's drafts of 50M to 150M parameters, tables included, for Phi-3-mini and "
    "Llama-3.1-8B at temperature 0.6; one slope from two sizes",
)


@dataclass
class Sizing:
    """Propose a draft of the target's family and vocabulary."""

    target: str  # a folder, a config.json or a hub name
    budget: float = 0.0  # parameters of the draft at most; 0: no bound
    K: int = 0  # drafted tokens a round; 0: the best for each size
    gpu: str = "h100"  # of MACHINES, such as cpu, a100 or h100, to model
    bandwidth: float = 0.0  # GB/s, in place of the GPU's
    layer_overhead_us: float = -1.0  # in place of the GPU's
    results: str = ""  # rows of `draftsmith scaling`, in place of FastDraft's law
    min_layers: int = 2  # below two layers size alone doesn't tell quality (arXiv 2001.08361)
    measure: bool = False  # time models of these shapes here, on the GPU if there is one


@dataclass(frozen=True)
class Draft:
    """A shape (RECIPE's fields) and what is predicted of it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    parameters: int
    non_embedding: int
    weights: int  # bytes that a forward reads
    kv: int  # and of keys and values, a token of context
    seconds: float = math.nan
    K: int = 0
    alpha: float = math.nan
    tau: float = math.nan
    speedup: float = math.nan
    mbsu: float = math.nan

    @property
    def work(self) -> Pass:
        """What a forward of it reads."""
        return Pass(self.layers, self.weights, self.kv)


def main(argv: list[str]) -> None:
    settings = parse(Sizing, argv)
    law, machine = law_of(settings.results), machine_of(settings)
    target, drafts = propose(config_of(settings.target), settings, law, machine)
    rows = [cells(draft, target.seconds) for draft in drafts]
    print_table(rows[0], [list(row.values()) for row in rows])
    # What a command line of train/distill.py says; of train/pretrain.py, with `model.`.
    recipe = " ".join(f"draft.{name}={getattr(drafts[0], name)}" for name in RECIPE)
    told = notes(settings, law, machine, target)
    if drafts[0].speedup <= 1:
        told.append("None of them would pay: a head, or what needs no training, might.")
    print("\n".join([*told, "", f"recipe: {recipe}"]))


def config_of(target: str) -> PretrainedConfig:
    """Of a folder, a config.json or a hub name."""
    file = Path(target)
    folder = file.parent if file.name == "config.json" else target
    return load_config(folder).get_text_config()


def machine_of(settings: Sizing) -> Machine:
    """The named device with the numbers given in place of its own."""
    check_one_of("gpu", settings.gpu, MACHINES)
    if settings.K < 0 or settings.bandwidth < 0 or settings.min_layers < 1:
        raise ValueError(
            f"got K={settings.K}, bandwidth={settings.bandwidth:g}, min_layers="
            f"{settings.min_layers}, expected K >= 0, bandwidth >= 0 and min_layers >= 1"
        )
    machine = MACHINES[settings.gpu]
    if settings.bandwidth:
        machine = machine._replace(bandwidth=settings.bandwidth)
    if settings.layer_overhead_us >= 0:
        machine = machine._replace(layer=settings.layer_overhead_us)
    return machine


def law_of(results: str) -> Law:
    """FastDraft's law, or the line over sizes at the most tokens of a file of scaling rows."""
    if not results:
        return FASTDRAFT
    rows = read_rows(results)
    most = max(row["tokens"] for row in rows)
    rows = [row for row in rows if row["tokens"] == most and row["what"] == rows[0]["what"]]
    axis = "non_embedding" if all("non_embedding" in row for row in rows) else "parameters"
    if len({row[axis] for row in rows}) < 3:
        raise ValueError(
            f"results: got {results} with fewer than 3 sizes at {most} tokens, expected more"
        )
    line = fit_line(rows, "alpha", axis, rows[0]["what"], most)
    places = [place for place, _ in line.points]
    source = (
        f"{results}: {axis} of {short_count(places[0])} to {short_count(places[-1])} after "
        f"{short_count(most)} tokens, off by {line.error:+.3f} at {short_count(line.held_out[0])}"
    )
    return Law(line.slope, line.intercept, source, with_tables=axis == "parameters")


def propose(
    config: PretrainedConfig, settings: Sizing, law: Law, machine: Machine
) -> tuple[Draft, list[Draft]]:
    """The target as a shape, and for each depth the width that promises most, best first.
    ValueError for nothing within the budget, a family that `draft_config` refuses, or with
    `measure` more weights than memory.
    """
    target = shape_of(config)
    target = replace(target, seconds=machine.seconds(target.work))
    most = settings.budget or math.inf
    found: dict[int, Draft] = {}
    for draft in shapes(config, target):
        if draft.layers >= settings.min_layers and draft.parameters <= most:
            draft = replace(draft, seconds=machine.seconds(draft.work))
            draft = predicted(draft, target, law, settings.K)
            rival = found.setdefault(draft.layers, draft)
            found[draft.layers] = draft if draft.speedup > rival.speedup else rival
    if not found:
        raise ValueError(
            f"got budget={settings.budget:g} and min_layers={settings.min_layers}, which no draft "
            f"for a target of {target.layers} layers of {target.hidden} with {config.vocab_size} "
            "tokens keeps to; raise the budget, or lower min_layers"
        )
    drafts = list(found.values())
    if settings.measure:
        target, drafts = measured(config, target, drafts, law)
    return target, sorted(drafts, key=lambda draft: -draft.speedup)


def shapes(config: PretrainedConfig, target: Draft) -> list[Draft]:
    """Shapes below the target's: depths of DEPTHS, widths in whole heads of the target's size if
    that is 64 or 128 (else 64), its heads a key-value head and its feed-forward ratio, rounded.
    """
    head = getattr(config, "head_dim", None) or target.hidden // target.heads
    head = head if head in (64, 128) else 64
    group = target.heads // target.kv_heads
    found = []
    for heads in range(1, target.hidden // head + 1):
        kv_heads, hidden = -(-heads // group), heads * head
        if heads % kv_heads:
            continue
        grain = 128 if hidden >= 1024 else 64
        inner = max(grain, grain * round(hidden * target.intermediate / target.hidden / grain))
        width = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "intermediate": inner}
        # Every further layer is as large as the second.
        one, two = (shape_of(_config(config, {"layers": n, **width})) for n in (1, 2))
        for layers in (n for n in DEPTHS if n < target.layers):
            more = {
                name: getattr(one, name) + (layers - 1) * (getattr(two, name) - getattr(one, name))
                for name in ("parameters", "non_embedding", "weights", "kv")
            }
            found.append(replace(one, layers=layers, **more))
    return found


def predicted(draft: Draft, target: Draft, law: Law, K: int, t_verify: float = 0.0) -> Draft:
    """The draft with its alpha, tau, speed-up and MBSU; K: 0 for the best one; t_verify: the
    target's pass over K + 1 tokens, by default as long as over one, whose weights it reads.
    """
    alpha = law.alpha(draft.parameters if law.with_tables else draft.non_embedding)
    share = draft.weights / target.weights

    tau_K = taus(extended([alpha], K or LONGEST)).tolist()

    def with_k(K: int) -> Draft:
        tau = tau_K[K - 1]
        spent = (t_verify or target.seconds) + K * draft.seconds
        speedup, mbsu = tau * target.seconds / spent, tau / (1 + K * share)
        return replace(draft, K=K, alpha=alpha, tau=tau, speedup=speedup, mbsu=mbsu)

    tried = [K] if K else range(1, LONGEST + 1)
    return max(map(with_k, tried), key=lambda draft: draft.speedup)


def measured(
    config: PretrainedConfig, target: Draft, drafts: Sequence[Draft], law: Law
) -> tuple[Draft, list[Draft]]:
    """The same, each with its K, with medians of forwards of random bf16 models of these shapes on
    this machine, after CONTEXT tokens; the target's also over as many tokens as are verified.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needed = 2 * sum(draft.parameters for draft in (target, *drafts))
    free = available(device)
    if free is not None and needed > free:
        raise ValueError(
            f"measure: the target and {len(drafts)} drafts need {size(needed)}, got {size(free)}; "
            "say measure=false, or measure on a larger machine"
        )
    at: dict[str, Any] = {"batch": 1, "context": CONTEXT}
    runner = runner_of(config, device)
    lengths = {1, *(draft.K + 1 for draft in drafts)}
    calls: dict[Any, Call] = {n: forward_call(runner, length=n, **at) for n in lengths}
    for draft in drafts:
        runner = runner_of(config_like(config, draft), device)
        calls[draft] = forward_call(runner, length=1, **at)
    calls = {name: graphed(call, device) for name, call in calls.items()}
    times = median_times(calls, device, repeats=20)
    target = replace(target, seconds=times[1])
    timed = (replace(draft, seconds=times[draft]) for draft in drafts)
    return target, [predicted(draft, target, law, draft.K, times[draft.K + 1]) for draft in timed]


def _config(config: PretrainedConfig, sizes: dict[str, int]) -> PretrainedConfig:
    """A draft's, its tables one as a fresh draft's are."""
    return draft_config(config, vocab_size=config.vocab_size, tie_word_embeddings=True, **sizes)


def least_layers(config: PretrainedConfig) -> int:
    """Of a draft LM: two, but of a shallow target one."""
    return 1 if config.num_hidden_layers <= SHALLOW else 2


def config_like(config: PretrainedConfig, draft: Draft) -> PretrainedConfig:
    """Of a draft LM of these sizes beside a target of this config."""
    return _config(config, {name: getattr(draft, name) for name in RECIPE})


def shape_of(config: PretrainedConfig) -> Draft:
    """Counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    table, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = sum(weight.numel() for weight in model.parameters())
    tables = table.numel() + (0 if out is table else out.numel())
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Draft(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        parameters=parameters,
        non_embedding=parameters - tables,
        weights=2 * (parameters - tables + out.numel()),
        kv=4 * config.num_hidden_layers * kv_heads * head,
    )


def random_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """In bf16, laid as the decoder multiplies."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lay_side_by_side(model.requires_grad_(False))
    return model.eval()


def runner_of(config: PretrainedConfig, device: torch.device) -> Runner:
    """A random bf16 model of this shape."""
    return Runner(random_model(config, device), config.vocab_size)


def cells(draft: Draft, t_plain: float) -> dict[str, str]:
    """A draft's row, by the names of the columns."""
    return {name.replace("_", " "): str(getattr(draft, name)) for name in RECIPE} | {
        "parameters": short_count(draft.parameters),
        "without tables": short_count(draft.non_embedding),
        "t_draft": duration(draft.seconds),
        "c": f"{draft.seconds / t_plain:.3f}",
        "K": str(draft.K),
        "alpha": f"{draft.alpha:.3f}",
        "tau": f"{draft.tau:.2f}",
        "speed-up": times_as(draft.speedup),
        "MBSU": times_as(draft.mbsu),
    }


def notes(settings: Sizing, law: Law, machine: Machine, target: Draft) -> list[str]:
    """What the numbers rest on."""
    if settings.measure:
        timed = "times: measured here, on random bf16 models of these shapes"
    else:
        timed = (
            f"times: of gpu={settings.gpu}, modelled as {machine.call:g} us + {machine.layer:g} us "
            f"a layer + weights in bf16 at {machine.bandwidth:g} GB/s, at batch 1; keys and values "
            "aren't counted, and verifying K + 1 tokens is taken to cost one token's time"
        )
    counted = "all parameters" if law.with_tables else "parameters without the tables"
    return [
        f"target: {short_count(target.parameters)} parameters, {duration(target.seconds)} a token",
        timed,
        f"alpha: assumed to be {law.slope:.3f} log10({counted}) {law.intercept:+.3f}, whatever the "
        f"depth, and the same at each drafted token ({law.source})",
        "The best width of each depth is shown, best first; MBSU counts bytes alone.",
    ]
