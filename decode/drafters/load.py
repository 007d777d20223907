"""From a name or folder to a drafter that is ready to propose."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.drafters.ngram import NgramDrafter
from draftsmith.models.drafter_folder import DrafterFolder, open_drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import check_split
from draftsmith.models.tokenizer import vocab_size


def load_drafter(
    name: str | None,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_target_mismatch: bool = False,
) -> Drafter | None:
    """None for None or "none"; prompt lookup for "ngram"; else the folder's drafter, on the
    target's device and in its dtype. Raises what `open_drafter` raises for a folder that doesn't
    fit.
    """
    if name is None or name == "none":
        return None
    if name == "ngram":
        return NgramDrafter(device=target.device)
    folder = open_drafter(
        name,
        fingerprint(target, tokenizer),
        allow_target_mismatch=allow_target_mismatch,
        target_tokenizer=tokenizer,
    )
    return KINDS[folder.kind](folder, target, tokenizer)


def _lm(
    folder: DrafterFolder, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Drafter:
    model = folder.model().eval().requires_grad_(False)
    model.to(device=target.device, dtype=target.dtype)
    check_split(model)
    return LMDrafter(model, vocab_size(tokenizer))


KINDS = {"lm": _lm}
