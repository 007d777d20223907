"""An evaluation's runs: what is asked, the pair in each dtype, and every arm taking its turn.

An arm is plain decoding (None), a drafter (its name), plain decoding through a drafter's shapes
(name: baseline), or beside a drafter by `auto`, whose rounds tell little of one depth, the same by
a fixed one (name: fixed).
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least
from draftsmith.decode.drafters.load import (
    LOOKED,
    composed,
    has_folder,
    kept_defaults,
    load_decoded,
    load_drafter,
)
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import SMALLEST
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.evaluate.answers import TASKS
from draftsmith.decode.evaluate.asking import Asking
from draftsmith.decode.forward.kv import context_of
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.prompts import Prompt, next_turn
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.verify.rules import RULES
from draftsmith.models.disk.hub import local_folder
from draftsmith.models.folder.drafter_folder import META
from draftsmith.models.target import TargetSpec, device_of

BASELINES = ("native", "same-shape")
STEADY = "fixed"
FAR = 16  # tokens that a looked-up chain may copy
DEEP = 8  # levels of a chain that `auto` may draft
GROUP = 32  # prompts whose identity is proven before the clock is looked at


@dataclass(kw_only=True)
class Evaluation(Asking):
    """What to evaluate, and how."""

    drafter: str  # a folder, a hub name, ngram, suffix; several with commas between
    prompts: str = "stdlib"  # a file (JSONL, text) or the embedded corpus
    split: str = "report"  # of what is held out; or all of a file that nothing was trained on
    out: str = "runs/evaluate"
    K: int | None = None  # draft calls a round; none: the drafter folder's default, else 4
    rule: str = "coupled"
    tree: str = ""  # chain, medusa-63, dynamic:levels,width,nodes, a JSON file; empty: the folder's
    policy: str = ""  # when to stop drafting; empty: the drafter folder's, else auto; of a K: fixed
    lossy: str = ""  # extra acceptance: the output is no longer the target's; needs allow_lossy
    allow_lossy: bool = False  # that the report says so
    attention: str = "auto"  # auto | masked | split | varlen | flex
    stop: tuple[str, ...] = ()  # a text that ends an answer, or a JSON list of them
    limit: int | None = 32  # prompts; none: all
    turns: int | None = None  # of a conversation, at most; none: all it has
    task: str = ""  # gsm8k: the prompts must have known answers; empty: scored where they have
    batch_size: int = 1
    repeats: int = 1  # times all of it is decoded; of each batch of prompts the least time counts
    threads: int = 0  # of the CPU; 0 as torch has it. Small models are fastest on one
    dtype: str = "bfloat16"  # speed is measured in it; identity always in fp32
    ignore_eos: bool = False  # answers go on after the end token
    identity: bool = True  # also prove token identity in fp32
    proof_minutes: float = 10.0  # of that, at most: of as many prompts as fit
    advice: bool = True  # also say which K, policy and tree are best here, and measure them
    save: bool = False  # write them into the drafter folder: servers' lines then carry the K
    baseline: str = "native"  # same-shape: compare in `dtype` with the drafter's rounds, none kept
    allow_target_mismatch: bool = False  # a drafter that was made for another target
    adapter: str = ""  # a LoRA folder for the target, merged into its weights
    quantise: str = ""  # int8 | int4: the target's weights, as `target.quantise` of a run
    parallel: int = 1  # processes, a GPU each, that have a part of the target's layers

    def __post_init__(self) -> None:
        self.device = str(device_of(self.device))
        if self.baseline == "same-shape":
            self.policy = self.policy or STEADY
        for name, known in (("baseline", BASELINES), ("task", TASKS)):
            if getattr(self, name) not in known:
                choices = ", ".join(filter(None, known))
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {choices}")
        check_least(self, turns=1, limit=1, repeats=1, prompt_tokens=1, threads=0, seed=0)
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens: got {self.max_new_tokens}, expected at least 2; the first token "
                "of an answer comes with the prefill, which is not measured"
            )
        homeless = [p for p in self.drafter.split(",") if not (Path(p) / META).is_file()]
        if self.save and (not self.advice or homeless):
            raise ValueError(
                f"save: got true with advice={self.advice} drafter={self.drafter}; expected "
                "advice=true, and drafters that each have a folder to save into, with a "
                f"{META}{': not ' if homeless else ''}{', '.join(homeless)}"
            )
        # Makes the decoder's settings and the sampling's too, so that they are checked here.
        if not self.comparable and self.baseline == "same-shape":
            raise ValueError(
                f"baseline: got same-shape with rule={self.rule} lossy={self.lossy!r}, whose "
                "answers aren't plain decoding's token by token; use baseline=native"
            )

    @property
    def params(self) -> SamplingParams:
        return SamplingParams.of(self)

    @property
    def decoding(self) -> DecodeSettings:
        """How a drafter's decoder decodes."""
        said = {"tree": self.tree or "chain", "policy": self.policy or STEADY}
        return DecodeSettings.of(self, attention=self.backend, **said)

    @property
    def backend(self) -> str:
        """The attention of every arm: shapes alone decide only what `masked` gives."""
        automatic = (self.attention, self.baseline) == ("auto", "same-shape")
        return "masked" if automatic else self.attention

    @property
    def comparable(self) -> bool:
        """Whether answers must be plain decoding's, token by token."""
        rule, greedy = RULES[self.decoding.rule], self.params.greedy
        return not self.lossy and (rule.identical or greedy)


@dataclass
class Arm:
    """One arm's answers, in the order of decoding; and of each group of prompts that shared a batch
    the tokens emitted and the seconds of decoding.
    """

    completions: list[Completion] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def questions(self) -> list[list[Completion]]:
        """The answers to each prompt, turn by turn."""
        found: dict[int, list[Completion]] = {}
        for completion in self.completions:
            found.setdefault(completion.index, []).append(completion)
        return [found[index] for index in sorted(found)]

    @property
    def counters(self) -> list[Counters]:
        """What was counted for each prompt, over its turns."""
        return [metrics.total([c.counters for c in turns]) for turns in self.questions]


Arms = dict[str | None, Arm]


@dataclass
class Loaded:
    """The pair in one dtype: the target, and by name every drafter, how it decodes, its folder, and
    how it decodes where every round must draft alike: as it does, but of `auto` by a fixed depth.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    decoding: dict[str, DecodeSettings]
    folders: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, DecodeSettings] = field(default_factory=dict)

    def fits(self, tokens: Sequence[int], settings: Evaluation) -> bool:
        """Whether every arm has room for a prompt and the longest answer to it."""
        return len(tokens) + settings.max_new_tokens <= self.context

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that every arm can hold."""
        return min(context_of(self.target), *(d.context for d in self.drafters.values()))

    def decoder(self, settings: Evaluation, name: str | None, **changes: Any) -> Decoder:
        """A drafter's decoder, or for None that of plain decoding."""
        plain = {"batch_size": settings.batch_size, "attention": settings.backend}
        options = plain if name is None else asdict(self.decoding[name])
        drafter = None if name is None else self.drafters[name]
        return Decoder(self.target, self.tokenizer, drafter, **options | changes)

    @property
    def steady(self) -> "Loaded":
        """The same with fixed depths where `auto` would choose."""
        return replace(self, decoding=self.decoding | self.fixed)

    def decoders(self, settings: Evaluation, **changes: Any) -> dict[str | None, Decoder]:
        """Those of plain decoding and of every drafter."""
        return {arm: self.decoder(settings, arm, **changes) for arm in (None, *self.drafters)}


def load(settings: Evaluation, drafters: dict[str, str], dtype: str) -> Loaded:
    """Target and drafters in one dtype on the settings' device."""
    changes: Any = {"adapter": settings.adapter or None, "quantise": settings.quantise}
    spec = TargetSpec(settings.target, dtype=dtype, parallel=settings.parallel, **changes)
    target, tokenizer = load_decoded(spec, settings.device)
    set_template(tokenizer, settings.thinking, settings.template_kwargs)
    pair = Loaded(target, tokenizer, {}, {}, drafters)
    allow = {"allow_target_mismatch": settings.allow_target_mismatch}
    for name, path in drafters.items():
        drafter = load_drafter(path, target, tokenizer, **allow)
        if drafter is None:
            raise ValueError(f"drafter: got {path!r}, expected a drafter folder or ngram")
        pair.drafters[name] = drafter
        for policy in (settings.policy, STEADY):
            said = settings.K, settings.tree, policy
            how = replace(settings.decoding, **unsaid(path, *said, drafter.levels))
            found = pair.fixed if name in pair.decoding else pair.decoding
            found[name] = how.reaching(drafter.levels)
            if how.policy != "auto":
                break
    return pair


def unsaid(path: str, K: int | None, tree: str, policy: str, levels: int = DEEP) -> dict[str, Any]:
    """K, tree and policy as they were said, else as the drafter folder's draftsmith.json has them.
    Its K is the depth of a chain, and of its own tree; of others, and without a folder, the decoder
    has its own. Its tree may be a file in the folder. `auto` finds the depth of a chain itself, of
    at most the `levels` that the drafter drafts, so who says K or a tree alone doesn't want it.
    """
    copies = path.partition("+")[0].partition(":")[0] in LOOKED
    name = composed(path)[1] if copies else path
    kept = kept_defaults(name)
    if copies and kept["policy"].startswith("acceptance"):  # the head knows its own draft alone
        kept["policy"] = STEADY
    own = tree in ("", kept["tree"] or "chain")
    said = (K or tree) and kept["policy"] == "auto"
    policy = policy or (STEADY if said else kept["policy"])
    tree = tree or kept["tree"] or "chain"
    if own and has_folder(name) and (local_folder(name) / tree).is_file():
        tree = str(local_folder(name) / tree)
    depth = kept["K"] if own or tree == "chain" else None
    if policy == "auto" and tree == "chain":
        depth = min(max(depth or 0, DEEP), levels)
    if copies:
        depth = FAR if tree == "chain" else None
    return {"K": K or depth, "tree": tree, "policy": policy}


def time_arms(
    settings: Evaluation, pair: Loaded, prompts: Sequence[Prompt], tick: Callable[[], None]
) -> Arms:
    """Every arm on each batch of prompts, in rotating order, after a warm-up; with `repeats` all of
    it again, by drafters that have forgotten what they saw.
    """
    decoders = pair.decoders(settings)
    for name, arm in seconds(settings, pair).items():
        # A drafter works for one decoder at a time: the other arm's keeps its state.
        own = replace(pair.steady, drafters={name: copy.copy(pair.drafters[name])})
        shapes = settings.baseline == "same-shape"
        decoders[arm] = own.decoder(settings, name, same_shape=shapes)
    for decoder in decoders.values():
        for tokens in warm_ups(prompts, settings.device):
            decoder.generate([tokens] * settings.batch_size, settings.params)
    found = []
    for _ in range(settings.repeats):
        for drafter in pair.drafters.values():
            drafter.forget()  # what was warmed up on, or decoded before
        found.append(converse(settings, pair, prompts, decoders, settings.batch_size, tick))
    return fastest(found, settings.batch_size)


def fastest(runs: Sequence[Arms], size: int) -> Arms:
    """Of every arm and group of `size` prompts the run that took least: a machine's other work
    comes in spells, and only ever adds.
    """
    found: Arms = {arm: Arm() for arm in runs[0]}
    for arm, least in found.items():
        for group in range(len(runs[0][arm].seconds)):
            best = min((run[arm] for run in runs), key=lambda run: run.seconds[group])
            least.completions += [c for c in best.completions if c.index // size == group]
            least.tokens.append(best.tokens[group])
            least.seconds.append(best.seconds[group])
    return found


def seconds(settings: Evaluation, pair: Loaded) -> dict[str, str]:
    """The second arm of each drafter that has one: of plain decoding through its shapes, or of the
    fixed depth that the advice on `auto` is counted from.
    """
    if settings.baseline == "same-shape":
        return {name: f"{name}: {settings.baseline}" for name in pair.drafters}
    counted = pair.fixed if settings.advice else ()
    return {name: f"{name}: {STEADY}" for name in counted if not pair.drafters[name].remembers}


def steady_arm(pair: Loaded, timed: Arms, name: str) -> Arm | None:
    """A drafter's arm whose rounds draft alike: its own, or beside `auto` the second, if any."""
    return timed.get(f"{name}: {STEADY}") if name in pair.fixed else timed[name]


def warm_ups(prompts: Sequence[Prompt], device: str) -> list[list[int]]:
    """The prompts to warm up on, the longest first, so that what it makes room for holds all. On
    CUDA rounds are recorded for lengths in powers of two: the longest of each that has one, and the
    shortest, which has the most rounds there.
    """
    longest_first = sorted((prompt.tokens for prompt in prompts), key=len, reverse=True)
    if not device.startswith("cuda"):
        return longest_first[:1]
    found = []
    for _, alike in groupby(longest_first, lambda t: max(SMALLEST, 1 << (len(t) - 1).bit_length())):
        first, *others = alike
        found += [first, *others[-1:]]
    return found


def prove(
    settings: Evaluation, pair: Loaded, prompts: Sequence[Prompt], tick: Callable[[], None]
) -> Arms:
    """fp32 answers of plain decoding and of every drafter whose answers must equal them (`auto`
    drafts in every round then, so that there is much to prove); eight at a time, since neither
    batch nor drafter may change an answer. It ends early, after a group of prompts, once
    `proof_minutes` are over.
    """
    started = time.perf_counter()
    decoders = pair.steady.decoders(settings, batch_size=max(8, settings.batch_size))
    if not settings.comparable:
        decoders = {None: decoders[None]}

    def late() -> bool:
        return time.perf_counter() - started > 60 * settings.proof_minutes

    return converse(settings, pair, prompts, decoders, GROUP, tick, late)


def converse(
    settings: Evaluation,
    pair: Loaded,
    prompts: Sequence[Prompt],
    decoders: dict[str | None, Decoder],
    size: int,
    tick: Callable[[], None],
    enough: Callable[[], bool] = bool,
) -> Arms:
    """Groups of `size` prompts, turn by turn, until it is `enough`. At a later turn every arm reads
    the plain decoder's answers to the earlier ones: all arms answer the same, whatever was
    accepted. A conversation ends where the next turn has no room in the context.
    """
    order = list(decoders)
    found: Arms = {arm: Arm() for arm in order}
    for start in range(0, len(prompts), size):
        asked = {i: prompts[i].tokens for i in range(start, min(start + size, len(prompts)))}
        said: dict[int, list[str]] = {i: [] for i in asked}
        for arm in found.values():
            arm.tokens.append(0)
            arm.seconds.append(0.0)
        while asked:
            for name in order:
                done = answers(decoders[name], asked, settings.params, tick)
                found[name].completions += done
                found[name].tokens[-1] += sum(c.counters.emitted for c in done)
                found[name].seconds[-1] += max(c.counters.decode_seconds for c in done)
                if name is None:
                    plain = done
            later = {}
            for completion in plain:
                i = completion.index
                said[i].append(completion.text)
                if len(said[i]) < len(prompts[i].turns):
                    later[i] = next_turn(prompts[i], said[i], pair.tokenizer)
            asked = {i: ids for i, ids in later.items() if pair.fits(ids, settings)}
        order = order[1:] + order[:1]
        if enough():
            break
    return found


def answers(
    decoder: Decoder, asked: dict[int, list[int]], params: SamplingParams, tick: Callable[[], None]
) -> list[Completion]:
    """One turn of prompts, by their numbers in the run, which make the noise; a tick an answer."""
    done = decoder.generate(list(asked.values()), params, indices=list(asked), tick=tick)
    for completion, index in zip(done, asked, strict=True):
        completion.index = index
        if completion.finish_reason == "error":
            raise ValueError(f"prompt {index}: {completion.error}")
    return done
