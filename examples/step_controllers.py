"""Two models write one answer, a step at a time. LOSSY: an answer is neither model's own.

    python examples/step_controllers.py target=LARGE small=SMALL prompts=arithmetic steps=sentence

SpecReason (Pan et al., arXiv 2504.07891): the small model writes a step, the large one marks it
from 0 to 9; under `least` it writes the step itself. Speculative Thinking (Yang et al., arXiv
2504.12329): the small model looks some tokens ahead; where it says one of the words `unsure`, the
large one goes on in its place. Both models alone stand beside them: accuracy by exact match, time,
and how many tokens each model wrote, those that were dropped included. The large model may have a
drafter of its own, which changes no answer.

Where we differ: marks are the large model's geometric mean probability of the step (`mark=
probability`), which needs no instruction-tuned model, or as in the paper the digit that it answers
(`mark=digit`). Steps end where the text says so and begin with all text read anew: the decoder has
no cut of a row's keys and values, which a server's prefix cache makes cheap. Of Speculative
Thinking the hand-over by words, the verification and the recap after many doubts are here; a step's
look-ahead is dropped where the large model takes over.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith import Decoder, SamplingParams, load_drafter
from draftsmith.command import check_least, parse, run_command
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.evaluate.answers import final_number, known_answer
from draftsmith.decode.prompts.prompts import Prompt, load_prompts
from draftsmith.models.target import TargetSpec
from draftsmith.printed import number, print_table

ENDS = {"paragraph": ("\n\n",), "sentence": (".", "\n")}
PROBE = "\n\nHow good is the last step of this reasoning, from 0 to 9? Answer with one digit: "
RECAP = "\n\nLet me sum up what is known so far.\n\n"


@dataclass
class Controlled:
    """Which models, on what, and how they share the work."""

    target: str  # the large model
    small: str
    drafter: str = "none"  # the large model's
    prompts: str = "arithmetic"
    split: str = "report"
    limit: int = 50
    steps: str = "paragraph"  # where a step ends: paragraph | sentence
    max_new_tokens: int = 512
    step_tokens: int = 128  # of a step at most
    temperature: float = 0.0
    seed: int = 0
    mark: str = "probability"  # SpecReason's | digit
    least: int = 7  # mark of a step that is kept
    # Speculative Thinking's: words, tokens looked ahead, and what the large model then writes.
    unsure: list[str] = field(default_factory=lambda: ["wait", "alternatively", "hmm", "hold on"])
    verify: list[str] = field(default_factory=lambda: ["verify", "double-check", "check again"])
    ahead: int = 20
    short: int = 20
    long: int = 125
    doubts: int = 15  # until a recap
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_least(self, limit=1, max_new_tokens=1, step_tokens=1, ahead=1, short=1, long=1)
        if self.steps not in ENDS or self.mark not in ("probability", "digit"):
            raise ValueError(
                f"got steps={self.steps} mark={self.mark}, expected steps={' or '.join(ENDS)} and "
                "mark=probability or digit"
            )


class Writer:
    """A model and an account of it: tokens written, seconds. drafter: a folder, or none."""

    def __init__(self, path: str, how: Controlled, drafter: str = "none") -> None:
        self.how = how
        self.model, self.tokenizer = load_decoded(TargetSpec(path, dtype=how.dtype), how.device)
        loaded = load_drafter(drafter, self.model, self.tokenizer)
        self.decoder = Decoder(self.model, self.tokenizer, loaded, batch_size=1)
        self.tokens, self.seconds = 0, 0.0

    def write(self, ids: Sequence[int], index: int, limit: int, step: bool = True) -> list[int]:
        """What the model writes after `ids`, to the end of a step, of the answer, or the limit."""
        limit = min(limit, self.decoder.context - len(ids))
        how, started = self.how, time.perf_counter()
        stop = ENDS[how.steps] if step else ()
        params = SamplingParams(how.temperature, max_new_tokens=limit, seed=how.seed, stop=stop)
        # The noise is that of a request and a place, so steps join to the answer in one go.
        (made,) = self.decoder.generate([ids], params, [index])
        self.tokens += len(made.tokens)
        self.seconds += time.perf_counter() - started
        return made.tokens

    @torch.inference_mode()
    def mark(self, ids: Sequence[int], step: list[int]) -> int:
        """How good a step is after `ids`, 0 to 9."""
        if self.how.mark == "digit":
            probe = self.tokenizer(PROBE, add_special_tokens=False).input_ids
            said = str(self.tokenizer.decode(self.write([*ids, *step, *probe], 0, 1, step=False)))
            return int(said) if said.strip() in [*"0123456789"] else 0
        started = time.perf_counter()
        ids_1T = torch.tensor([[*ids, *step]], device=self.model.device)
        log_p_TV = self.model(ids_1T).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        mean = log_p_TV.gather(1, ids_1T[0, len(ids) :, None]).mean().exp()
        self.seconds += time.perf_counter() - started
        return min(9, int(10 * mean))

    def ended(self, tokens: list[int]) -> bool:
        """Whether an answer is over."""
        return tokens[-1] in self.decoder.eos_ids


def room(small: Writer, large: Writer, prompt: list[int], text: list[int]) -> int:
    """Tokens that may still be written after `text`; some are left for what a mark is asked by."""
    context = min(small.decoder.context, large.decoder.context) - 64
    return min(small.how.max_new_tokens + len(prompt), context) - len(text)


# (small, large, the prompt's tokens, its number) -> the answer's tokens
Controller = Callable[[Writer, Writer, list[int], int], list[int]]


def small_alone(small: Writer, large: Writer, prompt: list[int], index: int) -> list[int]:
    return small.write(prompt, index, small.how.max_new_tokens, step=False)


def large_alone(small: Writer, large: Writer, prompt: list[int], index: int) -> list[int]:
    return large.write(prompt, index, large.how.max_new_tokens, step=False)


def spec_reason(small: Writer, large: Writer, prompt: list[int], index: int) -> list[int]:
    """A step of the small model that the large one marks too low is written by the large one."""
    how, text, steps = small.how, list(prompt), set[tuple[int, ...]]()
    while (left := room(small, large, prompt, text)) > 0:
        step = small.write(text, index, min(left, how.step_tokens))
        if large.mark(text, step) < how.least:
            step = large.write(text, index, min(left, how.step_tokens))
        text += step
        if large.ended(text) or tuple(step) in steps:  # one that repeats goes round in circles
            break
        steps.add(tuple(step))
    return text[len(prompt) :]


def speculative_thinking(small: Writer, large: Writer, prompt: list[int], index: int) -> list[int]:
    """Where the small model's next words sound unsure, the large one writes on in their place."""
    how, text, doubts = small.how, list(prompt), 0
    recap = small.tokenizer(RECAP, add_special_tokens=False).input_ids
    while (left := room(small, large, prompt, text)) > 0:
        ahead = small.write(text, index, min(left, how.ahead))
        said, whole = str(small.tokenizer.decode(ahead)).lower(), len(ahead) < how.ahead
        unsure = any(word.lower() in said for word in how.unsure)
        verify = any(word.lower() in said for word in how.verify)
        doubts += unsure
        if unsure and doubts > how.doubts and left > len(recap) + 1:
            text, doubts, verify = text + recap, 0, True
            left -= len(recap)
        if unsure or verify:
            limit = how.long if verify else how.short
            ahead, whole = large.write(text, index, min(left, limit), step=False), False
        text += ahead
        if not whole and not large.ended(text) and left > len(ahead):  # to the end of the step
            text += small.write(text, index, min(left - len(ahead), how.step_tokens))
        if large.ended(text):
            break
    return text[len(prompt) :]


CONTROLLERS: dict[str, Controller] = {
    "small alone": small_alone,
    "SpecReason": spec_reason,
    "Speculative Thinking": speculative_thinking,
    "large alone": large_alone,
}


def right(prompt: Prompt, answer: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    text = str(tokenizer.decode(answer, skip_special_tokens=True))
    return final_number(text) == known_answer(prompt)


def main(argv: list[str]) -> None:
    how = parse(Controlled, argv)
    small, large = Writer(how.small, how), Writer(how.target, how, how.drafter)
    if small.tokenizer.get_vocab() != large.tokenizer.get_vocab():
        raise ValueError(f"small: got {how.small} of another tokenizer than {how.target}; give one")
    prompts = load_prompts(how.prompts, large.tokenizer, limit=how.limit, split=how.split)
    rows = []
    for name, control in CONTROLLERS.items():
        for writer in (small, large):
            writer.tokens, writer.seconds = 0, 0.0
        answers = [control(small, large, prompt.tokens, prompt.index) for prompt in prompts]
        pairs = zip(prompts, answers, strict=True)
        share = sum(right(*pair, large.tokenizer) for pair in pairs) / len(prompts)
        length, seconds = sum(map(len, answers)), small.seconds + large.seconds
        told = (share, length / len(prompts), 1000 * seconds / length)
        rows.append((name, *map(number, told), *map(str, (small.tokens, large.tokens))))
    head = ("answers", "right", "tokens each", "ms a token", "by the small", "by the large")
    print_table(head, rows, title=f"{len(prompts)} prompts; LOSSY but the two alone")


if __name__ == "__main__":
    run_command(main, Controlled)
