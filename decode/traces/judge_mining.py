"""Which of the draft's tokens change nothing about the answer: tried out, one by one.

As in AutoJudge (arXiv 2504.20039), the answer begins as the target's greedy one. From the left, at
each token where the draft would write another one after the answer so far, the draft's token is put
in and the target finishes the answer greedily. If it still ends in the right number the token does
no harm (kept) and the new answer is gone on with; else the old one stays. Only questions are used
whose own answer is right.

Shapes: B answers, T positions, X label rows, H width of the target's states, U of the taps', V
vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.tasks import final_number
from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.taps import target_states

Columns = dict[str, Tensor]
NOTHING = {"token": torch.empty(0)}  # of a prompt that gave no rows


@dataclass
class Answer:
    """An answer under change. checked: its tokens that were looked at; right: the number to end
    in; rows: (position, token, kept, state) of what was put in.
    """

    index: int
    prompt: list[int]
    right: Decimal
    tokens: list[int]
    checked: int = 0
    rows: list[tuple[int, int, bool, Tensor]] = field(default_factory=list)

    @property
    def columns(self) -> Columns:
        """The label rows."""
        positions, tokens, kept, states = zip(*self.rows, strict=True)
        return as_columns(positions, tokens, kept, torch.stack(states))


class Miner:
    """Tries the tokens of one drafter. ValueError for one without a choice at every position."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter,
        *,
        batch: int,
        max_new_tokens: int,
    ) -> None:
        if not drafter.samples:
            raise ValueError(
                f"drafter: got one of kind {drafter.kind}, expected one that has a choice at every "
                "position; prompt lookup has none"
            )
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.batch, self.most = batch, max_new_tokens
        self.params = SamplingParams(max_new_tokens=self.most)
        self.decoder = Decoder(target, tokenizer, batch_size=batch)

    def mine(self, rows: Sequence[tuple[int, Row]]) -> Iterator[tuple[int, Columns]]:
        """(index, label rows) of each question; none where the target's own answer is wrong."""
        for start in range(0, len(rows), self.batch):
            group = rows[start : start + self.batch]
            prompts = [prompt_ids(row, self.tokenizer) for _, row in group]
            answers = []
            written = self.decoder.generate(prompts, self.params)
            for (index, row), prompt, made in zip(group, prompts, written, strict=True):
                right = final_number(row.completion)
                if right is not None and self.ends_in(made.tokens, right):
                    answers.append(Answer(index, prompt, right, made.tokens))
            while busy := self.next_choices(answers):
                self.try_out(busy)
            found = {answer.index: answer.columns for answer in answers if answer.rows}
            for index, _ in group:
                yield index, found.get(index, NOTHING)

    def next_choices(self, answers: Sequence[Answer]) -> list[tuple[Answer, int]]:
        """Each answer that has a next token where the draft would write another one, with that
        one; `checked` is the token's place.
        """
        left = [a for a in answers if a.checked < min(len(a.tokens), self.most)]
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
            places = range(answer.checked, min(len(answer.tokens), self.most))
            at = next((i for i in places if own[i] != answer.tokens[i]), None)
            answer.checked = len(answer.tokens) if at is None else at
            if at is not None:
                busy.append((answer, own[at]))
        return busy

    def try_out(self, busy: Sequence[tuple[Answer, int]]) -> None:
        """Put each token in, finish the answers, and keep those that end in the right number."""
        begun = [[*a.tokens[: a.checked], token] for a, token in busy]
        texts = [a.prompt + start for (a, _), start in zip(busy, begun, strict=True)]
        states_BTH = states(self.target, texts)
        going = [i for i, (_, token) in enumerate(busy) if token not in self.decoder.eos_ids]
        room = SamplingParams(max_new_tokens=max(1, self.most - min(map(len, begun))))
        made = self.decoder.generate([texts[i] for i in going], room)
        for i, completion in zip(going, made, strict=True):
            # The shortest decides how far all go: an answer doesn't depend on those beside it.
            begun[i] = [*begun[i], *completion.tokens][: self.most]
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
    width = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=device)


def as_columns(
    positions: Sequence[int], tokens: Sequence[int], kept: Sequence[bool], state_XH: Tensor
) -> Columns:
    """Label rows as a trace's columns."""
    return {
        "position": torch.tensor(positions, dtype=torch.int32),
        "token": torch.tensor(tokens, dtype=torch.int32),
        "kept": torch.tensor(kept),
        "target_state": state_XH.to("cpu", torch.bfloat16),
    }
