"""The text of a training run: a corpus, the target's answers, or what the draft writes itself.

Legend: B rows, T positions.
"""

import copy
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import recast
from draftsmith.train.run.loop import step_seed
from draftsmith.train.run.settings import Settings
from draftsmith.train.run.sharding import whole_state
from draftsmith.train.text.batches import Batch, Batches, Examples, batch_of
from draftsmith.train.text.prepared import is_prepared
from draftsmith.train.text.tokenise import load_examples, tokenise

Module = TypeVar("Module", bound=nn.Module)


@dataclass(kw_only=True)
class Text:
    """The group `text` of a recipe."""

    max_length: int = 256  # tokens of a sequence
    packing: bool = True  # several documents a sequence, which don't see one another
    # Of chats: the switch of a thinking model's template; none: as the template does by itself.
    thinking: bool | None = None
    template_kwargs: str = ""  # JSON of other names that the chat template reads


@dataclass(kw_only=True)
class OnPolicyText:
    """The group `on_policy` of a recipe: text that the draft writes itself, which isn't packed."""

    share: float = 0.0  # lambda: of the steps
    temperature: float = 1.0  # the papers' value, whatever temperature is distilled for
    prompt_tokens: int = 32  # of a document, where an answer to it is wanted
    max_new_tokens: int = 128


class Snapshot(Generic[Module]):
    """A copy of a model in training to decode with: in eval mode, frozen, in a dtype of its own."""

    def __init__(self, model: Module, dtype: torch.dtype) -> None:
        self._source = model
        self._copy = copy.deepcopy(model).eval().requires_grad_(False)
        recast(self._copy, dtype)

    @torch.no_grad()
    def take(self) -> Module:
        """The copy, with the weights that the model has now. All processes call it together."""
        self._copy.load_state_dict(whole_state(self._source))
        return self._copy


@dataclass(eq=False)
class OnPolicy:
    """`batches` (one example a row), of which the draft rewrites the answers at a share of the
    steps; a prompt is what comes before the first trained token, of a document its first
    `prompt_tokens`. One draw a step decides for all processes and micro-batches. The answers are a
    function of the draft's weights and (seed, step, micro, rank).
    """

    asked: OnPolicyText
    batches: Batches
    draft: Snapshot[PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase

    chooses = "on_policy"

    def amount(self, steps: int, size: int) -> str:
        """As of `Batches`: of the text whose answers the draft rewrites."""
        return self.batches.amount(steps, size)

    def __post_init__(self) -> None:
        share, prompt, length = self.asked.share, self.asked.prompt_tokens, self.batches.max_length
        if not 0 < share <= 1:
            raise ValueError(f"on_policy.share: got {share}, expected a share in [0, 1]")
        if prompt >= length:
            raise ValueError(
                f"on_policy.prompt_tokens: got {prompt}, expected fewer than text.max_length="
                f"{length}, so that there is room for an answer"
            )
        assert not self.batches.packing, "a packed row has several prompts"
        self._decoder: Decoder | None = None

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        written = self.batches.batch(step, micro, rank, accumulation=accumulation, world=world)
        if np.random.default_rng((self.batches.seed, step)).random() >= self.asked.share:
            return written
        return self._rewrite(written, step_seed(self.batches.seed, step, micro, rank))

    def _rewrite(self, written: Batch, seed: int) -> Batch:
        pairs = zip(written.input_ids, written.loss_mask, strict=True)
        prompts = [prompt_of(*pair, self.asked.prompt_tokens) for pair in pairs]
        room = self.batches.max_length - max(map(len, prompts))
        long = min(self.asked.max_new_tokens, room)
        params = SamplingParams(self.asked.temperature, max_new_tokens=long, seed=seed)
        draft = self.draft.take()
        if self._decoder is None:
            # Kept: the copy's weights change in place, and what a GPU has compiled stays good.
            self._decoder = Decoder(draft, self.tokenizer, batch_size=len(prompts))
        answers = [made.tokens for made in self._decoder.generate(prompts, params)]
        return as_batch(prompts, answers, self.batches.pad_id, written.rows)


def prompt_of(ids_T: Tensor, mask_T: Tensor, prompt_tokens: int) -> list[int]:
    """The ids before a row's first trained token, or the first `prompt_tokens` of a document."""
    places = mask_T.nonzero().flatten()
    first, end = int(places[0]) + 1, int(places[-1]) + 2
    # A document is trained from its second token on, since its first can't be predicted.
    length = min(prompt_tokens, end - 1) if first == 1 else first
    return ids_T[:length].tolist()


def as_batch(
    prompts: list[list[int]], answers: list[list[int]], pad_id: int, rows: tuple[int, ...]
) -> Batch:
    """Prompts with their answers as a right-padded batch, in which the answers are trained."""
    examples = Examples.answered(zip(prompts, answers, strict=True))
    spans = [[slice(*ends)] for ends in pairwise(examples.starts.tolist())]
    return replace(batch_of(examples, spans, pad_id), rows=rows, places=None)


def text_at_hand(data: str) -> str:
    """`data` if it is on this machine, else the standard library, for a trial of a recipe."""
    if data in ("stdlib", "arithmetic", "arithmetic:plain") or Path(data).exists():
        return data
    warnings.warn(f"target.shrink: no data at {data}: the standard library instead", stacklevel=3)
    return "stdlib"


def training_examples(data: str, tokenizer: PreTrainedTokenizerBase, *, few: bool) -> Examples:
    """The training side of `data`, or the first few rows of it, for a trial of a recipe."""
    if few and not is_prepared(data):
        return tokenise(load_rows(data, "train")[:20], tokenizer)
    return load_examples(data, tokenizer, "train")


def make_batches(
    text: Text,
    settings: Settings,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    *,
    packing: bool | None = None,
) -> Batches:
    """Batches of the text as it is; packing as in the recipe, unless it is given."""
    return Batches(
        examples,
        batch_size=settings.batch_size,
        max_length=text.max_length,
        seed=settings.seed,
        packing=text.packing if packing is None else packing,
        pad_id=tokenizer.pad_token_id or 0,
    )
