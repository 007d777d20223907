"""Does the simulator foretell what our own server does? Median seconds of an answer, a cell a load
and policy, measured over HTTP and simulated.

    draftsmith trace target=T drafter=D prompts=gsm8k/train.jsonl split=report every=true K=6 \\
        temperature=1 limit=32 max_new_tokens=64 out=runs/simulated-load/trace
    python bench/evidence/simulated_load.py
    python bench/evidence/simulated_load.py clock=cpu

clock=cpu: the session alone, without HTTP, in place of the server, and processor time for seconds,
of its steps and of the grid's rounds: what a busy machine does to waiting falls out.
The grid is measured before and after each policy's server runs, and the mean is taken: on a shared
machine rounds of one hour aren't those of the next. The server decodes on one thread, its clients
on another. Rows: <out>/simulated-load.json
"""

import json
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from draftsmith.bench.evidence.traffic import Ask, Endpoint, at_rate, by_clients, latencies
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown
from draftsmith.command import parse, run_command
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.engine.session import sizes
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.predict.load_arms import arm
from draftsmith.decode.predict.load_grid import Grid, measured_grid
from draftsmith.decode.predict.load_simulator import Arrivals, figures, simulated, traced
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.run.recipe import gsm8k

ROWS = sizes(16)
POLICIES = {"plain": "table:1-=0", "fixed:2": "table:1-=2", "fixed:5": "table:1-=5", "auto": "auto"}
READY = 120.0


@dataclass
class SimulatedLoad:
    target: str = field(default_factory=lambda: gsm8k("target"))
    drafter: str = "runs/one-pass/eagle3-0/drafter"
    data: str = field(default_factory=lambda: gsm8k("data"))
    trace: str = "runs/simulated-load/trace"
    policies: str = ",".join(POLICIES)
    clients: str = "1,4,16"
    rate: float = 3.0  # requests a second, of the open loads
    K: int = 6
    max_new_tokens: int = 64
    clock: str = "wall"  # wall: a server | cpu: a session of this process
    out: str = "runs/bench"


def main(argv: list[str]) -> None:
    settings = parse(SimulatedLoad, argv)
    need("eagle3-alone", settings.drafter)
    torch.set_num_threads(1)
    if settings.clock == "cpu":
        time.perf_counter = time.process_time  # which the engine reads
    runs = [one for one in traced(settings.trace) if len(one.run_T) == settings.max_new_tokens - 1]
    decoder = Decoder.from_pretrained(
        settings.target, settings.drafter, K=settings.K, dtype="bfloat16"
    )
    cut: dict[str, Any] = {"limit": 32, "split": "report"}
    texts = [one.tokens for one in load_prompts(settings.data, decoder.tokenizer, **cut)]
    loads: dict[str, Any] = {f"clients: {c}": int(c) for c in settings.clients.split(",")}
    loads |= {f"requests a second: {settings.rate:g}": None}
    grids, rows = [measured_grid(decoder, texts, ROWS)], []
    for name in settings.policies.split(","):
        policy = POLICIES[name]
        measured = {}
        if settings.clock == "cpu":
            for load, clients in loads.items():
                measured[load] = driven(decoder, policy, texts, coming(settings, clients), settings)
        else:
            with served(settings, policy) as endpoint:
                for load, clients in loads.items():
                    measured[load] = traffic(settings, endpoint, texts, clients)
        grids.append(measured_grid(decoder, texts, ROWS))
        grid = mean(grids[-2:])
        for load, clients in loads.items():
            policed = arm(name, settings.K, grid, 16)
            day = simulated(policed, runs, coming(settings, clients), grid, 16)
            found = figures(day, 1.0)["latency_p50"]
            rows.append(
                {"policy": name, "load": load, "measured": measured[load], "simulated": found}
            )
            rows[-1]["ratio"] = found / measured[load]
            print(rows[-1], flush=True)
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    named = [about_run() | {"what": "simulated-load", **row} for row in rows]
    (out / "simulated-load.json").write_text(json.dumps(named, indent=1) + "\n")
    body = [
        [r["load"], r["policy"], *(f"{r[k]:.3f}" for k in ("measured", "simulated", "ratio"))]
        for r in rows
    ]
    print("\n".join(markdown(("load", "policy", "measured s", "simulated s", "ratio"), body)))


def traffic(
    settings: SimulatedLoad, endpoint: Endpoint, texts: list[Any], clients: int | None
) -> float:
    """The median answer's seconds."""
    asks = [Ask(i, "", texts[i % len(texts)]) for i in range(8 if clients == 1 else 48)]
    if clients is None:
        replies = at_rate(endpoint, asks, settings.rate, 0)
    else:
        replies = by_clients(endpoint, asks, clients)
    return latencies(replies)["p50"]


def coming(settings: SimulatedLoad, clients: int | None) -> Arrivals:
    """As of `traffic`."""
    count = 8 if clients == 1 else 48
    if clients is not None:
        return Arrivals([0.0] * clients, count - clients)
    waits = np.random.default_rng(0).exponential(1 / settings.rate, count)
    return Arrivals(waits.cumsum().tolist())


def driven(
    decoder: Decoder, policy: str, texts: list[Any], arrivals: Arrivals, settings: SimulatedLoad
) -> float:
    """The median answer's seconds of a session whose clock is the time its steps take."""
    decoder.policy = make_policy(policy, decoder.settings.plan)
    session = decoder.open_session(16, 512)
    params = SamplingParams(1.0, max_new_tokens=settings.max_new_tokens, ignore_eos=True)
    how: dict[str, Any] = {"tokenizer": decoder.tokenizer, "params": params}
    due, left, clock, number = deque(arrivals.times), arrivals.after, 0.0, 0
    began: dict[int, float] = {}
    seconds = []
    while due or session.busy:
        if not session.busy:
            clock = max(clock, due[0])
        while due and due[0] <= clock:
            prompt = list(texts[number % len(texts)])
            session.submit(open_request(prompt, number, number, context=decoder.context, **how))
            began[number] = due.popleft()
            number += 1
        started = time.process_time()
        news = session.step()
        clock += time.process_time() - started
        for request, _, ended in news:
            if ended:
                seconds.append(clock - began[request.completion.index])
                if arrivals.after and not left:
                    due.clear()
                    for waits in session.batch.rows.requests:
                        if waits is not None:
                            session.cancel(waits)
                due.extend([clock] * (left > 0))
                left -= left > 0
    session.close()
    return float(np.median(seconds))


def mean(grids: list[Grid]) -> Grid:
    """Cell by cell."""
    tables = [np.mean([g[i] for g in grids], 0) for i in (2, 3)]
    prefill = [
        (float(one[0]), (one[1] + other[1]) / 2)
        for one, other in zip(grids[0].prefill, grids[1].prefill, strict=True)
    ]
    return grids[0]._replace(verify_RN=tables[0], beside_RN=tables[1], prefill=prefill)


@contextmanager
def served(settings: SimulatedLoad, policy: str) -> Iterator[Endpoint]:
    """A server of this policy, warm; "": without a drafter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [f"target={settings.target}", f"port={port}", "name=t", "batch_size=16"]
    if policy:
        words += [f"drafter={settings.drafter}", f"policy={policy}", f"K={settings.K}"]
    words += ["max_length=512", "threads=1", "dtype=bfloat16", "max_queue=1000"]
    command = [sys.executable, "-P", "-m", "draftsmith", "serve", *words]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY
        while True:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ValueError(
                        f"got no server by {' '.join(command)}; try it alone"
                    ) from None
                time.sleep(0.2)
        body = {"model": "t", "max_tokens": settings.max_new_tokens, "ignore_eos": True}
        endpoint = Endpoint(url, temperature=1.0, **body)
        by_clients(endpoint, [Ask(1000 + i, "", [5, 6, 7, 8 + i]) for i in range(4)], 4)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    run_command(main, SimulatedLoad)
