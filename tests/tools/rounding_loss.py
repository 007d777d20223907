"""What rounding a target costs and saves: loss on answers that it never saw, and bytes.

    python tests/tools/rounding_loss.py TARGET ROWS.jsonl [LAST]

Rows have a question and an answer; the last 300 are read, or as many as LAST says. The loss is of
all tokens of the chat in fp32, in nats; bytes are of the target in bf16.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.models.target import TargetSpec, bytes_read, load_target, quantised_maps


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, rows: list[list[int]]) -> float:
    total = 0.0
    for ids in rows:
        ids_BT = torch.tensor([ids])
        logits_TV = model(ids_BT[:, :-1]).logits[0].float()
        total += nn.functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="sum").item()
    return total / sum(len(ids) - 1 for ids in rows)


def main(target: str, data: str, last: str = "300") -> None:
    lines = [json.loads(line) for line in Path(data).read_text("utf-8").splitlines()]
    chats = [
        [
            {"role": "user", "content": line["question"]},
            {"role": "assistant", "content": line["answer"]},
        ]
        for line in lines[-int(last) :]
    ]
    exact = 0.0
    for kind in ("", "int8", "int4"):
        spec = TargetSpec(target, dtype="float32", quantise=kind)
        model, tokenizer = load_target(spec, "cpu")
        rows = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
        loss = mean_loss(model, rows)
        exact = exact or loss
        model.bfloat16()
        maps = sum(bytes_read(part.weight) for part in quantised_maps(model))
        whole = sum(map(bytes_read, model.parameters()))
        print(
            f"{kind or 'exact'}: loss {loss:.4f} ({loss / exact - 1:+.2%}), perplexity "
            f"{math.exp(loss):.3f}; maps {maps / 1e6:.2f} MB, whole {whole / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
