"""A stranger's own model and prompts, for the README's four commands: a Qwen3 of 3.6M parameters
(tied, one safetensors, a template with a think block), trained on GSM8K; 300 chats
as ShareGPT has them.

    python tests/tools/own_target.py FOLDER [steps]     # FOLDER/my-model, FOLDER/prompts.json

The target thinks in the steps of GSM8K's answers and then says the result. Its text is neither that
of the 300 chats nor the 300 rows that are held out of GSM8K everywhere.
"""

import json
import re
import sys
from pathlib import Path

import torch
from thinking_template import TEMPLATE
from tiny_llama import SHARED
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.models.tokenizer import train_bpe
from draftsmith.train.pretrain import main as pretrain

ASKED, HELD_OUT = 300, 300


def made(folder: Path, steps: int) -> None:
    """The model, trained, in `folder`/my-model, and `folder`/prompts.json beside it."""
    lines = (SHARED / "data/gsm8k/train.jsonl").read_text("utf-8").splitlines()
    rows = [conversation(**json.loads(line)) for line in lines[:-HELD_OUT]]
    start, text = folder / "start", folder / "text.json"
    start.mkdir(parents=True, exist_ok=True)
    text.write_text(json.dumps([thought for _, thought in rows[ASKED:]]))
    (folder / "prompts.json").write_text(json.dumps([said for said, _ in rows[:ASKED]], indent=1))
    words = (turn["value"] for _, row in rows[ASKED:] for turn in row["conversations"])
    tokenizer = train_bpe(words, 2048, roles=("system", "user", "assistant"))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    how = ["optimizer=muon", "lr=1e-2", f"steps={steps}", f"warmup={min(20, steps // 2)}"]
    pretrain([f"model={start}", f"data={text}", f"out={folder / 'out'}", *how, "eval_every=150"])
    (folder / "my-model").symlink_to("out/model")


def conversation(question: str, answer: str) -> tuple[dict, dict]:
    """A row as ShareGPT has it: as a user has it, and as a thinking model answers it."""
    worked, _, result = re.sub("<<.*?>>", "", answer).partition("\n#### ")
    said = (f"{worked}\nThe answer is {result}.", f"<think>\n{worked}\n</think>\n\n{result}")
    asked = {"from": "human", "value": question}
    rows = ({"conversations": [asked, {"from": "gpt", "value": text}]} for text in said)
    return next(rows), next(rows)


if __name__ == "__main__":
    made(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 600)
