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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, run_command
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import (
    ROLES,
    check_same_tokenizer,
    load_tokenizer,
    train_bpe,
    vocab_size,
)
from draftsmith.train.drafts.start import TINY, ModelStart, fresh_draft, place
from draftsmith.train.heldout import heldout as held
from draftsmith.train.heldout.heldout import HeldOutPrompts
from draftsmith.train.objectives.distillation import Distillation, Losses, NextToken, stages
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.launch import begin
from draftsmith.train.run.loop import Evaluate, StepBatches, fit
from draftsmith.train.run.lora import Lora, to_save, with_lora
from draftsmith.train.run.result import save_draft, save_model
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Examples
from draftsmith.train.text.on_policy import Snapshot, Text, make_batches, text_at_hand
from draftsmith.train.text.prepared import is_prepared, load_prepared
from draftsmith.train.text.stream import Corpus, CorpusStream, first_texts, held_out_texts
from draftsmith.train.text.tokenise import tokenise

BPE_LETTERS = 5_000_000  # of each source of a corpus, at most


@dataclass(kw_only=True)
class PretrainConfig(Settings):
    """What a recipe of this entry can say."""

    entry: str = "pretrain"
    target: TargetSpec = field(default_factory=lambda: TargetSpec(path=""))  # of a draft
    model: ModelStart = field(default_factory=ModelStart)
    lora: Lora = field(default_factory=Lora)
    tokenizer: str = "train"  # train | train-chat (has a template) | whose, where none is given
    tokenizer_size: int = 4096
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    corpus: Corpus = field(default_factory=Corpus)
    heldout_sequences: int = 64  # at each evaluation
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)  # limit 0: the loss alone
    temperature: float = 1.0  # of the held-out figures
    K: int = 4  # drafted tokens a round: for tau and MBSU, and the result's default

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, heldout_sequences=1)


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(PretrainConfig, argv, shrunk, refuse)
    if run is None:
        return

    # ---- text and tokenizer ------------------------------------------------------------------
    train_rows, heldout_rows = rows_of(config)
    source: Examples | CorpusStream
    batches: StepBatches
    sources, own = config.corpus.sources, (row.text for row in train_rows)
    left_out = held_out_texts(config.data, config.heldout.prompts) if sources else set[str]()
    texts = first_texts(config.corpus, left_out, BPE_LETTERS) if sources else own
    target, tokenizer = target_and_tokenizer(config, texts, accelerator.device)
    if sources:
        batches = source = CorpusStream(config.corpus, config.text, config, tokenizer, left_out)
        kept = tokenise(heldout_rows, tokenizer)
    else:
        if is_prepared(config.data):
            source, kept = load_prepared(config.data).parted(config.heldout_sequences)
        else:
            source, kept = tokenise(train_rows, tokenizer), tokenise(heldout_rows, tokenizer)
        batches = make_batches(config.text, config, source, tokenizer)
    heldout = make_batches(config.text, config, kept, tokenizer)

    # ---- model and objective -----------------------------------------------------------------
    model = place(make_model(config, tokenizer, target), accelerator.device)
    figures: Evaluate = dict  # none
    objective = make_objective(config, model, target, tokenizer).to(accelerator.device)
    if target is not None and isinstance(objective, Distillation):
        prompts = held.open_heldout(config, objective.warp, accelerator, target, tokenizer, run)
        figures = held.draft_figures(prompts, objective, Snapshot(model, target.dtype), config.K)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator.print(f"{model.num_parameters():,} parameters")

    # ---- fit, and keep what was best on held-out text ----------------------------------------
    def evaluate() -> dict[str, float]:
        many = config.heldout_sequences
        return figures() | held.mean_output(accelerator, objective, heldout, many)

    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)
    if isinstance(batches, CorpusStream) and batches.skipped:
        print(f"skipped {len(batches.skipped)} corrupt shards: {', '.join(batches.skipped)}")

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        model = to_save(model, run.folder / "adapter", config.save_dtype)
        made = provenance(argv, config.seed, source.fingerprint(), ended.best_step)
        result = run.folder / ("model" if target is None else "drafter")
        if target is None:
            save_model(result, model, tokenizer, made)
        else:
            save_draft(result, model, target, tokenizer, config, made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def rows_of(config: PretrainConfig) -> tuple[list[Row], list[Row]]:
    """The data's training and held-out side, none of answers that are tokens already; ValueError
    for those without the target that wrote them.
    """
    if is_prepared(config.data):
        if not config.target.path:
            raise ValueError(
                f"data: got {config.data}, answers in a target's tokens, without target.path; "
                "expected that of the target which wrote them, or text"
            )
        return [], []
    train_rows, heldout_rows = load_rows(config.data, "train"), load_rows(config.data, "heldout")
    few = config.target.shrink
    return (train_rows[:20], heldout_rows[:2]) if few else (train_rows, heldout_rows)


def target_and_tokenizer(
    config: PretrainConfig, texts: Iterator[str], device: torch.device
) -> tuple[PreTrainedModel | None, PreTrainedTokenizerBase]:
    """The target that a draft is for, if any; its tokenizer, or the model's, or a new one."""
    target: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    if config.target.path:
        where = device if config.heldout.limit else "cpu"
        target, tokenizer = load_target(config.target.resolved(config.dtype), where)
        if config.model.path:
            check_same_tokenizer(tokenizer, load_tokenizer(config.model.path))
    elif (source := config.model.path or config.tokenizer) in ("train", "train-chat"):
        roles = ROLES if source == "train-chat" else ()
        target, tokenizer = None, train_bpe(texts, config.tokenizer_size, roles)
    else:
        target, tokenizer = None, load_tokenizer(source)
    set_template(tokenizer, config.text.thinking, config.text.template_kwargs)
    return target, tokenizer


def make_model(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel | None
) -> PreTrainedModel:
    """The given one, a draft of the target's family, or a random Llama (`fresh_draft`)."""
    start, seed, given = config.model, config.seed, bool(config.model.path)
    made = load_draft(start.path) if given else fresh_draft(start, target, tokenizer, seed)
    return with_lora(made, config.lora, given=given, seed=seed)


def make_objective(
    config: PretrainConfig,
    model: PreTrainedModel,
    target: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> NextToken | Distillation:
    """Cross-entropy with the text; as a distillation where figures with the target are asked."""
    if target is None or not config.heldout.limit:
        return NextToken(model)
    size, warp = vocab_size(tokenizer), config.heldout.params(config.temperature)
    teacher, ce = StateTeacher(target, size), stages(Losses(name="ce"), 1)
    return Distillation(model, teacher, ce, vocab_size=size, warp=warp)


def shrunk(config: PretrainConfig) -> PretrainConfig:
    """Two steps of a tiny model on little text: shows that a recipe composes and runs."""
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2, "heldout_sequences": 2}
    short["heldout"] = HeldOutPrompts(limit=2, prompt_tokens=8, max_new_tokens=8)
    sources = list(dict.fromkeys(map(text_at_hand, config.corpus.sources)))
    short["corpus"] = replace(config.corpus, sources=sources, weights=[], shuffle=8)
    short |= {"model": TINY, "lora": Lora(), "tokenizer_size": 300}
    return replace(config, data=text_at_hand(config.data), **short)


if __name__ == "__main__":
    run_command(main, PretrainConfig)
