"""Optimizers and the learning rate over the steps."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import _muon

from draftsmith.models.layers.layer import OutputHead
from draftsmith.models.target import native_bf16
from draftsmith.train.run.settings import Settings

# torch's Muon orthogonalises in bf16; this rule scales its update to AdamW's size (Moonlight,
# arXiv 2502.16982), so one learning rate serves the matrices and the rest.
MUON_SCALE = "match_rms_adamw"


def optimizers(module: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """The optimizers over the trainable parameters; matrices decay, embeddings and norms don't.
    `muon` gives the hidden matrices to torch's Muon and everything else to AdamW. ValueError where
    there is nothing to train.
    """
    matrices, rest = _split(module)
    if not matrices and not rest:
        raise ValueError("nothing to train: every parameter is frozen")
    if settings.optimizer == "sgd":
        groups = _groups(module, matrices + rest)
        return [torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)]
    decayed = _groups(module, matrices, weight_decay=settings.weight_decay)
    plain = _groups(module, rest, weight_decay=0.0)
    # Fused: one pass over the memory. 8M parameters take a CPU thread 8 ms, otherwise 60 to 90.
    adamw = partial(
        torch.optim.AdamW, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True
    )
    if settings.optimizer == "adamw":
        return [adamw(decayed + plain)]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    muon = (torch.optim.Muon if native_bf16(kind) else Muon32)(
        decayed,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn=MUON_SCALE,
    )
    return [muon, *([adamw(plain)] if plain else [])]


class Muon32(torch.optim.Muon):
    """torch's Muon, that orthogonalises in fp32. Where bf16 is emulated torch's takes 7 of the 8 s
    of a step of the quickstart's target.
    """

    def step(self, closure: Any = None) -> Any:
        theirs = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = orthogonal  # type: ignore[assignment]
        try:
            return super().step(closure)
        finally:
            _muon._zeropower_via_newtonschulz = theirs


def orthogonal(grad_OI: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """Newton-Schulz steps from a gradient to the orthogonal matrix nearest to it (Jordan et al.,
    Muon, 2024), x <- a x + (b g + c g g) x with g = x x^T.
    """
    a, b, c = coefficients
    wide = grad_OI.size(0) <= grad_OI.size(1)
    x = (grad_OI if wide else grad_OI.T).float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        g = x @ x.T
        x = torch.addmm(x, torch.addmm(g, g, g, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def learning_rate(settings: Settings, step: float) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then down to lr * lr_floor."""
    if step < settings.warmup:
        return settings.lr * min(1.0, (step + 1) / settings.warmup)
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    share = SCHEDULES[settings.schedule](min(1.0, progress))
    return settings.lr * (settings.lr_floor + (1 - settings.lr_floor) * share)


def _groups(
    module: nn.Module, parameters: list[nn.Parameter], **options: float
) -> list[dict[str, Any]]:
    """The parameters by how far their rate is scaled (`Objective.lr_scales`)."""
    scales: dict[int, float] = {
        id(parameter): scale
        for name, scale in getattr(module, "lr_scales", {}).items()
        for parameter in module.get_submodule(name).parameters()
    }
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
    return [{"params": group, "lr_scale": scale} | options for scale, group in groups.items()]


def _split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices, and the rest: embeddings, output heads, norms, biases."""
    edge = {
        id(parameter)
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, OutputHead)) or name.endswith("lm_head")
        for parameter in part.parameters()
    }
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in edge]
    return matrices, [p for p in trained if p.ndim != 2 or id(p) in edge]


SCHEDULES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
