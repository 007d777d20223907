"""Masks of nodes to accept whatever the rule says. Each changes the law of the answers.

    typical:0.09,0.3  p(x) > min(eps, delta exp(-H(p))): Medusa's typical acceptance (Cai et al.,
                      arXiv 2401.10774, after truncation sampling); these two are the defaults
    lenience:l        Leviathan et al. (arXiv 2211.17192, A.5). Greedy: p(x) >= l max p. Of a chain
                      judged by rejection: u < p(x) / (l q(x)). DistillSpec (arXiv 2310.08461) calls
                      it f_lin; its f_sq is lenience:l^2
    lenience-exp:l    the same with p(x)^l in the place of p(x) / l: DistillSpec's f_exp
    fuzzy:t           the Jensen-Shannon divergence (nats) of p and q at the parent is under t:
                      fuzzy speculative decoding (Holsman et al., arXiv 2502.20704)
    judge:FOLDER,t    a linear head on the target's state at x finds, above t, that x does no harm:
                      judge decoding (Bachmann et al., arXiv 2501.19309); without t at the folder's
                      own threshold

p and q are the laws after the parent; at temperature 0 the softmax of the raw logits.

Where we differ: with the shared noise E of the coupled rule, lenience accepts x if counting for
f(p(x)) would win it the race: E_x / f(p(x)) <= min_v E_v / p(v). Without noise that is the greedy
form; in a chain with f = p / l no token comes with more than p / l, as in the paper. A judge reads
the state after the final norm, which a runner gives for any model, not the one before it.

Shapes: B rows, N nodes, I inner nodes, D levels, H width of the target's states, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.verify.rules import Noise
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.scorers import Scorer, check_threshold, check_width, load_scorer


class Judge(NamedTuple):
    """least: the log-odds above which a token passes."""

    scorer: Scorer
    least: float

    def mask(self, states_BNH: Tensor) -> Tensor:
        """[B, N] bool: whether each node's token passes, by the target's states at it."""
        return self.scorer.calibrated(self.scorer(states_BNH.float())) > self.least


@dataclass(frozen=True)
class Lossy:
    """One way to accept more: a key of `FORMS` and its numbers; of a judge its folder, and once it
    is `ready` the judge.
    """

    name: str
    values: tuple[float, ...]
    folder: str = ""
    judge: Judge | None = field(default=None, repr=False, compare=False)

    @property
    def needs_q(self) -> bool:
        """Whether the tree must carry the draft's logits, whatever the rule."""
        return self.name == "fuzzy"

    def mask(
        self, tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, states_BNH: Tensor | None = None
    ) -> Tensor:
        """[B, N] bool: nodes to accept if their parent is; False at the root. states_BNH: the
        target's after the final norm, for judges. ValueError for a tree that lacks what is needed.
        """
        if tree.topology.levels == 0:
            return torch.zeros_like(tree.tokens_BN, dtype=torch.bool)
        if self.folder:
            assert self.judge is not None and states_BNH is not None, f"{self}: not made ready"
            mask_BN = self.judge.mask(states_BNH)
        else:
            log_p_BNV = p_logits_BNV.log_softmax(-1)
            mask_BN = FORMS[self.name].mask(tree, log_p_BNV, noise, *self.values)
        return mask_BN & (tree.topology.depth > 0)

    def ready(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "Lossy":
        """The same with what it reads from disk, for this target; errors of `load_judge` pass."""
        if not self.folder:
            return self
        threshold = self.values[0] if self.values else None
        return replace(self, judge=load_judge(self.folder, threshold, target, tokenizer))

    def __str__(self) -> str:
        return f"{self.name}:{','.join(filter(None, (self.folder, *map(repr, self.values))))}"


def parse(text: str) -> Lossy:
    """What the page above describes; ValueError for anything else."""
    name, colon, tail = text.partition(":")
    if name == "judge":
        folder, comma, number = tail.rpartition(",")
        values = _numbers(number) if comma else ()
        folder = folder if values else tail  # a comma in a name
        if not folder:
            raise ValueError(
                f"lossy: got {text!r}, expected judge:FOLDER or judge:FOLDER,threshold, with the "
                "folder that train/scorers.py wrote"
            )
        if values:
            check_threshold(values[0], f"lossy: {text!r}: threshold")
        return Lossy("judge", values, folder)
    form = FORMS.get(name)
    if form is None:
        known = sorted((*FORMS, "judge"))
        raise ValueError(f"lossy: got {text!r}, expected one of {known} with its numbers")
    values = _numbers(tail) if colon else form.defaults
    fits = all(0 < value <= 1 or (value == 0 and form.from_zero) for value in values)
    if len(values) != form.count or not fits:
        raise ValueError(
            f"lossy: got {text!r}, expected {form.count} number(s) in "
            f"{'[' if form.from_zero else '('}0, 1] after '{name}:'"
        )
    return Lossy(name, values)


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers between commas; () where any is none."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        return ()


def load_judge(
    folder: str,
    threshold: float | None,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Judge:
    """A judge on the target's device; threshold: None for the folder's own. ValueError for what
    `load_scorer` refuses, another target, or states of another width.
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


def typical(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, eps: float, delta: float) -> Tensor:
    """p(x) > min(eps, delta exp(-H(p)))."""
    entropy_BN = torch.special.entr(log_p_BNV.exp()).sum(-1)
    least_BN = (delta * (-entropy_BN).exp()).clamp(max=eps)
    return _drafted(log_p_BNV, tree).exp() > least_BN.gather(1, _parents(tree))


def fuzzy(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, limit: float) -> Tensor:
    """JS(p, q) at the parent < t; as H((p + q) / 2) - (H(p) + H(q)) / 2."""
    topology = tree.topology
    if topology.parents is None or tree.q_logits_BIV is None:
        raise ValueError(
            "lossy fuzzy: got a tree without the draft's q, expected a chain or a static tree of a "
            "drafter with logits; use typical or lenience"
        )
    entropy = torch.special.entr
    p_BIV = torch.stack([log_p_BNV[:, node] for node in topology.inner], 1).exp()
    q_BIV = tree.q_logits_BIV.softmax(-1)
    own_BI = (entropy(p_BIV) + entropy(q_BIV)).sum(-1) / 2
    # Rounding must not make it negative: a threshold of 0 accepts nothing.
    js_BI = (entropy((p_BIV + q_BIV) / 2).sum(-1) - own_BI).clamp(min=0)
    place = {node: i for i, node in enumerate(topology.inner)}
    return torch.stack([js_BI[:, place[max(p, 0)]] for p in topology.parents], 1) < limit


def lenience(
    tree: TokenTree, log_p_BNV: Tensor, noise: Noise, share: float, *, power: bool = False
) -> Tensor:
    """x counts for p(x) / l, or for p(x)^l."""
    own_BN = _drafted(log_p_BNV, tree)
    lenient_BN = own_BN * share if power else own_BN - math.log(share)
    if noise.accept_BN is not None and noise.log_residual_BV is not None:  # by rejection
        if not tree.topology.is_chain or tree.q_logits_BIV is None:
            raise ValueError(
                "lossy lenience: got a tree judged by rejection, expected a chain with its q: a "
                "rejected sibling changes p and q; use rule=coupled"
            )
        log_q_BDV = tree.q_logits_BIV.log_softmax(-1)
        log_q_BD = log_q_BDV.gather(2, tree.tokens_BN[:, 1:, None])[..., 0]
        chance_BD = (lenient_BN[:, 1:] - log_q_BD).exp()
        return torch.nn.functional.pad(noise.accept_BN[:, 1:] < chance_BD, (1, 0))
    race_BNV = noise.race_at_nodes(tree.topology)
    if race_BNV is not None:
        lenient_BN = lenient_BN - _drafted(race_BNV, tree)
        log_p_BNV = log_p_BNV - race_BNV
    return lenient_BN >= log_p_BNV.amax(-1).gather(1, _parents(tree))


def _parents(tree: TokenTree) -> Tensor:
    """Each node's parent [B, N]; the root's is itself."""
    return tree.topology.parent.clamp(min=0).expand_as(tree.tokens_BN)


def _drafted(x_BNV: Tensor, tree: TokenTree) -> Tensor:
    """x [B, N] of each node's token at its parent."""
    rows_B1 = torch.arange(x_BNV.shape[0], device=x_BNV.device)[:, None]
    return x_BNV[rows_B1, _parents(tree), tree.tokens_BN]


@dataclass(frozen=True)
class Form:
    """mask: of a tree, log p [B, N, V], the noise and `count` numbers in (0, 1] or from 0;
    defaults: () for none.
    """

    mask: Callable[..., Tensor]
    count: int
    defaults: tuple[float, ...] = ()
    from_zero: bool = False


FORMS = {
    "typical": Form(typical, 2, (0.09, 0.3)),
    "lenience": Form(lenience, 1),
    "lenience-exp": Form(partial(lenience, power=True), 1),
    "fuzzy": Form(fuzzy, 1, from_zero=True),
}
