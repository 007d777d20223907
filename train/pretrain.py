"""Pretraining: a causal LM from a configuration, or from a checkpoint, by plain cross-entropy.

    draftsmith train pretrain recipe=quickstart/target
    accelerate launch train/pretrain.py ...           (the same)

    loss = - sum_t log q(x_t | x_<t) / number of tokens

It makes the quickstart's target, with model= tunes a given one on its task before it is distilled,
and with target.path= makes the first stages of a draft for that target, on its tokenizer, as in
FastDraft (Zafrir et al., arXiv 2411.11055). The text is `data`, of which answers alone are trained
where there are prompts; or `corpus`, streamed. Where this differs from FastDraft:

1. One stage a run. Their second one (text, then code and text) is a second run, with
   model=<the first one's result>; their third is train/distill.py on what the target wrote.
2. Embedding and output head are tied: at small sizes the table is most of the model.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import run_command
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import check_same_tokenizer, load_tokenizer, train_bpe, vocab_size
from draftsmith.train.drafts.draft_start import TINY, DraftSizes, fresh_draft, fresh_model
from draftsmith.train.objectives.distillation import Distillation, NextToken
from draftsmith.train.objectives.heldout import CrossEntropy, Figures, draft_figures, mean_output
from draftsmith.train.run import recipe
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import Evaluate, StepBatches, fit
from draftsmith.train.run.lora import Lora, to_save, with_lora
from draftsmith.train.run.result import made_by, save_draft, save_model
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Examples
from draftsmith.train.text.on_policy import Snapshot, make_batches, text_at_hand
from draftsmith.train.text.stream import Corpus, CorpusStream, held_out_texts
from draftsmith.train.text.tokenise import tokenise


@dataclass(kw_only=True)
class PretrainConfig(Corpus, DraftSizes, Lora, Figures):
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
    run = recipe.run_of(config, main=accelerator.is_main_process)
    result = run.folder / ("drafter" if config.target.path else "model")
    if run.finished():
        accelerator.print(f"{result} is finished: nothing to do")
        return
    accelerator.print(recipe.show(config))

    # ---- text and tokenizer ------------------------------------------------------------------
    train_rows, heldout_rows = load_rows(config.data, "train"), load_rows(config.data, "heldout")
    if config.target.shrink:
        train_rows, heldout_rows = train_rows[:20], heldout_rows[:2]
    target, tokenizer = target_and_tokenizer(config, train_rows, accelerator.device)
    order: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed}
    source: Examples | CorpusStream
    batches: StepBatches
    if config.corpus:
        left_out = held_out_texts(config.data, config.heldout_data)
        batches = source = CorpusStream(config, tokenizer, left_out)
        amount = f"text from {', '.join(config.corpus)}"
    else:
        source = tokenise(train_rows, tokenizer)
        batches = make_batches(config, source, tokenizer, **order)
        amount = f"{len(source.ids):,} tokens of text, {len(batches):,} sequences"
    heldout = make_batches(config, tokenise(heldout_rows, tokenizer), tokenizer, **order)

    # ---- model and objective -----------------------------------------------------------------
    model = load_draft(config.model) if config.model else make_model(config, tokenizer, target)
    model = with_lora(model, config, given=bool(config.model), seed=config.seed)
    figures: Evaluate = dict  # none
    objective = make_objective(config, model, target, tokenizer).to(accelerator.device)
    if target is not None and isinstance(objective, Distillation):
        of = (Snapshot(model, target.dtype), target, tokenizer, run.cache)
        figures = draft_figures(config, accelerator, objective, *of)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator.print(f"{model.num_parameters():,} parameters; {amount}")

    # ---- fit, and keep what was best on held-out text ----------------------------------------
    def evaluate() -> dict[str, float]:
        return figures() | mean_output(accelerator, objective, heldout, config.heldout_sequences)

    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)
    if isinstance(batches, CorpusStream) and batches.skipped:
        print(f"skipped {len(batches.skipped)} corrupt shards: {', '.join(batches.skipped)}")

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        model = to_save(model, run.folder / "adapter", config.save_dtype)
        made = made_by(argv, config.seed, source, ended)
        if target is None:
            save_model(result, model, tokenizer, made)
        else:
            path = config.target.path
            save_draft(result, model, target, tokenizer, target_path=path, made=made, K=config.K)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def target_and_tokenizer(
    config: PretrainConfig, rows: list[Row], device: torch.device
) -> tuple[PreTrainedModel | None, PreTrainedTokenizerBase]:
    """The target that a draft is for, if any; its tokenizer, or the model's, or a new one."""
    if config.target.path:
        where = device if config.heldout_prompts else "cpu"
        target, tokenizer = load_target(config.target.resolved(config.dtype), where)
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
    """A random Llama, or a draft of the target's family (`fresh_draft`)."""
    if target is None:
        if config.init != "random":
            raise ValueError(f"got init={config.init} without a target, expected target.path=...")
        rows = vocab_size(tokenizer)
        return fresh_model(config, LlamaConfig(), tokenizer, rows=rows, seed=config.seed)
    return fresh_draft(config, target, tokenizer, config.seed)


def make_objective(
    config: PretrainConfig,
    model: PreTrainedModel,
    target: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> NextToken | Distillation:
    """Cross-entropy with the text; as a distillation where figures with the target are asked."""
    if target is None or not config.heldout_prompts:
        return NextToken(model)
    size = vocab_size(tokenizer)
    teacher = StateTeacher(target, size)
    return Distillation(model, teacher, CrossEntropy(), vocab_size=size, warp=config.warp)


def shrunk(config: PretrainConfig) -> PretrainConfig:
    """Two steps of a tiny model on little text: shows that a recipe composes and runs."""
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2, "heldout_sequences": 2}
    few: dict[str, Any] = {"heldout_prompts": 2, "max_new_tokens": 8, "prompt_tokens": 8}
    corpus = list(dict.fromkeys(map(text_at_hand, config.corpus)))
    few |= {"corpus": corpus, "weights": [], "shuffle": 8, "heldout_data": "", "model": ""}
    data = text_at_hand(config.data)
    return replace(config, data=data, tokenizer_size=300, **TINY, **short, **few)


if __name__ == "__main__":
    run_command(main, PretrainConfig)
