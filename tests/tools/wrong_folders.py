"""What a user may have by mistake: whole folders of a tiny pair, and ones with one thing wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import head_folders
from evaluated import MADE, save_pair
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase, T5Config, T5Model

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.tokenizer import train_bpe

CHAT = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]


def make_folders(
    root: Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Whole: target, draft, eagle and medusa for it, rows of every kind. Beside them:

    torn (the target, half of its weights), no_weights, plain (no chat template), no_tokens (no
    tokenizer), no_words (an empty one), odd (of an unknown family), t5 (no causal LM), other (a
    target of other weights), other_draft (for it), foreign (a draft with other tokens), a_file,
    nothing (an empty folder), ran (a finished run), answered (of train/prepare.py, three answers
    asked and none there).
    """
    save_pair(root, target, draft, tokenizer)
    mark = fingerprint(target, tokenizer)
    for kind in ("eagle3", "medusa"):
        save(root / kind, kind, head_folders.made(kind, target), tokenizer, mark)
    (root / "eagle3").rename(root / "eagle")

    copies = {"no_weights": "draft"} | dict.fromkeys(
        ("torn", "no_tokens", "odd", "no_words"), "target"
    )
    for copy, of in copies.items():
        shutil.copytree(root / of, root / copy)
    (root / "odd/config.json").write_text('{"model_type": "lamma"}')
    (root / "no_words/tokenizer.json").write_text("{}")
    weights = (root / "torn/model.safetensors").read_bytes()
    (root / "torn/model.safetensors").write_bytes(weights[: len(weights) // 2])
    (root / "no_weights/model.safetensors").unlink()
    for file in (root / "no_tokens").glob("tokenizer*"):
        file.unlink()
    shutil.copytree(root / "target", root / "plain")
    (root / "plain/chat_template.jinja").unlink()
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(root / "t5")
    tokenizer.save_pretrained(root / "t5")

    other = build_llama(len(tokenizer), layers=3, hidden=32, seed=9)
    other.save_pretrained(root / "other")
    tokenizer.save_pretrained(root / "other")
    save(root / "other_draft", "lm", draft, tokenizer, fingerprint(other, tokenizer))
    words = train_bpe(["other words " * 99, Path(__file__).read_text()], 300)
    small = build_llama(len(words), layers=1, hidden=32, seed=9)
    save(root / "foreign", "lm", small, words, fingerprint(small, words))
    (root / "a_file").write_text("not a folder")
    for folder in ("nothing", "ran", "answered"):
        (root / folder).mkdir()
    (root / "ran/recipe.yaml").write_text("entry: eagle\nsteps: 7\n")
    (root / "ran/done.json").write_text('{"result": "ran/drafter"}')
    identity = {"schema": 1, "identity": {"requests": 3}, "about": {}}
    (root / "answered/prepare.json").write_text(json.dumps(identity))
    write_rows(root)


def write_rows(root: Path) -> None:
    """Files of rows, one mistake each but for text, chats and sums."""
    asked = {"role": "user", "content": "Add."}
    rows: dict[str, list[Any]] = {
        "text": [
            {"text": f"row {i} " + " ".join(str(i * j) for j in range(40))} for i in range(60)
        ],
        "chats": [{"messages": [{**CHAT[0], "content": f"Add {i}."}, CHAT[1]]} for i in range(40)],
        "sums": [{"question": f"{i} + 1?", "answer": f"It is.\n#### {i + 1}"} for i in range(310)],
        "unanswered": [{"messages": [{**asked, "content": f"Add {i}."}]} for i in range(40)],
        "topics": [{"prompt": f"Say {i}.", "topic": "numbers"} for i in range(8)],
        "one": [{"prompt": "alone"}],
        "short": [{"text": "tiny"}, {"text": "so small"}],
        "fields": [{"text": "right"}, {"txet": "wrong"}],
        "number": [{"prompt": "right"}, {"prompt": 7}],
        "roles": [{"messages": CHAT}, {"conversations": [{"from": "robot", "value": "1"}]}],
        "empty": [],
    }
    for name, lines in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "torn.jsonl").write_text('{"text": "right"}\n{"text": "ri\n')
    (root / "tree.json").write_text("[[0], [1, 0]]")
    (root / "laws.json").write_text('[{"what": "x", "tokens": 0}]')
    (root / "empty.json").write_text("[]")
    table = [[1, 1, 1], [1, 2, 3]]
    grid = {"rows": [1, 2], "nodes": [1, 2, 3], "verify": table, "beside": table}
    (root / "grid.json").write_text(json.dumps(grid | {"prefill": [], "stairs": []}))
    (root / "grid_torn.json").write_text(json.dumps(grid | {"rows": [1]}))


def save(folder: Path, kind: str, model: Any, tokenizer: Any, mark: dict[str, Any]) -> None:
    how: dict[str, Any] = {"target_fingerprint": mark, "provenance": MADE, "defaults": {}}
    save_drafter(folder, kind=kind, model=model, tokenizer=tokenizer, **how)
