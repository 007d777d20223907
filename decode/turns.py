"""An evaluation's runs: what is asked, the pair in each dtype, and every arm taking its turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.prompts import Prompt
from draftsmith.decode.request import Completion
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec, check_split, load_target


@dataclass
class Evaluation:
    """What to evaluate. `drafter` is a folder, `ngram`, or several of them separated by commas."""

    target: str
    drafter: str
    prompts: str = "stdlib"  # a file (JSONL, text) or the embedded corpus
    split: str = "heldout"  # "all" takes a file whole: one that nothing was trained on
    out: str = "runs/evaluate"
    K: int = 4  # drafted tokens a round
    rule: str = "coupled"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    limit: int = 32  # prompts
    prompt_tokens: int = 64  # of a prompt cut from running text
    batch: int = 1
    seed: int = 0
    threads: int = 0  # of the CPU; 0 as torch has it. Small models are fastest on one
    device: str = "cpu"
    dtype: str = "bfloat16"  # speed is measured in it; identity always in fp32
    ignore_eos: bool = False
    identity: bool = True  # also prove token identity in fp32
    allow_target_mismatch: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


@dataclass
class Turns:
    """One arm's answers and, for each group of prompts, tokens emitted and seconds of decoding."""

    completions: list[Completion] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Loaded:
    """The pair in one dtype: the target and every drafter by name."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]

    def decoder(self, settings: Evaluation, name: str | None, **changes: Any) -> Decoder:
        drafter = None if name is None else self.drafters[name]
        options = {"K": settings.K, "batch_size": settings.batch, "rule": settings.rule, **changes}
        return Decoder(self.target, self.tokenizer, drafter, **options)


def load(settings: Evaluation, drafters: dict[str, str], dtype: str) -> Loaded:
    """Target and drafters in one dtype on the settings' device."""
    target, tokenizer = load_target(
        TargetSpec(settings.target, dtype=dtype), torch.device(settings.device)
    )
    check_split(target)
    loaded = {}
    for name, path in drafters.items():
        drafter = load_drafter(
            path, target, tokenizer, allow_target_mismatch=settings.allow_target_mismatch
        )
        if drafter is None:
            raise ValueError(f"drafter: got {path!r}, expected a drafter folder or ngram")
        loaded[name] = drafter
    return Loaded(target, tokenizer, loaded)


def take_turns(
    settings: Evaluation, pair: Loaded, prompts: Sequence[Prompt], tick: Callable[[], None]
) -> dict[str | None, Turns]:
    """Plain decoding (key None) and every drafter on each group of prompts, in rotating order."""
    arms: list[str | None] = [None, *pair.drafters]
    decoders = {arm: pair.decoder(settings, arm) for arm in arms}
    for decoder in decoders.values():
        decoder.generate([prompts[0].tokens] * settings.batch, settings.params)
    turns: dict[str | None, Turns] = {arm: Turns() for arm in arms}
    for number, start in enumerate(range(0, len(prompts), settings.batch)):
        group = range(start, min(start + settings.batch, len(prompts)))
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            done = decoders[arm].generate(
                [prompts[i].tokens for i in group], settings.params, indices=group
            )
            turns[arm].completions += renumber(done, group)
            turns[arm].tokens.append(sum(c.counters.emitted for c in done))
            turns[arm].seconds.append(max(c.counters.decode_seconds for c in done))
            tick()
    return turns


def prove(
    settings: Evaluation, pair: Loaded, prompts: Sequence[Prompt], tick: Callable[[], None]
) -> dict[str | None, Turns]:
    """fp32 answers of plain decoding and, if identity is asked for, of every drafter; eight at a
    time, since neither batch nor drafter may change an answer.
    """
    arms: list[str | None] = [None, *(pair.drafters if settings.identity else ())]
    proofs: dict[str | None, Turns] = {}
    for arm in arms:
        decoder = pair.decoder(settings, arm, batch_size=max(8, settings.batch))
        done = decoder.generate([p.tokens for p in prompts], settings.params)
        proofs[arm] = Turns(done)
        tick()
    return proofs


def renumber(done: list[Completion], indices: Sequence[int]) -> list[Completion]:
    """Completions of a group carry their prompt's number in the whole run."""
    for completion, index in zip(done, indices, strict=True):
        completion.index = index
    return done
