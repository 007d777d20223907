"""A stream of prompts whose topic changes on the way."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.prompts import beginning, load_prompts

MIX = "mix"


class Asked(NamedTuple):
    """A prompt of the stream."""

    topic: str
    tokens: list[int]


@dataclass(kw_only=True)
class Stream:
    """The part of a recipe that says what is asked; an empty stream: what a server is asked."""

    # A JSONL file of {"prompt", "topic"}; or parts such as gsm8k:300,stdlib:1000,mix:300 (commas or
    # +), each a source and how many of its prompts; mix takes from all before it in turn.
    stream: str = ""
    sources: dict[str, str] = field(default_factory=dict)  # what names in it stand for
    part: str = "report"  # of a source: report | tune | train, see prompts.load_prompts
    prompt_tokens: int = 32  # of a document, where it is to be continued
    seed: int = 0  # of the order within a source


def read_stream(config: Stream, tokenizer: PreTrainedTokenizerBase) -> list[Asked]:
    """The prompts of a stream, in order; none comes twice.

    Raises:
        ValueError: what `load_prompts` raises, a part that can't be read, or too few prompts.
    """
    stream = config.stream
    if Path(stream).suffix == ".jsonl":
        return _read_file(Path(stream), tokenizer)
    left: dict[str, list[list[int]]] = {}
    asked: list[Asked] = []
    for words in re.split(r"[,+]", stream):
        name, _, count = words.strip().rpartition(":")
        if not name or not count.isdecimal() or (name == MIX and not left):
            raise ValueError(
                f"stream: got {words!r} in {stream!r}, expected <source>:<number of prompts>, "
                f"{MIX} after others; or a .jsonl file"
            )
        if name != MIX and name not in left:
            found = load_prompts(
                config.sources.get(name, name),
                tokenizer,
                limit=None,
                prompt_tokens=config.prompt_tokens,
                part=config.part,
            )
            order = np.random.default_rng((config.seed, len(left))).permutation(len(found))
            left[name] = [found[i].tokens for i in order]
        turns = list(left) if name == MIX else [name]
        for turn in range(int(count)):
            of = turns[turn % len(turns)]
            if not left[of]:
                raise ValueError(
                    f"stream: {of} has no prompt left for {words!r} of {stream!r}; ask for fewer"
                )
            asked.append(Asked(name, left[of].pop()))
    return asked


def _read_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Asked]:
    asked = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            asked.append(Asked(str(row["topic"]), beginning(row["prompt"], tokenizer)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number}: got {line!r:.80}, expected {{"prompt": ..., "topic": ...}}'
            ) from error
    if not asked:
        raise ValueError(f"{path} is empty, expected a prompt a line")
    return asked
