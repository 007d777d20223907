"""Pretraining: a causal LM from a configuration, or from a checkpoint, by plain cross-entropy.

    accelerate launch train/pretrain.py recipe=quickstart/target
    accelerate launch --config_file recipes/accelerate/cpu.yaml train/pretrain.py recipe=...   (CPU)

    loss = - sum_t log q(x_t | x_<t) / number of tokens

It makes the quickstart's target, and with target.path= the first stage of a draft for that target,
on its tokenizer, as in FastDraft (Zafrir et al., arXiv 2411.11055). Where this differs from there:

1. One stage on one corpus. Their second stage (text, then code and text) is a second run, with
   model=<the first one's result>.
2. The sizes are given, not searched for.
3. Embedding and output head are tied: at small sizes the table is most of the model.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.corpus import Row
from draftsmith.decode.splits import load_rows
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.target import TargetSpec, check_same_tokenizer, load_target
from draftsmith.models.tokenizer import load_tokenizer, train_bpe, vocab_size
from draftsmith.train import recipe
from draftsmith.train.draft import TINY, Sizes, fresh_model
from draftsmith.train.heldout import mean_output
from draftsmith.train.launch import start
from draftsmith.train.log import run_entry
from draftsmith.train.loop import fit
from draftsmith.train.objectives import NextToken
from draftsmith.train.result import made_by, save_draft, save_model
from draftsmith.train.settings import Settings
from draftsmith.train.sources import tokenise
from draftsmith.train.state import Run
from draftsmith.train.text import Text, make_batches, text_at_hand


@dataclass(kw_only=True)
class PretrainConfig(Settings, Sizes, Text):
    """What a recipe of this entry can say."""

    entry: str = "pretrain"
    heldout_sequences: int = 64  # at each evaluation
    model: str = ""  # a checkpoint to continue from; empty: a fresh model of the sizes
    tokenizer: str = "train"  # or whose to take, where neither target nor model brings one
    tokenizer_size: int = 4096
    target: TargetSpec = field(default_factory=lambda: TargetSpec(path=""))  # of a draft


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config = recipe.load(PretrainConfig, argv)
    config = shrunk(config) if config.target.shrink else config
    accelerator = start(config)
    run = Run(config.out, recipe.show(config), main=accelerator.is_main_process)
    result = run.folder / ("drafter" if config.target.path else "model")
    if run.finished():
        accelerator.print(f"{result} is finished: nothing to do")
        return
    accelerator.print(recipe.show(config))

    # ---- text and tokenizer ------------------------------------------------------------------
    train_rows, heldout_rows = load_rows(config.data, "train"), load_rows(config.data, "heldout")
    if config.target.shrink:
        train_rows, heldout_rows = train_rows[:20], heldout_rows[:2]
    target, tokenizer = target_and_tokenizer(config, train_rows)
    examples = tokenise(train_rows, tokenizer)
    order: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed}
    batches = make_batches(config, examples, tokenizer, **order)
    heldout = make_batches(config, tokenise(heldout_rows, tokenizer), tokenizer, **order)

    # ---- model and objective -----------------------------------------------------------------
    model = load_draft(config.model) if config.model else make_model(config, tokenizer, target)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    objective = NextToken(model).to(accelerator.device)
    size, text = model.num_parameters(), len(examples.ids)
    accelerator.print(f"{size:,} parameters; {text:,} tokens of text, {len(batches):,} sequences")

    # ---- fit, and keep what was best on held-out text ----------------------------------------
    def evaluate() -> dict[str, float]:
        return mean_output(accelerator, objective, heldout, config.heldout_sequences)

    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        objective.to("cpu", getattr(torch, config.save_dtype))
        made = made_by(argv, config.seed, examples, ended)
        if target is None:
            save_model(result, model, tokenizer, made)
        else:
            path = config.target.path
            save_draft(result, model, target, tokenizer, target_path=path, made=made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def target_and_tokenizer(
    config: PretrainConfig, rows: list[Row]
) -> tuple[PreTrainedModel | None, PreTrainedTokenizerBase]:
    """The target that a draft is for, if any; its tokenizer, or the model's, or a new one."""
    if config.target.path:
        target, tokenizer = load_target(config.target, "cpu")
        if config.model:
            check_same_tokenizer(tokenizer, load_tokenizer(config.model))
        return target, tokenizer
    source = config.model or config.tokenizer
    if source == "train":
        return None, train_bpe((row.text for row in rows), config.tokenizer_size)
    return None, load_tokenizer(source)


def make_model(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel | None
) -> PreTrainedModel:
    """A random Llama, or a draft of the target's family with as many logits as the target."""
    if target is None:
        rows = vocab_size(tokenizer)
        return fresh_model(config, LlamaConfig(), tokenizer, rows=rows, seed=config.seed)
    rows = target.get_output_embeddings().weight.shape[0]
    return fresh_model(config, target.config, tokenizer, rows=rows, seed=config.seed)


def shrunk(config: PretrainConfig) -> PretrainConfig:
    """Two steps of a tiny model on little text: shows that a recipe composes and runs."""
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2, "heldout_sequences": 2}
    data = text_at_hand(config.data)
    return replace(config, data=data, tokenizer_size=300, **TINY, **short)


if __name__ == "__main__":
    run_entry(main)
