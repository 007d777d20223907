"""Tiny heads, a target for them and texts, that tests of their training share."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import NORM
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.objectives.hydra import HydraObjective
from draftsmith.train.objectives.medusa import MedusaObjective
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch, Batches, Examples

TOKENS, ROWS, HEADS = 90, 97, 3  # the target's logits are padded beyond its tokens
KINDS = ["medusa", "hydra", "hydra++"]
DECAY, ALPHA = 0.5, torch.tensor(0.25)  # exact in every type


def words(count: int) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def llama(rows: int = ROWS) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def fresh(kind: str, target: PreTrainedModel, heads: int = HEADS) -> Medusa | Hydra:
    """Heads with every weight away from where it begins."""
    rows = target.config.vocab_size
    torch.manual_seed(1)
    head: Medusa | Hydra
    if kind == "medusa":
        head = Medusa(MedusaConfig(hidden=32, rows=rows, heads=heads, layers=2))
    else:
        prefix = layer_like(target) if kind == "hydra++" else None
        head = Hydra(HydraConfig(hidden=32, rows=rows, heads=heads, layers=2, prefix=prefix))
    head.init_from(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return head


def objective_of(head: Medusa | Hydra, target: PreTrainedModel, **options: object) -> HeadObjective:
    made = HydraObjective if isinstance(head, Hydra) else MedusaObjective
    options = {"loss": "ce", "decay": DECAY} | options
    tokenizer = words(min(TOKENS, target.config.vocab_size))
    return made(head, target, tokenizer, OnlineTaps(target, (NORM,)), **options)


def text(*, batch_size: int = 3, packing: bool = True) -> Batches:
    """Documents and answers to prompts, of 2 to 15 tokens, in rows of 24."""
    draw = torch.Generator().manual_seed(0)
    pairs = []
    for number in range(40):
        length = 2 + int(torch.randint(0, 14, (), generator=draw))
        ids = torch.randint(0, TOKENS, (length,), generator=draw).tolist()
        prompt = number % 3
        pairs.append((ids, [place >= prompt for place in range(length)]))
    examples = Examples.collect(pairs)
    return Batches(
        examples, batch_size=batch_size, max_length=24, seed=0, packing=packing, pad_id=0
    )


def one_batch(packing: bool) -> Batch:
    return text(packing=packing).batch(0, 0, 0, accumulation=1, world=1)
