"""Less of an LM head to draft by, without training: fewer tokens (VocabTrim, arXiv 2506.22694), or
a preview of all (SVD-softmax, Shim et al., NIPS 2017).

    draftsmith trim drafter=DRAFTER target=TARGET data=ANSWERS prompts=PROMPTS \\
        sizes=512,1024,2048 ranks=32,64 temperature=1 out=FOLDER [size=1024 | rank=64]

A drafter needs LM-head rows for the tokens that its target writes. They are counted in `data`, the
target's own answers; the most frequent ones stay, and those that end an answer. A token left out
can't be accepted: alpha and tau fall a little, each draft call reads fewer bytes, answers stay the
target's. A preview leaves out none: of a state it foretells all logits by `ranks` numbers, and the
rows of the best alone are read (see `product.Preview`).

Without `size` or `rank` the one with the largest MBSU on the tune part of `prompts` is written; the
table is of the report part. No counted prompt may be in it. An EAGLE-3 head loses the rows; other
drafters keep their LM heads whole on disk, or draft by the target's. A preview is made when a
drafter is loaded.

Shapes: V rows of the target's LM head, D of them kept.
"""

import copy
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, numbers, parse
from draftsmith.decode.draft_lms.lm import LMDrafter, weights_read
from draftsmith.decode.draft_lms.pard import lm_drafter
from draftsmith.decode.drafters.load import (
    drafter_in,
    drafter_of,
    foretell,
    has_folder,
    load_decoded,
)
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import eos_ids
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.evaluate.asking import Asking
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.product import Preview
from draftsmith.decode.policies.timing import isolated_times
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.prompts import load_prompts, spread
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.disk.provenance import git_commit
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import kind_of, open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import family
from draftsmith.models.servers.export import serve_line
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import vocab_size
from draftsmith.models.vocab import DraftVocab
from draftsmith.printed import print_table
from draftsmith.train.drafts.start import counted
from draftsmith.train.text.batches import Examples
from draftsmith.train.text.prepared import is_prepared
from draftsmith.train.text.tokenise import load_examples

CONTEXT = 128  # tokens in the KV of a timed call
AS_IT_IS = "as it is"
USUAL = "512,1024,2048"
HEAD = ("tokens", "counted", "held-out", "alpha", "tau", "change", "MB", "MBSU", "c", "")

Row = dict[str, Any]
Trimmable = LMDrafter | HeadDrafter


@dataclass
class Trim(Asking):
    """Which drafter to trim for which target, by what text, and how it is measured."""

    drafter: str
    data: str  # a folder of train/prepare.py; rows work too, where the target writes like them
    out: str
    sizes: str = ""  # tokens to keep, to compare; empty: USUAL, where no ranks are said either
    size: int | None = None  # the one to write; none: the best of them
    ranks: str = ""  # of previews, to compare with them
    rank: int | None = None  # the one to write
    # For alpha and tau; empty: the held-out side of `data`.
    prompts: str = field(default="", kw_only=True)
    limit: int | None = field(default=16, kw_only=True)  # of the tune split, and of the report one
    K: int | None = None  # draft calls a round; none: the drafter folder's default

    def __post_init__(self) -> None:
        check_least(self, K=1, limit=1, prompt_tokens=1, batch_size=1)
        if self.size is not None and self.rank is not None:
            raise ValueError(
                f"got size={self.size} and rank={self.rank}, expected one of them; trim what was "
                "trimmed once more for both"
            )

    @property
    def compared(self) -> list[int]:
        """The sizes to measure, ascending."""
        alone = self.rank is None and not self.ranks
        return _and_one("sizes", self.sizes or (USUAL if alone else ""), self.size)

    @property
    def ranked(self) -> list[int]:
        """The ranks, likewise."""
        return _and_one("ranks", self.ranks, self.rank)


def _and_one(name: str, text: str, one: int | None) -> list[int]:
    found = numbers(name, text, int, least=1) if text else []
    return sorted({*found} | ({one} if one is not None else set()))


def main(argv: list[str]) -> None:
    settings = parse(Trim, argv)
    rows, line = run(settings, argv)
    title = f"{rows[0]['prompts']} prompts that nothing was counted or chosen on"
    print_table(HEAD, map(cells, rows), title=title)
    print(f"written: {settings.out}\n{line}")


def run(settings: Trim, argv: list[str]) -> tuple[list[Row], str]:
    """The table's rows, the drafter as it is first; and the line that serves what was written.
    ValueError for what doesn't load or fit, a kind without rows to leave out, a size without room,
    or prompts that were counted.
    """
    # ---- the pair ----------------------------------------------------------------------------
    sizes, ranks = settings.compared, settings.ranked
    refuse_others(settings)
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_decoded(spec, settings.device)
    set_template(tokenizer, settings.thinking, settings.template_kwargs)
    mark = fingerprint(target, tokenizer, settings.target)
    of_target: dict[str, Any] = {"target_tokenizer": tokenizer, "target_config": target.config}
    opened = open_drafter(settings.drafter, mark, **of_target)
    whole = drafter_in(opened, target, tokenizer)
    assert isinstance(whole, Trimmable), whole.kind

    # ---- tokens that the target writes -------------------------------------------------------
    if not is_prepared(settings.data):
        warnings.warn(
            f"{settings.data} is no folder of train/prepare.py: its text counts as if the target "
            "had written it, and tokens that the target prefers may be missing",
            stacklevel=2,
        )
    examples = load_examples(settings.data, tokenizer, "train")
    # All but EAGLE-3's still have all rows after they were trimmed, if not by another toolkit.
    is_lm, has = isinstance(whole, LMDrafter), whole.vocab
    lacks = opened.foreign or (isinstance(whole, HeadDrafter) and loses_rows(whole.head))
    choices = DraftVocab(has.ids_D.cpu(), has.size) if lacks else DraftVocab.whole(has.size)
    counts_V = counted(examples, choices.size)
    special = [token for token in tokenizer.all_special_ids if counts_V[token]]
    keep = (*eos_ids(target, tokenizer), *special)
    vocabs = {size: choices.among(counts_V, size, keep) for size in sizes}

    # ---- choose on one part of the prompts, report on the other ------------------------------
    arms: dict[Hashable, Trimmable] = {AS_IT_IS: whole}
    tokens = vocab_size(tokenizer)
    before = opened.meta["defaults"]["preview"]
    pairs: dict[Hashable, Any] = {size: (vocab, before) for size, vocab in vocabs.items()}
    pairs |= {named(rank): (has, rank) for rank in ranks}
    arms |= {name: trimmed(whole, how, target, tokens) for name, how in pairs.items()}
    usual = min(int(opened.meta["defaults"]["K"]), whole.levels)
    settings = replace(settings, K=settings.K or usual)
    plain = Decoder(target, tokenizer, batch_size=settings.batch_size)
    if (best := settings.size if settings.rank is None else named(settings.rank)) is None:
        rows = measured(settings, plain, arms, counts_V, examples, "tune")
        best = max(rows[1:], key=lambda row: float(row["mbsu"]))["name"]
    rows = measured(settings, plain, arms, counts_V, examples, "report")
    rows = [row | {"chosen": row["name"] == best} for row in rows]

    # ---- save, the weights as they were saved ------------------------------------------------
    made = {"argv": argv, "commit": git_commit(), "data_hash": examples.fingerprint()}
    made |= next(row for row in rows if row["chosen"])
    vocab, rank = pairs[best] if best in vocabs else (opened.vocab, pairs[best][1])
    head: Any = opened.model() if is_lm else opened.head()
    save_drafter(
        settings.out,
        kind=opened.kind,
        model=head if is_lm or vocab is None else trimmed_head(head, vocab),
        tokenizer=tokenizer,
        target_fingerprint=opened.meta["target"] or mark,
        provenance=(opened.meta["provenance"] or {}) | {"trim": made},
        defaults=opened.meta["defaults"] | {"preview": rank},
        vocab=vocab if is_lm else None,
    )
    return rows, serve_line(settings.out, settings.target)


def named(rank: int) -> str:
    """The name of the arm with a preview."""
    return f"rank {rank}"


def trimmed(
    drafter: Trimmable, how: tuple[DraftVocab, int | None], target: PreTrainedModel, tokens: int
) -> Trimmable:
    """A drafter with the same weights that drafts those of a tokenizer's `tokens` in a vocabulary,
    and by a preview of a rank.
    """
    (vocab, rank), made = how, drafter
    if isinstance(drafter, LMDrafter):
        made = lm_drafter(drafter.runner.model, tokens, None if vocab.is_full else vocab)
    else:
        made = drafter_of(trimmed_head(drafter.head, vocab), target, tokens)
    if rank is not None:
        foretell(made, rank)
    return made


def preview_of(drafter: Drafter) -> Preview | None:
    """What foretells its LM head's logits, if anything does."""
    return None if drafter.per_node is None else drafter.per_node.preview


def loses_rows(head: Any) -> bool:
    """Whether it has the rows of its draft vocabulary alone, as EAGLE-3 heads do."""
    return isinstance(head, Eagle) and head.config.version == 3


def trimmed_head(head: Any, vocab: DraftVocab) -> Any:
    """A head that drafts some of its tokens; an EAGLE-3 one with their rows of its LM head alone.
    The other weights are shared.
    """
    if not loses_rows(head):
        made = copy.copy(head)
        made.drafts = vocab
        return made
    rows_DH = head.lm_head.weight.detach()
    with torch.device("meta"):
        made = type(head)(replace(head.config, draft_vocab=len(vocab.ids_D)))
    kept_D = torch.isin(head.vocab.ids_D, vocab.ids_D.to(rows_DH.device))
    maps = {"d2t": vocab.d2t_D, "t2d": vocab.t2d_V}
    state = head.state_dict() | {name: ids.to(rows_DH.device) for name, ids in maps.items()}
    made.load_state_dict(state | {"lm_head.weight": rows_DH[kept_D]}, assign=True)
    made.rotary = head.rotary
    return made.eval().requires_grad_(False)


def measured(
    settings: Trim,
    plain: Decoder,
    arms: dict[Hashable, Trimmable],
    counts_V: Tensor,
    examples: Examples,
    split: str,
) -> list[Row]:
    """One row an arm, all on the target's own answers to one split's prompts. counted, written:
    share of counts_V, and of these answers, that the draft has tokens for; tau_change: from the
    first arm's; bytes: read by a draft call; c: its time over that of the target's forward of one
    token.
    """
    runner, K, params = plain.runner, settings.K or 1, SamplingParams.of(settings)
    context = min(plain.context, *(arm.context for arm in arms.values()))
    prompts = prompts_of(settings, plain.tokenizer, examples, context, split)
    answers = plain.generate(prompts, params)
    written = torch.tensor([token for answer in answers for token in answer.tokens])
    written_V = torch.bincount(written, minlength=len(counts_V))
    at = {"batch": 1, "context": min(CONTEXT, context - K - 2), "prompt": 1, "nodes": K + 1}
    rows: list[Row] = []
    sides: list[tuple[list[int], list[int]]] = []
    for name, drafter in arms.items():
        how: Any = {"K": K, "batch_size": settings.batch_size}
        decoder = Decoder(runner.model, plain.tokenizer, drafter, **how)
        counters = [made.counters for made in decoder.generate(prompts, params)]
        tau = metrics.block_efficiency(counters)
        sides.append(([c.emitted for c in counters], [c.rounds for c in counters]))
        change, interval = metrics.paired_difference(sides[-1], sides[0])
        forced = teacher_forced(runner, drafter, answers, params)
        times = isolated_times(runner, drafter, chain_plan(K), **at) if split == "report" else None
        vocab, read = drafter.vocab, drafter.parameter_bytes
        rows.append(
            {
                "name": name,
                "tokens": len(vocab.ids_D),
                "rank": len(seen.down.weight) if (seen := preview_of(drafter)) else None,
                "counted": vocab.coverage(counts_V.to(vocab.ids_D.device)),
                "written": vocab.coverage(written_V.to(vocab.ids_D.device)),
                "alpha": sum(one.alpha for one in forced) / sum(one.positions for one in forced),
                "tau": tau,
                "tau_change": change,
                "tau_change_interval": interval,
                "bytes": read,
                "mbsu": tau / (1 + K * read / weights_read(runner.model)),
                "c": times and times["draft"] / times["plain"],
                "prompts": len(prompts),
            }
        )
    return rows


def cells(row: Row) -> list[str]:
    """A row in words, in the order of HEAD."""
    (low, high), as_it_is = row["tau_change_interval"], row["name"] == AS_IT_IS
    return [
        f"{row['tokens']:,}" + (f" by {row['rank']}" if row["rank"] else ""),
        f"{row['counted']:.2%}",
        f"{row['written']:.2%}",
        f"{row['alpha']:.4f}",
        f"{row['tau']:.3f}",
        "" if as_it_is else f"{low:+.3f} to {high:+.3f}",
        f"{row['bytes'] / 1e6:.3g}",
        f"{row['mbsu']:.3f}",
        f"{row['c']:.3f}",
        AS_IT_IS if as_it_is else "written" if row["chosen"] else "",
    ]


def refuse_others(settings: Trim) -> None:
    """ValueError for a kind that has no rows to leave out; no model is loaded yet."""
    kind, trims = settings.drafter, False
    if has_folder(kind):
        kind = kind_of(kind, settings.target)
        made = None if kind == "lm" else family(kind, "decode.drafters", "Drafter")
        trims = getattr(made, "trims", kind == "lm")
    if not trims:
        raise ValueError(
            f"drafter: got {settings.drafter!r} of kind {kind}, expected a draft LM or a head with "
            "an LM head, its own or borrowed for its drafts alone"
        )


def prompts_of(
    settings: Trim, tokenizer: PreTrainedTokenizerBase, examples: Examples, context: int, split: str
) -> list[list[int]]:
    """One split's prompts; ValueError for counted ones among them, or none that fits."""
    if not settings.prompts and is_prepared(settings.data):
        raise ValueError(
            f"{settings.data} holds answers to training prompts only: say prompts=<what the "
            "prompts came from>"
        )
    source, length = settings.prompts or settings.data, settings.prompt_tokens
    found = load_prompts(source, tokenizer, limit=None, prompt_tokens=length, split=split)
    kept = [one for one in found if len(one.tokens) + settings.max_new_tokens <= context]
    seen = {tuple(examples.prompt(i)) for i in range(len(examples))}
    counted_too = sum(tuple(one.tokens) in seen for one in kept)
    if counted_too or not kept:
        raise ValueError(
            f"prompts: got {len(found)}, of which {len(kept)} fit the context of {context} and "
            f"{counted_too} were counted in {settings.data}; expected some that fit and weren't: "
            "give others, or lower max_new_tokens"
        )
    return [one.tokens for one in spread(kept, settings.limit)]
