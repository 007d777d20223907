"""Judge decoding's mask: tokens that a linear head on the target's state at them lets pass.

    lossy=judge:FOLDER       at the threshold in the folder's scorer.json
    lossy=judge:FOLDER,0.7   a drafted token passes if the head says "no harm" above 0.7

After Bachmann et al. (arXiv 2501.19309): a drafted token is kept if its parent is and the rule or
the judge accepts it. The state is there anyway, from the pass that verifies.

Where this differs from the paper: it reads the state before the final norm, ours the one after it,
which is what a runner gives for any model.

Shapes: B rows, N nodes, H width of the target's states.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.scorers import Scorer, check_threshold, check_width, load_scorer


@dataclass(frozen=True)
class Judge:
    """least: the log-odds above which a token passes."""

    scorer: Scorer
    least: float

    def mask(self, states_BNH: Tensor) -> Tensor:
        """[B, N] bool: whether each node's token passes, by the target's states at it."""
        logit_BN = self.scorer(states_BNH.float())
        return self.scorer.calibrated(logit_BN) > self.least


def load_judge(
    folder: str,
    threshold: float | None,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Judge:
    """A judge on the target's device; threshold: None for the folder's own.

    Raises ValueError for what `load_scorer` refuses, a judge of another target, states of another
    width; warns of one that isn't calibrated.
    """
    scored = load_scorer(folder, "judge")
    check_width(scored.scorer, target.config.get_text_config().hidden_size, f"judge {folder}")
    made_for = scored.about.get("made_for")
    if not isinstance(made_for, dict) or not made_for:
        raise ValueError(
            f"got {folder}, a judge that doesn't say for which target it was made; expected one of "
            "train/scorers.py; train it again"
        )
    differ = differences(made_for, fingerprint(target, tokenizer))
    if differ:
        raise ValueError(
            f"judge {folder}: got one for another target ({'; '.join(differ)}), expected one that "
            "was trained on this target's states; mine labels and train it for this target"
        )
    least = scored.threshold if threshold is None else threshold
    check_threshold(least, f"judge {folder}: threshold")
    return Judge(scored.scorer.to(target.device), math.log(least / (1 - least)))
