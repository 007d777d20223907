"""The doctor's check of a draft vocabulary: which tokens an EAGLE-3 head drafts.

Shapes: V rows of the target's LM head, D draft vocabulary.
"""

from collections.abc import Iterator

import torch

from draftsmith.models.folder.imports import holds_ids
from draftsmith.models.servers.findings import RANDOM, REFUSES, Case, Finding, fault, warning

WRONG_MAP = "loads a wrong map, without a word"
OFFSETS = "write offsets, id - position: `python -m draftsmith export` does"


def vocabulary(case: Case) -> Iterator[Finding]:
    """The draft vocabulary: its size, its LM head, and the maps to the target's tokens."""
    said, whole = case.config.get("draft_vocab_size"), case.config.get("vocab_size")
    head = case.meta("lm_head.weight")
    if head is None:
        takes = "takes the target's rows, without a word"
        yield fault("no lm_head.weight", "restore it", sglang=RANDOM, speculators=takes)
        return
    rows = head.shape[0]
    if said is None:
        fails = "fails on the missing field"
        yield fault("no draft_vocab_size", f"write {rows}", sglang=fails, vllm="takes vocab_size")
    elif said != rows:
        says = f"draft_vocab_size is {said}, lm_head.weight has {rows} rows"
        yield fault(says, f"write {rows}, if d2t has as many", vllm_sglang_speculators=REFUSES)
    if whole is None:
        yield warning("no vocab_size", "write the target's into config.json")
    elif "d2t" in case.names:
        yield from _maps(case, rows, int(whole))
    elif rows < whole:
        yield fault(
            f"no d2t, though it drafts {rows} of {whole} tokens",
            OFFSETS if "t2d" in case.names else "restore it",
            vllm_sglang="takes draft ids for the target's",
            speculators="fails",
        )


def _maps(case: Case, rows: int, whole: int) -> Iterator[Finding]:
    d2t_D = case.value("d2t").long()
    ids_D = d2t_D + torch.arange(len(d2t_D))
    t2d_V = case.value("t2d").bool() if "t2d" in case.names else None
    outside = int(((ids_D < 0) | (ids_D >= whole)).sum())
    if len(d2t_D) != rows:
        says = f"d2t has {len(d2t_D)} entries for {rows} rows"
        yield fault(says, "restore it", vllm_sglang_speculators_draftsmith=REFUSES)
    elif holds_ids(d2t_D, t2d_V, whole):
        yield fault(
            f"d2t holds ids, not offsets: the last would lead to {int(ids_D[-1])} of {whole}",
            OFFSETS,
            vllm_sglang="proposes other tokens, or fails",
            speculators=WRONG_MAP,
            draftsmith=REFUSES,
        )
    elif outside:
        says = f"d2t leads {outside} times outside the {whole} tokens"
        mend = "it is another target's, or damaged: restore it"
        yield fault(says, mend, vllm_sglang="fails", speculators=WRONG_MAP, draftsmith=REFUSES)
    elif len(ids_D.unique()) < rows:
        says = "d2t leads twice to one token"
        yield fault(says, "restore it", speculators=WRONG_MAP, draftsmith=REFUSES)
    elif rows == whole and bool(d2t_D.any()):
        says = "a d2t that moves tokens, for a whole vocabulary"
        does = {"vllm_draftsmith": REFUSES, "sglang": "proposes other tokens"}
        yield fault(says, "drop d2t and t2d", **does)
    elif rows == whole:
        yield fault("a d2t for a whole vocabulary", "drop d2t and t2d", vllm=REFUSES)
    elif t2d_V is None:
        say, needs = (
            (fault, "fails to load it") if case.layout == "speculators" else (warning, "needs it")
        )
        yield say("no t2d", "`python -m draftsmith export` adds it", speculators=needs)
    elif t2d_V.nonzero().flatten().tolist() != ids_D.sort().values.tolist():
        yield fault(
            "t2d and d2t name different tokens",
            "make t2d anew, True at the ids of d2t: `python -m draftsmith export` does",
            speculators="trains on with the wrong rows",
            draftsmith="goes by d2t",
        )
