"""Rounds of a target of Llama-3.1-8B's shape on a GPU, step by step; a part of `make gpu`.

    python bench/speed/steps.py device=cuda out=FOLDER limit_s=300

Plain decoding against the bandwidth of a large copy, isolated forwards, then an EAGLE-shaped
drafter and one of Qwen3-0.6B's shape against plain decoding, their own ideal, and transformers'
`generate`. The models are random (device.py): acceptance is simulated, and the rows say so. The
most telling jobs come first; rows go to steps.json after each job, the names of jobs that time left
no room for to steps.txt. A row's `goal` is the least ratio wanted.
"""

import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.rows import lower, row
from draftsmith.bench.speed import device as at
from draftsmith.bench.speed.arms import (
    Arm,
    Turn,
    Turns,
    assisted,
    decode_rate,
    efficiency,
    generate,
    take_turns,
    tau,
)
from draftsmith.command import parse, run_command
from draftsmith.decode.draft_lms.lm import LMDrafter, weights_read
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward.attention import available
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import forward_call, median_times
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import numbered

Rows = list[dict[str, Any]]
SHAPES = {"EAGLE": (at.EAGLE, at.TOY_EAGLE), "0.6B": (at.QWEN3_600M, at.TOY_LM)}
K_FOR = {3.0: 4, 4.5: 6, 2.0: 3}  # draft calls a round at each simulated tau
BATCHES = (1, 4, 16)
GLUE_MS = 0.35


@dataclass
class Limits:
    device: str
    out: str
    limit_s: float


class Lab:
    """The models, and what is measured of them; toy shapes on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.toy = device, device == "cpu"
        shape = at.TOY if self.toy else at.LLAMA_8B
        self.length, self.repeats = (16, 5) if self.toy else (128, 50)
        # Rounds are recorded for attended slots in powers of two, and a run must stay in one of
        # them: from 1024 exactly it would go on to 2048 and record inside the timed call.
        self.contexts = self.short, _ = (32, 64) if self.toy else (1040, 8208)
        self.vocab = shape[-1]
        self.params = SamplingParams(max_new_tokens=self.length, ignore_eos=True)
        self.tokenizer = numbered(self.vocab)
        self.target = at.counting_lm(shape, device)
        self.drafts = {name: at.counting_lm(s[self.toy], device) for name, s in SHAPES.items()}
        # Ours attend in their own way, so transformers decodes with models of its own.
        assistant = SHAPES["EAGLE"][self.toy]
        self.peers = [at.counting_lm(shape, device), at.counting_lm(assistant, device)]
        self.rates: dict[str, float] = {}  # tokens a second at the batch before

    def arm(self, decoder: Decoder) -> Arm:
        """Its answers; only the first call, which warms it up, may record rounds."""
        made: list[int] = []  # recordings after each call

        def answer(prompts: Sequence[list[int]]) -> list[Completion]:
            done = decoder.generate(prompts, self.params)
            made.append(0 if decoder.graphs is None else len(decoder.graphs.recordings))
            assert made[-1] == made[0], f"{made[-1]} recordings, {made[0]} after the warm-up"
            return done

        return answer

    def decoder(self, name: str = "", **settings: Any) -> Decoder:
        drafter = LMDrafter(self.drafts[name], self.vocab) if name else None
        return Decoder(self.target, self.tokenizer, drafter, **settings)

    def turns(self, arms: dict[str, Arm], batch: int, context: int) -> Turns:
        """Every arm on two batches of random prompts; all must count on, whatever was drafted."""
        groups = torch.randint(self.vocab, (2, batch, context))
        groups[..., -1] = torch.arange(batch) * self.vocab // batch
        turns = take_turns("steps", arms, groups.tolist())
        for arm, done in [(a, c) for a in turns for turn in turns[a] for c in turn.done]:
            first = done.prompt_tokens[-1] + 1
            want = [n % self.vocab for n in range(first, first + self.length)]
            assert done.tokens == want, f"{arm} wrote {done.tokens}, expected {want}"
        return turns

    def seconds(self, runner: Runner, length: int, **where: int) -> float:
        """Median of an isolated forward. One at a time: at long context a KV pool is large."""
        call = at.graphed(forward_call(runner, length=length, **where), self.device)
        return median_times({"": call}, runner.device, self.repeats)[""]

    def plain(self) -> Rows:
        """Plain decoding: bytes of weights and KV a second, against a large copy's."""
        source = torch.zeros(1 << (24 if self.toy else 32), dtype=torch.int8, device=self.device)
        goal = torch.empty_like(source)
        copied = median_times({"": lambda: goal.copy_(source)}, source.device, 10)[""]
        turns = self.turns({"plain": self.arm(self.decoder())}, 1, self.short)["plain"]
        config, context = self.target.config, len(turns[0].done[0].prompt_tokens) + self.length // 2
        kv = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context
        used = decode_rate(turns) * (weights_read(self.target) + kv)
        rates = [used / 1e9], [2 * len(source) / copied / 1e9]
        what = f"plain, batch 1, context {self.short}"
        return [row(what, "copy bandwidth", *rates, "GB/s") | {"goal": 0.8}]

    def forwards(self) -> Rows:
        """t_verify and t_draft against t_plain; the gap of two replays."""
        where, sizes = {"batch": 1, "context": self.short}, (1, 8, 16, 32, 64)
        runner = self.decoder().runner
        by = f"attention={runner.attention}"
        found = {f"t_verify, N={n}, {by}": self.seconds(runner, n, **where) for n in sizes}
        plain = found[f"t_verify, N=1, {by}"]
        for name in self.drafts:
            # Compiled, as in rounds.
            draft = self.decoder(name).drafter.runner
            words = f"t_draft, {name}, attention={draft.attention}"
            found[words] = self.seconds(draft, 1, **where)
        call = forward_call(runner, length=1, **where)
        once, eight = (at.graphed(call, self.device, copies=n) for n in (1, 8))
        calls = {"alone": lambda: [once() for _ in range(8)], "together": eight}
        bursts = median_times(calls, runner.device, self.repeats)
        found["gap between replays"] = max((bursts["alone"] - bursts["together"]) / 7, 1e-7)
        return [lower(name, "t_plain", [1e3 * t], [1e3 * plain], "ms") for name, t in found.items()]

    def attention(self, name: str) -> Rows:
        """t_verify with a backend of attention, against masked."""
        where, both = {"batch": 1, "context": self.short}, (name, "masked")
        ours, theirs = (
            [1e3 * self.seconds(self.decoder(attention=a).runner, 8, **where)] for a in both
        )
        return [lower(f"t_verify, N=8, attention={name}", "attention=masked", ours, theirs, "ms")]

    def simulated(self, batch: int, context: int, wanted: float) -> Rows:
        """Both drafters against plain decoding and their ideal; transformers at short context."""
        K, where = K_FOR[wanted], f"batch {batch}, context {context}"
        if context > self.short:
            self.peers.clear()  # long contexts need their room
        for draft in (*self.drafts.values(), *self.peers[1:]):
            at.set_acceptance(draft, at.acceptance_for(wanted, K))
        decoders = {name: self.decoder(name, K=K, batch_size=batch) for name in self.drafts}
        arms = {name: self.arm(decoder) for name, decoder in decoders.items()}
        arms["plain"] = self.arm(self.decoder(batch_size=batch))
        if (context, wanted) == (self.short, 3.0):
            arms["generate"] = generate(self.peers[0], self.length)
        if (batch, context) == (1, self.short):
            setting = (K, "constant", 0.0)
            target, assistant = self.peers
            arms["assisted"] = assisted(target, self.length, assistant, setting)
        turns, rows = self.turns(arms, batch, context), []
        for name, decoder in decoders.items():
            what = f"simulated tau {wanted:g}, {name} shape, K={K}, {where}"
            rates = [[decode_rate([turn]) for turn in turns[arm]] for arm in (name, "plain")]
            rows.append(row(what, "plain", *rates, "tokens/s") | {"tau": tau(turns[name])})
            rows += self.against_ideal(what, decoder, turns[name], turns["plain"])
        for mine, peer in (("plain", "generate"), ("EAGLE", "assisted")):
            if peer in turns:
                what = f"{mine}, {where}" if mine == "plain" else rows[0]["what"]
                both = [[turn.rate for turn in turns[arm]] for arm in (mine, peer)]
                rows.append(row(what, peer, *both, "tokens/s"))
        if (context, wanted) == (self.short, 3.0):
            for arm in ("plain", *decoders):
                now, before = decode_rate(turns[arm]), self.rates.get(arm)
                if before:
                    found = row(f"{arm}, {where}", "smaller batch", [now], [before], "tokens/s")
                    rows.append(found | {"goal": 1.0})
                self.rates[arm] = now
        return rows

    def against_ideal(
        self, what: str, decoder: Decoder, spec: list[Turn], plain: list[Turn]
    ) -> Rows:
        """Efficiency and, at batch 1, the glue: a round's time but for its isolated forwards."""
        done, K = spec[0].done, decoder.settings.K
        where = {"batch": len(done), "context": len(done[0].prompt_tokens) + self.length // 2}
        target, draft = decoder.runner, decoder.drafter.runner
        calls = {"plain": (target, 1), "verify": (target, K + 1), "draft": (draft, 1)}
        t = {name: self.seconds(*call, **where) for name, call in calls.items()}
        both = [[x] for x in efficiency(t, K, spec, plain)]
        rows = [row(f"efficiency, {what}", "ideal speed-up", *both, "x")]
        if len(done) == 1:
            round_s = tau(spec) / decode_rate(spec)
            glue = [1e3 * max(round_s - t["verify"] - K * t["draft"], 1e-6)]
            rows[0]["goal"] = 0.9
            goal = f"goal {GLUE_MS} ms"
            rows.append(lower(f"glue, {what}", goal, glue, [GLUE_MS], "ms a round") | {"goal": 1.0})
        return rows


def main(argv: list[str]) -> None:
    settings = parse(Limits, argv)
    ends, out = time.monotonic() + settings.limit_s, Path(settings.out)
    if settings.device == "cpu":
        torch.set_num_threads(1)  # toys are fastest on one
    lab = Lab(settings.device)
    jobs = {"plain": lab.plain, "forwards": lab.forwards}
    others = available(lab.target.device, lab.target.dtype)
    jobs |= {f"attention {a}": partial(lab.attention, a) for a in others if a != "masked"}
    batches = BATCHES[: 2 if lab.toy else None]
    for context, batch, wanted in product(lab.contexts, batches, K_FOR):
        name = f"tau {wanted:g}, batch {batch}, context {context}"
        jobs[name] = partial(lab.simulated, batch, context, wanted)
    rows, failed, left = [], [], list(jobs)
    (out / "steps.txt").write_text("\n".join(left))
    while left and time.monotonic() < ends:
        name = left.pop(0)
        try:
            rows += jobs[name]()
        except (RuntimeError, ValueError, AssertionError) as error:
            # What one job stumbles on need not cost the others their turn on a borrowed GPU.
            failed.append(f"{name} ({str(error).splitlines()[0]})")
            traceback.print_exc()
        print(f"{ends - time.monotonic():.0f} s left after {name}", flush=True)
        (out / "steps.json").write_text(json.dumps(rows))
        (out / "steps.txt").write_text("\n".join(failed + left))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, Limits)
