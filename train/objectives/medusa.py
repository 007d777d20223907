"""What Medusa heads (Cai et al., arXiv 2401.10774) are trained for: in Medusa-1 each reads the
target's state alone; Medusa-2 trains them and LoRA adapters of their target together.

    loss = sum_t KL(p0_t || p_t) + lambda * sin(pi / 2 * step / steps) * (the heads' loss)

p0 is the target as it was, which is the same model with its adapters off: self-distillation keeps
it what it is while its states become easier to read. The heads read, and their gradient changes,
the adapted states.

Legend: B rows, T positions, N = B * T, H hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.target import cut_rows, head_weight
from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.objectives.distillation import hidden_and_head
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.run.loop import Counting, StepOutput
from draftsmith.train.run.lora import Lora, with_lora
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch


class MedusaObjective(HeadObjective):
    head: Medusa
    options = ("head.own_heads", "joint.enabled")

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Medusa:
        (rows, hidden), asked = head_weight(target).shape, recipe.head
        return Medusa(MedusaConfig(hidden, rows, asked.heads, asked.layers, asked.own_heads))

    def drafted(self, batch: Batch, norm_BTH: Tensor) -> list[Tensor]:
        return self.head.states(norm_BTH)


@dataclass(kw_only=True)
class JointTraining:
    """The group `joint` of a recipe: Medusa-2."""

    enabled: bool = False
    head_weight: float = 0.01  # lambda
    head_lr_scale: float = 4.0  # how much faster the heads learn


class JointMedusa(MedusaObjective, Counting):
    """The loss of heads and adapters, which alone of the target are part of this module's state.
    Metrics have the sum `base_kl` too. how: loss and decay of the heads.
    """

    def __init__(
        self,
        head: Medusa,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        joint: JointTraining,
        lora: Lora,
        settings: Settings,
        **how: Any,
    ) -> None:
        states = OnlineTaps(target, head.taps)  # not used: those here carry a gradient
        super().__init__(head, target, tokenizer, states, **how)
        if lora.rank < 1:
            raise ValueError(f"lora.rank: got {lora.rank}, expected 1 or more with joint=true")
        if settings.gradient_checkpointing:
            target.gradient_checkpointing_enable({"use_reentrant": False})
        adapted: Any = with_lora(target, lora, given=True, seed=settings.seed)
        self.joint, self.steps, self._adapted = joint, settings.steps, (adapted,)
        layers = [module for module in adapted.modules() if hasattr(module, "lora_dropout")]
        self.adapters = nn.ModuleList(
            part for of in layers for part in (of.lora_A, of.lora_B, of.lora_dropout)
        )
        held = sum(p.numel() for p in self.adapters.parameters())
        wanted = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert held == wanted > 0, f"adapters of {held} weights found, the model trains {wanted}"

    @property
    def lr_scales(self) -> dict[str, float]:
        return {"head": self.joint.head_lr_scale}

    def train(self, mode: bool = True) -> "JointMedusa":
        """Also the target, which is no submodule, for its adapters' dropout."""
        super().train(mode)
        self._adapted[0].train(mode)
        return self

    def forward(self, batch: Batch, *, fully: bool = False) -> StepOutput:
        adapted, target = self._adapted[0], self.target
        adapted.eval()
        with torch.no_grad(), adapted.disable_adapter():
            before_NH, _ = hidden_and_head(target, batch)
        adapted.train(self.training)
        after_NH, _ = hidden_and_head(target, batch)
        head_VH = cut_rows(head_weight(target), self.vocab_size)
        weight_N = batch.loss_mask.flatten().float()
        base = chunked_divergence(forward_kl, after_NH, head_VH, before_NH, head_VH, weight_N).total
        after_BTH = after_NH.unflatten(0, batch.input_ids.shape)
        heads = self.score(batch, after_BTH, after_BTH, fully=fully)
        ramp = torch.sin(0.5 * math.pi * (self.steps_done / self.steps).clamp(max=1.0))
        total = base + self.joint.head_weight * ramp * heads.loss
        return StepOutput(total, heads.tokens, heads.metrics | {"base_kl": base.detach()})

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        return self.forward(batch, fully=True)

    def merged(self) -> PreTrainedModel:
        """The target with the adapters added to its weights, which ends the training."""
        return self._adapted[0].merge_and_unload()
