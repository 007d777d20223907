"""What schedulers of drafts would come to under a load, without the device they are meant for.

    draftsmith trace target=T drafter=D split=tune every=true out=runs/tune
    draftsmith simulate target=T drafter=D costs=runs/costs.json traces=runs/tune clients=1,4,16
    draftsmith simulate costs=runs/costs.json traces=runs/tune \\
        policies=plain,fixed,auto,table:1-4=4,5-=0 arrivals=poisson rate=2,8

Kept drafts are read off a trace, exactly, or drawn with chances given by `survival`; seconds of
rounds come from a grid (`decode/predict/load_grid.py`), which is measured first where target= is
given. One table a load, on the terminal and in <out>.md; all figures in <out>.json. Arms beside the
decoder's policies: `decode/predict/load_arms.py`. Shapes and crossings are to be trusted; of levels
only those of the machine that the grid was measured on.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.command import check_least, numbers, parse
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.session import sizes
from draftsmith.decode.predict.load_arms import arm, named
from draftsmith.decode.predict.load_grid import Grid, measured_grid
from draftsmith.decode.predict.load_simulator import (
    Arrivals,
    KeptRuns,
    drawn,
    figures,
    simulated,
    traced,
)
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.models.disk.provenance import command_line, git_commit, machine
from draftsmith.models.disk.read_lm import write_json
from draftsmith.printed import number, print_table, share


@dataclass
class Simulation:
    """A load, and what is to be judged under it."""

    costs: str  # JSON of a grid; written first where target= and drafter= are given
    traces: str = ""  # a trace's folder, recorded with every=true
    survival: str = ""  # or the chance that the first j drafted tokens are kept: 0.7,0.5,0.4
    policies: str = "plain,fixed,auto,ema,oracle"  # those, fixed:K, cost, dspark:LAG, ...
    arrivals: str = "clients"  # clients | poisson | burst | a file with a JSON list of seconds
    clients: str = "1,4,16"  # who ask again once they are answered; a table for each number
    rate: str = "1"  # of poisson: requests a second; a table for each
    requests: int = 64  # the answers in turn, again and again
    batch_size: int = 16  # rows that may decode at a time
    K: int | None = None  # tokens of the longest draft; none: those of the trace
    limit_ms: float = 50.0  # a token of a request that counts as goodput
    max_new_tokens: int = 128  # of answers drawn by survival
    prompt_tokens: int = 64  # of their prompts, and of those cut from text to measure with
    seed: int = 0
    out: str = "runs/simulated"  # .json and .md
    target: str = ""  # to measure the costs with
    drafter: str = ""
    prompts: str = "stdlib"
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_least(self, requests=1, batch_size=1, max_new_tokens=2, prompt_tokens=1)
        if self.K is not None:
            check_least(self, K=1)
        if bool(self.traces) == bool(self.survival):
            got = f"traces={self.traces!r} and survival={self.survival!r}"
            raise ValueError(f"simulate: got {got}, expected one of them")
        if bool(self.target) != bool(self.drafter):
            got = f"target={self.target!r} and drafter={self.drafter!r}"
            raise ValueError(f"simulate: got {got}, expected both, to measure costs, or neither")


def main(argv: list[str]) -> None:
    settings = parse(Simulation, argv)
    answers = answers_of(settings)
    longest = answers[0].score_TK.shape[1]
    K = settings.K or longest
    if longest < K:
        raise ValueError(f"K: got {K}, expected at most {longest}, as was drafted")
    loads = loads_of(settings)
    if settings.target:
        write_grid(settings, K)
    grid = Grid.read(settings.costs)
    grid.check(settings.batch_size, K)
    arms = named(settings.policies)
    for name in arms:
        arm(name, K, grid, settings.batch_size)  # refused before anything is computed
    rows, lines = [], []
    for title, arrivals in loads.items():
        body = []
        for name in arms:
            policy = arm(name, K, grid, settings.batch_size)
            day = simulated(policy, answers, arrivals, grid, settings.batch_size)
            rows.append({"load": title, "policy": name, **figures(day, settings.limit_ms / 1e3)})
            body.append([name, *(show(rows[-1][key]) for key, (_, show) in SHOWN.items())])
        head = ["policy", *(words for words, _ in SHOWN.values())]
        print_table(head, body, ["policy"], title=title)
        bars = [head, ["---", *repeat("---:", len(SHOWN))], *body]
        lines += [f"## {title}", "", *(f"| {' | '.join(bar)} |" for bar in bars), ""]
    out = Path(f"{settings.out}.json")
    about = {"command": command_line(), "commit": git_commit(), "settings": asdict(settings)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, about | {"rows": rows})
    out.with_suffix(".md").write_text("\n".join(lines))
    print(f"times in ms; goodput: of requests under {settings.limit_ms:g} ms a token; {out}")


def answers_of(settings: Simulation) -> list[KeptRuns]:
    """The trace's, or drawn ones."""
    if settings.traces:
        return traced(settings.traces)
    survival = numbers("survival", settings.survival, float)
    if max(survival) > 1 or sorted(survival, reverse=True) != survival:
        raise ValueError(f"survival: got {settings.survival}, expected falling shares of 1")
    how = {"tokens": settings.max_new_tokens, "prompt": settings.prompt_tokens}
    return drawn(survival, settings.requests, seed=settings.seed, **how)


def loads_of(settings: Simulation) -> dict[str, Arrivals]:
    """Each load by its name."""
    kind, count = settings.arrivals, settings.requests
    if kind == "burst":
        return {f"requests at once: {count}": Arrivals([0.0] * count)}
    if kind == "clients":
        sizes = numbers("clients", settings.clients, int, least=1)
        most = [min(size, count) for size in sizes]
        return {f"clients: {size}": Arrivals([0.0] * size, count - size) for size in most}
    if kind == "poisson":
        waits = np.random.default_rng(settings.seed).exponential(size=count).cumsum()
        rates = numbers("rate", settings.rate, float, least=1e-9)
        return {f"requests a second: {rate:g}": Arrivals((waits / rate).tolist()) for rate in rates}
    try:
        times = sorted(float(when) for when in json.loads(Path(kind).read_text()))
        return {f"requests of {kind}: {len(times)}": Arrivals(times)}
    except (OSError, ValueError, TypeError):
        raise ValueError(
            f"arrivals: got {kind!r}, expected clients, poisson, burst, or a file with a JSON list "
            "of seconds"
        ) from None


def write_grid(settings: Simulation, K: int) -> None:
    """Measure the costs of batches up to the size, of as many rows as are computed."""
    how: dict[str, Any] = {"device": settings.device, "dtype": settings.dtype, "K": K}
    decoder = Decoder.from_pretrained(settings.target, settings.drafter, **how)
    cut: dict[str, Any] = {"prompt_tokens": settings.prompt_tokens, "limit": 64}
    prompts = load_prompts(settings.prompts, decoder.tokenizer, **cut)
    rows = sizes(settings.batch_size)
    grid = measured_grid(decoder, [prompt.tokens for prompt in prompts], rows)
    about = {"machine": machine(decoder.runner.device.type), "command": command_line()}
    Path(settings.costs).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(settings.costs), grid.as_json() | about | {"commit": git_commit()})


def in_ms(seconds: float) -> str:
    return number(1e3 * seconds, 1)


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "goodput": ("goodput", "{:,.0f}".format),
    "ttft_p50": ("TTFT p50", in_ms),
    "ttft_p99": ("p99", in_ms),
    "tpot_p50": ("TPOT p50", in_ms),
    "tpot_p99": ("p99", in_ms),
    "latency_p50": ("answer p50", in_ms),
    "drafted": ("drafted", number),
    "verified": ("verified", number),
    "kept": ("kept", number),
    "rested": ("no draft", share),
}
