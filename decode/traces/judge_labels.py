"""Labels for a judge: which of the draft's tokens change nothing about the answer.

    draftsmith judge-labels target=TARGET drafter=DRAFTER data=train.jsonl out=FOLDER
    draftsmith judge-labels target=TARGET marked=answers.jsonl out=FOLDER

Tried out, one by one, as in AutoJudge (arXiv 2504.20039): the answer begins as the target's greedy
one. From the left, at each token where the draft would write another one after the answer so far,
the draft's token is put in and the target finishes the answer greedily. If it still ends in the
right number the token does no harm (kept) and the new answer is gone on with; else the old one
stays. `data` has questions whose answers end in #### and a number; its training side is asked, and
only questions are used whose own answer is right.

Or marked by people: a line of `marked` has {"question", "answer"} (or {"prompt", "completion"})
and, where the answer is wrong, "error": [first, end] in characters of it. What comes before is
kept, the error isn't, and what follows from it is left out (Bachmann et al., arXiv 2501.19309).

The rows go into a trace folder of kind "judge" (`decode/traces/store.py`): prompt, position, token,
kept, and the target's state after its final norm at the token. An interrupted run goes on; one with
a larger limit adds to what is there.

Shapes: B answers, T positions, H width of the target's states, U of the taps', V vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import parse
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.answers import MARK, final_number
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.store import TraceWriter, made_by, read_traces
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.taps import target_states
from draftsmith.models.target import TargetSpec
from draftsmith.progress import watched

Columns = dict[str, Tensor]
LabelRow = tuple[int, int, bool, Tensor]  # position, token, kept, state
SHARD_ROWS = 4096  # of a shard: what an interrupted run loses
# What rows are made of.
DECIDE = ("data", "marked", "seed", "max_new_tokens", "dtype", "thinking", "template_kwargs")


@dataclass
class Answer:
    """An answer under change. right: the number to end in; checked: its tokens looked at."""

    index: int
    prompt: list[int]
    right: Decimal
    tokens: list[int]
    checked: int = 0
    rows: list[LabelRow] = field(default_factory=list)


@dataclass(eq=False)
class Miner:
    """Tries the tokens of one drafter. ValueError for one without a choice at every position."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    batch_size: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.drafter.remembers or not self.drafter.samples:
            raise ValueError(
                f"drafter: got one of kind {self.drafter.kind}, expected one that has a choice at "
                "every position of a text; what is looked up has none"
            )
        self.params = SamplingParams(max_new_tokens=self.max_new_tokens)
        self.decoder = Decoder(self.target, self.tokenizer, batch_size=self.batch_size)

    def mine(self, rows: Sequence[tuple[int, Row]]) -> Iterator[tuple[int, Columns]]:
        """(index, label rows) of each question; none where the target's own answer is wrong."""
        for start in range(0, len(rows), self.batch_size):
            group = rows[start : start + self.batch_size]
            prompts = [prompt_ids(row, self.tokenizer) for _, row in group]
            written = self.decoder.generate(prompts, self.params)
            answers = []
            for (index, row), prompt, made in zip(group, prompts, written, strict=True):
                right = final_number(row.completion)
                if right is not None and self.ends_in(made.tokens, right):
                    answers.append(Answer(index, prompt, right, made.tokens))
            while busy := self.next_choices(answers):
                self.try_out(busy)
            found = {answer.index: answer.rows for answer in answers}
            for index, _ in group:
                yield index, as_columns(found.get(index, []))

    def next_choices(self, answers: Sequence[Answer]) -> list[tuple[Answer, int]]:
        """The answers with a token left, at `checked`, where the draft would write this one."""
        most = self.max_new_tokens
        left = [a for a in answers if a.checked < min(len(a.tokens), most)]
        if not left:
            return []
        with torch.inference_mode():
            ids_BT = padded([a.prompt + a.tokens for a in left], self.target.device)
            taps_BTU = target_states(self.target, self.drafter.taps, input_ids=ids_BT).taps_BTF
            q_logits_BTV = self.drafter.teacher_logits(ids_BT, taps_BTU)
            assert q_logits_BTV is not None, f"a drafter of kind {self.drafter.kind} has no q"
            choices = q_logits_BTV.argmax(-1).tolist()
        busy = []
        for answer, choice in zip(left, choices, strict=True):
            own = choice[len(answer.prompt) - 1 :]
            end = min(len(answer.tokens), most)
            places = range(answer.checked, end)
            answer.checked = next((i for i in places if own[i] != answer.tokens[i]), end)
            if answer.checked < end:
                busy.append((answer, own[answer.checked]))
        return busy

    def try_out(self, busy: Sequence[tuple[Answer, int]]) -> None:
        """Put each token in, finish the answers, and keep those that end in the right number."""
        begun = [[*a.tokens[: a.checked], token] for a, token in busy]
        texts = [a.prompt + start for (a, _), start in zip(busy, begun, strict=True)]
        states_BTH = states(self.target, texts)
        going = [i for i, (_, token) in enumerate(busy) if token not in self.decoder.eos_ids]
        room = SamplingParams(max_new_tokens=max(1, self.max_new_tokens - min(map(len, begun))))
        made = self.decoder.generate([texts[i] for i in going], room)
        for i, completion in zip(going, made, strict=True):
            # The shortest decides how far all go: an answer doesn't depend on those beside it.
            begun[i] = [*begun[i], *completion.tokens][: self.max_new_tokens]
        for (answer, token), tokens, state_TH in zip(busy, begun, states_BTH, strict=True):
            at = len(answer.prompt) + answer.checked
            kept = self.ends_in(tokens, answer.right)
            answer.rows.append((at, token, kept, state_TH[at]))
            answer.checked += 1
            if kept:
                answer.tokens = tokens

    def ends_in(self, tokens: Sequence[int], right: Decimal) -> bool:
        """Whether an answer is finished and its number right."""
        if tokens[-1] not in self.decoder.eos_ids:
            return False
        return final_number(str(self.tokenizer.decode(list(tokens[:-1])))) == right


@torch.inference_mode()
def states(target: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """The target's states after the final norm, [B, T, H]; what is past a text's end is garbage."""
    return target_states(target, (), input_ids=padded(texts, target.device)).norm_BTG


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Texts as [B, T], padded on the right, where nothing before sees it."""
    return pad_sequence([torch.tensor(text, device=device) for text in texts], batch_first=True)


def as_columns(rows: Sequence[LabelRow]) -> Columns:
    """Label rows as a trace's columns; none of none."""
    if not rows:
        return {}
    positions, tokens, kept, states = zip(*rows, strict=True)
    return {
        "position": torch.tensor(positions, dtype=torch.int32),
        "token": torch.tensor(tokens, dtype=torch.int32),
        "kept": torch.tensor(kept),
        "target_state": torch.stack(states).to("cpu", torch.bfloat16),
    }


@dataclass
class Labels:
    """Exactly one of data and marked; marked needs no drafter."""

    target: str
    drafter: str = ""
    data: str = ""  # rows of question and answer, of which the training side is used
    marked: str = ""  # JSONL of answers marked by people
    out: str = "runs/judge/labels"
    limit: int | None = 400  # questions, drawn by the seed; none: all
    seed: int = 0
    max_new_tokens: int = 256
    batch_size: int = 64
    thinking: bool | None = None
    template_kwargs: str = ""
    max_gb: float = 2.0  # of the folder
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.marked) or bool(self.data) != bool(self.drafter):
            raise ValueError(
                f"got data={self.data!r} marked={self.marked!r} drafter={self.drafter!r}, expected "
                "data=... with drafter=..., or marked=... alone"
            )


def main(argv: list[str]) -> None:
    print(label(parse(Labels, argv)))


def label(settings: Labels) -> str:
    """Write the rows of one source; in words, how many there are of which."""
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_decoded(spec, settings.device)
    set_template(tokenizer, settings.thinking, settings.template_kwargs)
    drafter, miner = load_drafter(settings.drafter or None, target, tokenizer), None
    if drafter is not None:
        miner = Miner(target, tokenizer, drafter, settings.batch_size, settings.max_new_tokens)
    about: dict[str, Any] = {
        "kind": "judge",
        "target": fingerprint(target, tokenizer),
        "drafter": drafter and made_by(settings.drafter, drafter),
        "settings": {name: getattr(settings, name) for name in DECIDE},
    }
    room = int(settings.max_gb * 1e9)
    writer = TraceWriter(Path(settings.out), about, room, SHARD_ROWS)
    rows = load_rows(settings.marked, "all") if miner is None else questions(settings)
    todo = [(index, row) for index, row in enumerate(rows) if index not in writer.done]
    found = labelled(target, tokenizer, todo) if miner is None else miner.mine(todo)
    try:
        for index, columns in watched(found, "labels", len(todo)):
            writer.add(index, columns)
            if writer.full:
                break
    finally:
        writer.close()
    kept = read_traces(settings.out, ["kept"]).columns["kept"]
    full = " (full: max_gb)" if writer.full else ""
    return (
        f"{settings.out}: {len(kept):,} tokens from {len(writer.done):,} prompts{full}, of which "
        f"{int(kept.sum()):,} do no harm and {int((~kept).sum()):,} do"
    )


def questions(settings: Labels) -> list[Row]:
    """Questions of the training side with a number as their answer, drawn by the seed."""
    rows = [row for row in load_rows(settings.data, "train") if MARK in row.completion]
    if not rows:
        raise ValueError(
            f"data: got {settings.data!r} without an answer that ends in {MARK} and a number, "
            "expected questions with such answers, as GSM8K has them"
        )
    random.Random(settings.seed).shuffle(rows)
    return rows[: settings.limit]


def labelled(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[int, Row]]
) -> Iterator[tuple[int, Columns]]:
    """(index, label rows) of each marked answer, without what follows the error."""
    for index, row in rows:
        if not row.completion:
            raise ValueError(
                f"{row.where}: got a row of kind {row.kind} without an answer, expected "
                '{"question", "answer"} or {"prompt", "completion"}, with "error" where it is wrong'
            )
        prompt = prompt_ids(row, tokenizer)
        made = tokenizer(row.completion, add_special_tokens=False, return_offsets_mapping=True)
        first, end = row.error or (len(row.completion), len(row.completion))
        spans = [span for span in made["offset_mapping"] if span[0] < end]
        tokens = made["input_ids"][: len(spans)]
        state_TH = states(target, [prompt + tokens])[0, len(prompt) :]
        rows_of = zip(tokens, (span[1] <= first for span in spans), state_TH, strict=True)
        yield index, as_columns([(len(prompt) + i, *own) for i, own in enumerate(rows_of)])
