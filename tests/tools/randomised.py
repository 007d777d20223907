"""Heads whose every weight is away from where it begins."""

import torch
from torch import nn


def randomised(head: nn.Module, seed: int = 4) -> None:
    torch.manual_seed(seed)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
