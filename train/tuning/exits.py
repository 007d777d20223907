"""Early exits of a model: its first E layers, its own final norm and LM head predict the next token
too, so that `drafter=exit:E` drafts with them. LayerSkip (Elhoushi et al., arXiv 2404.16710):

    loss = sum_E w_E sum_t -log head(norm(h_E,t))[x_{t+1}],   sum_E w_E = 1, the last layer in it
    w_E ~ scale (E_1 + ... + E) over the exits of the step;   1 at the last in the place of scale
    layer l is left out of a row with p_l = dropout (2^(l / (L - 1)) - 1): never the first

Exits of a step, beside the last layer: `rotational` every R-th, shifted by one each step; `gradual`
all from the last down, at the middle of the run all of them; `none` all. Equal weights over a few
exits without dropout are sorted fine-tuning, which S2D (2407.01955) makes drafts with.

Shapes: B rows, T positions, N = B * T, X exits with the last layer, L layers, H hidden.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.command import check_one_of
from draftsmith.models.fingerprint import final_norm
from draftsmith.models.taps import decoder_layers, watching
from draftsmith.models.target import check_split, cut_rows, output_head, unwrapped, without_bias
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_divergence
from draftsmith.train.losses.pure import agreement
from draftsmith.train.run.loop import Counting, StepOutput
from draftsmith.train.text.batches import Batch

CURRICULA, WEIGHTS = ("rotational", "gradual", "none"), ("depth", "equal")


@dataclass(kw_only=True)
class Exits:
    """The group `exits` of a recipe."""

    draft: int = 0  # E of the `exit:E` that figures are taken with; 0: half of the layers
    layers: list[int] = field(default_factory=list)  # after which a loss is taken; empty: each
    weights: str = "depth"  # depth | equal
    scale: float = 1.0  # of the weights of all but the last layer
    curriculum: str = "rotational"  # rotational | gradual | none
    every: int = 4  # R of rotational
    dropout: float = 0.1  # of the last layer; 0: none

    def __post_init__(self) -> None:
        check_one_of("exits.curriculum", self.curriculum, CURRICULA)
        check_one_of("exits.weights", self.weights, WEIGHTS)
        if not 0 <= self.dropout < 1 or self.scale < 0 or self.every < 1:
            raise ValueError(
                f"exits: got dropout={self.dropout}, scale={self.scale}, every={self.every}, "
                "expected a share below 1, a weight of 0 or more, and 1 or more"
            )


class ExitObjective(Counting):
    """The loss of all exits in one sweep over the vocabulary. Metrics: `last`, the last layer's
    cross-entropy; in `measure` the loss is that, and `agreement` and `alpha` are the exit's that
    drafts with the last layer. steps: of the run.

    ValueError for exits that the model hasn't, and one whose layers, final norm or logits can't be
    told apart. Copy the model before it comes here: its layers get hooks.
    """

    def __init__(self, model: PreTrainedModel, how: Exits, *, steps: int, vocab_size: int) -> None:
        super().__init__()
        check_split(model)
        self.model, self.how, self.steps, self.vocab_size = model, how, steps, vocab_size
        layers, norms = decoder_layers(model), final_norm(unwrapped(model))
        self.depth = depth = len(layers)
        self.draft = how.draft or max(1, depth // 2)
        wrong = [exit for exit in (*how.layers, self.draft) if not 0 < exit < max(2, depth)]
        if wrong or not norms:
            raise ValueError(
                f"exits: got {wrong or type(model).__name__}, expected exits after 1 to "
                f"{depth - 1} of this model's {depth} layers, and a norm before its LM head"
            )
        self._norm = (norms[0],)  # a part of the model already
        self._kept_LB: Tensor | None = None
        if how.dropout:
            for index, layer in enumerate(layers):
                layer.register_forward_hook(self._left_out(index), with_kwargs=True)

    @property
    def drafter(self) -> str:
        """Its name for `evaluate` and `serve`."""
        return f"exit:{self.draft}"

    @property
    def stages(self) -> list[int]:
        """Steps that hold most: the planner looks at them."""
        return [0, self.steps - 1]

    def chosen(self, step: int) -> list[int]:
        """The exits of a step, the last layer at their end."""
        exits = sorted(set(self.how.layers)) or list(range(1, self.depth))
        if self.how.curriculum == "rotational":
            exits = [e for i, e in enumerate(exits) if (i - step) % self.how.every == 0]
        elif self.how.curriculum == "gradual":
            done = 2 * step / max(1, self.steps - 1)
            exits = [e for e in exits if done >= (self.depth - e + 1) / self.depth]
        return [*exits, self.depth]

    def shares(self, exits: list[int]) -> Tensor:
        """w_X of these exits, which sum to 1."""
        w_X = torch.tensor(exits).cumsum(0).float()
        w_X = w_X if self.how.weights == "depth" else torch.ones_like(w_X)
        w_X[:-1] *= self.how.scale
        return w_X / w_X.sum()

    def forward(self, batch: Batch) -> StepOutput:
        exits, mask_N = self.chosen(int(self.steps_done)), batch.loss_mask.flatten()
        if self.training and self.how.dropout:
            rates_L = self.how.dropout * (torch.linspace(0, 1, self.depth).exp2() - 1)
            drawn_LB = torch.rand(self.depth, len(batch.input_ids), device=mask_N.device)
            self._kept_LB = drawn_LB >= rates_L.to(mask_N.device)[:, None]
        hidden_MH, head_VH = self._states(batch, exits)
        weight_XN = self.shares(exits).to(mask_N.device)[:, None] * mask_N
        next_M = batch.input_ids.roll(-1, 1).flatten().repeat(len(exits))
        loss, loss_M = chunked_cross_entropy(hidden_MH, head_VH, next_M, weight_XN.flatten())
        last = loss_M[-len(mask_N) :].sum()
        return StepOutput(loss, mask_N.sum(), {"last": last})

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """Of the last layer, and how the exit that drafts agrees with it."""
        weight_N = batch.loss_mask.flatten().float()
        hidden_MH, head_VH = self._states(batch, [self.draft, self.depth])
        exit_NH, last_NH = hidden_MH.chunk(2)
        next_N = batch.input_ids.roll(-1, 1).flatten()
        loss, _ = chunked_cross_entropy(last_NH, head_VH, next_N, weight_N)
        found = chunked_divergence(agreement, exit_NH, head_VH, last_NH, head_VH, weight_N)
        metrics = {"agreement": found.total, "alpha": found.alpha_N.sum()}
        return StepOutput(loss, batch.loss_mask.sum(), metrics)

    def _states(self, batch: Batch, exits: list[int]) -> tuple[Tensor, Tensor]:
        """What the LM head multiplies at each exit, one exit's N rows after the other's; the head.
        The last exit is the last layer.
        """
        if not self.training:
            self._kept_LB = None
        (body, head_VH, bias_V), (norm,) = output_head(self.model), self._norm
        taken: dict[int, Tensor | None] = dict.fromkeys(exits[:-1])
        with watching(self.model, taken):
            last_BTH = body(**batch.inputs, use_cache=False).last_hidden_state
        states = [*(norm(taken[exit]) for exit in exits[:-1]), last_BTH]
        hidden_MH = torch.cat([state_BTH.flatten(0, 1) for state_BTH in states])
        hidden_MH, head_VH = without_bias(hidden_MH, head_VH, bias_V)
        return hidden_MH, cut_rows(head_VH, self.vocab_size)

    def _left_out(self, index: int) -> Any:
        """A hook of layer `index`. It stays, for layers that run again in the backward."""

        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if self._kept_LB is None:
                return output
            before_BTH = args[0] if args else kwargs["hidden_states"]
            after_BTH, *rest = output if isinstance(output, tuple) else (output,)
            made = torch.where(self._kept_LB[index, :, None, None], after_BTH, before_BTH)
            return (made, *rest) if isinstance(output, tuple) else made

        return hook
