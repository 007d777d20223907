"""Masks of nodes to accept whatever the rule says. Each changes the law of the answers.

    typical:0.09,0.3  p(x) > min(eps, delta exp(-H(p))): Medusa's typical acceptance (Cai et al.,
                      arXiv 2401.10774, after truncation sampling); these two are the defaults
    lenience:l        Leviathan et al. (arXiv 2211.17192, A.5). Greedy: p(x) >= l max p. Of a chain
                      judged by rejection: u < p(x) / (l q(x)). DistillSpec (arXiv 2310.08461) calls
                      it f_lin; its f_sq is lenience:l^2
    lenience-exp:l    the same with p(x)^l in the place of p(x) / l: DistillSpec's f_exp
    fuzzy:t           the Jensen-Shannon divergence (nats) of p and q at the parent is under t:
                      fuzzy speculative decoding (Holsman et al., arXiv 2502.20704)
    judge:FOLDER,t    a trained head finds, above t, that x does no harm: see `judge.py`; without
                      t at the folder's own threshold

p and q are the laws after the parent; at temperature 0 the softmax of the raw logits.

Where we differ: with the shared noise E of the coupled rule, lenience accepts x if counting for
f(p(x)) would win it the race: E_x / f(p(x)) <= min_v E_v / p(v). Without noise that is the greedy
form; in a chain with f = p / l no token comes with more than p / l, as in the paper.

Shapes: B rows, N nodes, I inner nodes, D levels, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.verify.judge import Judge, load_judge
from draftsmith.decode.verify.verdict import Noise
from draftsmith.models.scorers import check_threshold


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
        self,
        tree: TokenTree,
        p_logits_BNV: Tensor,
        noise: Noise,
        states_BNH: Tensor | None = None,
    ) -> Tensor:
        """[B, N] bool: nodes to accept if their parent is; False at the root.

        p_logits_BNV transformed; noise: the round's, as the rule gets it; states_BNH: the target's
        at each node, after the final norm. Raises ValueError for a tree that lacks what the mask
        needs.
        """
        if tree.topology.levels == 0:
            return torch.zeros_like(tree.tokens_BN, dtype=torch.bool)
        if self.folder:
            assert self.judge is not None and states_BNH is not None, f"{self}: not made ready"
            return self.judge.mask(states_BNH) & (tree.topology.depth > 0)
        mask_BN = FORMS[self.name].mask(tree, p_logits_BNV.log_softmax(-1), noise, self.values)
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
    """`typical`, `typical:0.09,0.3`, `lenience:0.8`, `fuzzy:0.1`, `judge:FOLDER`, `judge:FOLDER,
    0.5`; ValueError for anything else.
    """
    name, colon, tail = text.partition(":")
    if name == "judge":
        return _parse_judge(text, tail)
    form = FORMS.get(name)
    if form is None:
        known = sorted((*FORMS, "judge"))
        raise ValueError(f"lossy: got {text!r}, expected one of {known} with its numbers")
    try:
        values = tuple(float(part) for part in tail.split(",")) if colon else form.defaults
    except ValueError:
        values = ()
    low = "[0" if form.from_zero else "(0"
    fits = all(0 < value <= 1 or (value == 0 and form.from_zero) for value in values)
    if len(values) != form.count or not fits:
        raise ValueError(
            f"lossy: got {text!r}, expected {form.count} number(s) in {low}, 1] after '{name}:'"
        )
    return Lossy(name, values)


def _parse_judge(text: str, tail: str) -> Lossy:
    """A folder, and after its last comma a threshold, if that is a number."""
    folder, comma, number = tail.rpartition(",")
    values: tuple[float, ...] = ()
    try:
        values = (float(number),) if comma else ()
    except ValueError:
        folder = tail
    folder = folder if values else tail
    if not folder:
        raise ValueError(
            f"lossy: got {text!r}, expected judge:FOLDER or judge:FOLDER,threshold, with the "
            "folder that train/scorers.py wrote"
        )
    if values:
        check_threshold(values[0], f"lossy: {text!r}: threshold")
    return Lossy("judge", values, folder)


def typical(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, values: tuple[float, ...]) -> Tensor:
    """p(x) > min(eps, delta exp(-H(p)))."""
    eps, delta = values
    entropy_BN = torch.special.entr(log_p_BNV.exp()).sum(-1)
    least_BN = (delta * (-entropy_BN).exp()).clamp(max=eps)
    return _drafted(log_p_BNV, tree).exp() > least_BN.gather(1, _parents(tree))


def lenience(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, values: tuple[float, ...]) -> Tensor:
    """x counts for p(x) / l."""
    lenient_BN = _drafted(log_p_BNV, tree) - math.log(values[0])
    return _lenient(tree, log_p_BNV, noise, lenient_BN)


def lenience_exp(
    tree: TokenTree, log_p_BNV: Tensor, noise: Noise, values: tuple[float, ...]
) -> Tensor:
    """x counts for p(x)^l."""
    return _lenient(tree, log_p_BNV, noise, _drafted(log_p_BNV, tree) * values[0])


def fuzzy(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, values: tuple[float, ...]) -> Tensor:
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
    return torch.stack([js_BI[:, place[max(p, 0)]] for p in topology.parents], 1) < values[0]


def _lenient(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, lenient_BN: Tensor) -> Tensor:
    """Whether x is accepted when it counts for `lenient_BN` (log) instead of p(x)."""
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


Mask = Callable[[TokenTree, Tensor, Noise, tuple[float, ...]], Tensor]


@dataclass(frozen=True)
class Form:
    """mask: from log p [B, N, V]; count: of numbers, in (0, 1] or from 0; defaults: () for none."""

    mask: Mask
    count: int
    defaults: tuple[float, ...] = ()
    from_zero: bool = False


FORMS = {
    "typical": Form(typical, 2, (0.09, 0.3)),
    "lenience": Form(lenience, 1),
    "lenience-exp": Form(lenience_exp, 1),
    "fuzzy": Form(fuzzy, 1, from_zero=True),
}
