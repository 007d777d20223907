"""EAGLE heads for a tiny target, and a batch of text that they are trained on."""

import torch
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.taps import NORM
from draftsmith.train.text.batches import Batch

TOKENS = 90  # of the tokenizer: the target's head has 97 rows
BT = (2, 10)


class Words:
    """A tokenizer, as far as its size is asked."""

    def __len__(self) -> int:
        return TOKENS

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(TOKENS)}


def batch() -> Batch:
    """Row 0: documents of 6 and 4 tokens. Row 1: one of 8 with a prompt of 3, and padding."""
    position = torch.tensor([[*range(6), *range(4)], [*range(10)]])
    document = torch.tensor([[0] * 6 + [1] * 4, [0] * 8 + [1] * 2])
    trained = torch.ones(BT, dtype=torch.bool)
    trained[1, :3] = trained[1, 8:] = False
    mask = torch.zeros(BT, dtype=torch.bool)
    mask[:, :-1] = trained[:, 1:] & (document[:, 1:] == document[:, :-1])
    attend = (document[:, :, None] == document[:, None]).tril()[:, None]
    ids = torch.randint(TOKENS, BT, generator=torch.Generator().manual_seed(3))
    places = torch.arange(20).view(BT)
    places[1, 8:] = -1
    return Batch(ids, position, mask, attend, (0, 1), places)


def layer_config(kind: type = LlamaConfig, layers: int = 1):
    return kind(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )


def eagle(target: PreTrainedModel, layer=None, **fields) -> Eagle:
    """A random head; fields of EagleConfig. Norms that aren't 1 show where they are used."""
    torch.manual_seed(1)
    fields = {"version": 3, "taps": (1, 2), "draft_vocab": 97} | fields
    if fields["version"] == 1:
        fields |= {"taps": (NORM,), "draft_vocab": 0}
    head = Eagle(EagleConfig(layer or layer_config(), **fields)).bind(target)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head
