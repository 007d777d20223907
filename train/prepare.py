"""Answers to prompts, written by the target itself, so that a draft learns what the target says.

    draftsmith prepare recipe=gsm8k/prepare
    draftsmith prepare target=my/target prompts=prompts.jsonl out=data/answers
    draftsmith prepare ... endpoint=http://localhost:8000      # any OpenAI-compatible server

    answer[n, s] ~ p(. | prompt[n]),  with the seed request_seeds(seed, n * samples + s)

With several `temperatures`, request i is answered at the (i mod their number)-th of them: FastDraft
(arXiv 2411.11055) aligns a draft on answers at 0, 0.6, 0.8 and 1. With `reverse.draft` the draft
may refuse tokens that are too improbable for it: train/answers/reverse.py.

Each process answers the prompts n = rank, rank + world, ... and appends an answer to its shard when
it is finished. After a kill the same command goes on. Train with `data=<out>`.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from draftsmith.command import check_least, run_command
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.chat import set_template, thinks
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.disk.provenance import git_commit, versions
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import TargetSpec, device_of
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.answers.asks import Ask, fitting, from_rows, prompts_hash
from draftsmith.train.answers.endpoint import (
    Endpoint,
    EndpointSpec,
    GivenUp,
    Refused,
    Writer,
    write_answers,
)
from draftsmith.train.answers.reverse import ReversePair
from draftsmith.train.answers.top_logprobs import check_asked
from draftsmith.train.run.recipe import check_made, load, show
from draftsmith.train.text.prepared import (
    Answer,
    answer_file,
    claim,
    read_answers,
    summary,
    with_bar,
)
from draftsmith.train.text.tokenise import load_rows

LENGTH, THINKING_LENGTH = 256, 2048  # tokens of an answer


@dataclass(kw_only=True)
class ReverseSpec:
    """The group `reverse`: answers that a draft can learn."""

    draft: str = ""  # the folder of a draft LM; empty: the target answers alone
    least: float = 0.01  # the draft's probability of a token, below which it refuses it


@dataclass(kw_only=True)
class Prepare:
    """What to ask the target, and how it answers."""

    target: TargetSpec  # with endpoint=, only its tokenizer is read
    prompts: str  # rows with prompts, or documents, of which windows are prompts
    out: str  # the folder that answers go to
    entry: str = "prepare"
    split: str = "train"  # train | heldout | all
    limit: int | None = None  # of them; none: one a row
    prompt_tokens: int = 64
    max_prompt_tokens: int = 0  # leave longer prompts out; 0: one beyond the context is an error
    samples: int = 1  # answers a prompt
    max_new_tokens: int = 0  # 0: 256, and 2048 of a model that thinks before it answers
    thinking: bool | None = None
    template_kwargs: str = ""
    temperature: float = 1.0
    temperatures: list[float] = field(default_factory=list)  # several, in turn; then not the one
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch_size: int = 16  # rows of the decoder
    device: str = "auto"  # auto | cpu
    endpoint: EndpointSpec = field(default_factory=EndpointSpec)
    reverse: ReverseSpec = field(default_factory=ReverseSpec)
    show: str = "changes"  # printed at the start: changes (what isn't as by default) | all

    def __post_init__(self) -> None:
        check_least(self, limit=1, max_prompt_tokens=0, max_new_tokens=0)
        check_least(self, samples=1, batch_size=1, prompt_tokens=1)
        if self.endpoint.url and self.reverse.draft:
            raise ValueError(
                f"reverse.draft: got {self.reverse.draft} with endpoint.url, expected one of them: "
                "the draft reads along with each token; give a target that answers here"
            )
        device_of(self.device)  # refuses one that isn't here


def main(argv: list[str]) -> None:
    config: Prepare = check_made(load(Prepare, argv))
    if config.target.shrink:  # to try a recipe: some prompts, short answers
        config = replace(config, limit=4, max_new_tokens=8)
    served = config.endpoint
    check_asked(served.top_logprobs, served.url, served.api, sampling(config, LENGTH))

    # ---- target ------------------------------------------------------------------------------
    state = PartialState(cpu=config.device == "cpu" or not torch.accelerator.is_available())
    writer, tokenizer, target, room = load_writer(config, state.device)
    set_template(tokenizer, config.thinking, config.template_kwargs)
    params = sampling(config, THINKING_LENGTH if thinks(tokenizer) else LENGTH)

    # ---- prompts -----------------------------------------------------------------------------
    asked: dict[str, Any] = {"limit": config.limit, "window": config.prompt_tokens}
    asked |= {"samples": config.samples, "seed": config.seed, "top_logprobs": served.top_logprobs}
    asks = from_rows(load_rows(config.prompts, config.split), tokenizer, **asked)
    longest = min(room, config.max_prompt_tokens or room)
    asks = fitting(asks, longest=longest, leave_out=config.max_prompt_tokens > 0)

    # ---- the folder: ours, or an error -------------------------------------------------------
    identity = {
        "target": target,
        "dtype": config.target.dtype,
        "sampling": as_stored(params),
        "prompts": prompts_hash(asks),
        "requests": len(asks),
        "top_logprobs": served.top_logprobs or None,  # as a folder without has it
        "reverse": writer.mark if isinstance(writer, ReversePair) else None,
    }
    about = {"recipe": show(config), "argv": argv, "commit": git_commit(), "versions": versions()}
    out, rank, world = Path(config.out), state.process_index, state.num_processes
    with state.main_process_first():
        claim(out, identity, about)
    console = Console(quiet=not state.is_main_process)
    console.print(show(config, config.show), highlight=False)

    # ---- answers -----------------------------------------------------------------------------
    with answer_file(out, rank, world) as append:
        done = {answer["index"] for answer in read_answers(out)}
        mine = [ask for ask in asks if ask.index // config.samples % world == rank]
        left = [ask for ask in mine if ask.index not in done]
        console.print(f"{out}: {len(mine) - len(left):,} of {len(mine):,} answers are there")
        try:
            for answer in with_bar(answered(writer, left, params), len(left), console):
                append(answer)
        except (GivenUp, Refused, KeyboardInterrupt) as stop:
            message = f"finished answers are in {out}; the same command goes on"
            if isinstance(stop, KeyboardInterrupt):
                raise KeyboardInterrupt(message) from stop
            raise SystemExit(f"{stop}\n{message}") from stop
    console.print(summary(out, len(asks)))


def load_writer(
    config: Prepare, device: torch.device
) -> tuple[Writer, PreTrainedTokenizerBase, dict[str, Any], int]:
    """What writes the answers, its tokenizer, the target's fingerprint, tokens of the longest
    prompt.
    """
    served, reverse = config.endpoint, config.reverse
    if served.url:
        tokenizer = load_tokenizer(config.target.path)
        far = Endpoint(served, tokenizer)
        return far, tokenizer, fingerprint(None, tokenizer, far.model), sys.maxsize
    model, tokenizer = load_decoded(config.target, device)
    rows = config.batch_size
    writer: Decoder | ReversePair
    if reverse.draft:
        writer = ReversePair(model, tokenizer, reverse.draft, least=reverse.least, batch_size=rows)
    else:
        writer = Decoder(model, tokenizer, batch_size=rows)
    return writer, tokenizer, fingerprint(model, tokenizer), writer.context - 1


def as_stored(params: list[SamplingParams]) -> Any:
    """As a folder's identity has it: without a schema, which none of its answers follows."""
    every = [{k: v for k, v in asdict(p).items() if k != "json_schema"} for p in params]
    return every[0] if len(every) == 1 else every


def sampling(config: Prepare, length: int) -> list[SamplingParams]:
    """How answers are drawn, at each temperature in turn; length: where the recipe has none."""
    given = replace(config, max_new_tokens=config.max_new_tokens or length)
    every = config.temperatures or [config.temperature]
    return [SamplingParams.of(replace(given, temperature=t)) for t in every]


def answered(writer: Writer, asks: list[Ask], params: list[SamplingParams]) -> Iterator[Answer]:
    """Answers to all, those of each temperature together."""
    for turn, given in enumerate(params):
        yield from write_answers(writer, [a for a in asks if a.index % len(params) == turn], given)


if __name__ == "__main__":
    run_command(main, Prepare)
