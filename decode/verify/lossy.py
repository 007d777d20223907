"""Masks of nodes to accept whatever the rule says, and other laws for it to verify against. Each
changes the law of the answers.

    typical:0.09,0.3  p(x) > min(eps, delta exp(-H(p))): Medusa's typical acceptance (Cai et al.,
                      arXiv 2401.10774, after truncation sampling); these two are the defaults
    lenience:l        Leviathan et al. (arXiv 2211.17192, A.5). Greedy: p(x) >= l max p. Of a chain
                      judged by rejection: u < p(x) / (l q(x)). DistillSpec (arXiv 2310.08461) calls
                      it f_lin; its f_sq is lenience:l^2
    lenience-exp:l    the same with p(x)^l in the place of p(x) / l: DistillSpec's f_exp
    fuzzy:t           the Jensen-Shannon divergence (nats) of p and q at the parent is under t:
                      fuzzy speculative decoding (Holsman et al., arXiv 2502.20704); fuzzy:kl,t and
                      fuzzy:tv,t by KL(q || p) and by total variation
    top-beta:b,t      x is among the target's b best, log p(x) >= log max p - t: generalized
                      aggressive decoding (Xia et al., arXiv 2203.16487); top-beta:1,0 is greedy
    judge:FOLDER,t    a linear head on the target's state at x finds, above t, that x does no harm:
                      judge decoding (Bachmann et al., arXiv 2501.19309); without t at the folder's
                      own threshold
    rapid:eta, cascade:RULE,a    another law than p: see `cascades`

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

from draftsmith.decode.sampling import BatchParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.verify import cascades
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
    """One way to accept more: a key of `FORMS`, its numbers and the word beside them; of a judge
    its folder, and once it is `ready` the judge.
    """

    name: str
    values: tuple[float, ...]
    folder: str = ""
    judge: Judge | None = field(default=None, repr=False, compare=False)
    word: str = ""

    @property
    def masks(self) -> bool:
        """Whether it is a `mask`; else a `law`."""
        return self.name == "judge" or FORMS[self.name].law is None

    @property
    def needs_q(self) -> bool:
        """Whether the tree must carry the draft's logits, whatever the rule."""
        return self.name == "fuzzy" or not self.masks

    def law(self, tree: TokenTree, p_logits_BNV: Tensor, params: BatchParams) -> Tensor:
        """Logits [B, N, V] of the law that a rule is to verify against: pi where children were
        drawn, p at leaves, and where the draft's logits are NaN. ValueError as of `mask`.
        """
        topology, form = tree.topology, FORMS.get(self.name)
        if form is None or form.law is None or topology.levels == 0:
            return p_logits_BNV
        p_BIV, q_BIV = _where_drawn(self.name, tree, p_logits_BNV)
        pi_BIV = form.law(p_BIV, q_BIV, params, *self.values, *filter(None, [self.word]))
        pi_BIV = torch.where(q_BIV.isnan().any(-1, keepdim=True), p_BIV, pi_BIV)
        laws = list(p_logits_BNV.unbind(1))
        for node, law_BV in zip(topology.inner, pi_BIV.unbind(1), strict=True):
            laws[node] = law_BV
        return torch.stack(laws, 1)

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
            form = FORMS[self.name].mask
            assert form is not None, f"{self} is a law, not a mask"
            mask_BN = form(tree, log_p_BNV, noise, *self.values, *filter(None, [self.word]))
        return mask_BN & (tree.topology.depth > 0)

    def ready(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "Lossy":
        """The same with what it reads from disk, for this target; errors of `load_judge` pass."""
        if not self.folder:
            return self
        threshold = self.values[0] if self.values else None
        return replace(self, judge=load_judge(self.folder, threshold, target, tokenizer))

    def __str__(self) -> str:
        said = filter(None, (self.folder, self.word, *map(repr, self.values)))
        return f"{self.name}:{','.join(said)}"


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
    said = tail.split(",")
    word = next((part for part in said if part and part in form.words), "")
    numbers = ",".join(part for part in said if part != (word or None))
    values = _numbers(numbers) if colon else form.defaults
    fits = all(form.low < value <= form.high or value == form.least for value in values)
    if len(values) != form.count or not fits or word not in form.words:
        words = f"one of {list(filter(None, form.words))} and " if any(form.words) else ""
        raise ValueError(
            f"lossy: got {text!r}, expected {words}{form.count} number(s) in "
            f"{'(' if form.least is None else '['}{form.low:g}, {form.high:g}] after '{name}:'"
        )
    return Lossy(name, values, word=word)


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


def fuzzy(
    tree: TokenTree, log_p_BNV: Tensor, noise: Noise, limit: float, word: str = "js"
) -> Tensor:
    """The divergence of p and q at the parent < t; JS as H((p + q) / 2) - (H(p) + H(q)) / 2."""
    log_p_BIV, q_logits_BIV = _where_drawn("fuzzy", tree, log_p_BNV)
    entropy, log_q_BIV = torch.special.entr, q_logits_BIV.log_softmax(-1)
    p_BIV, q_BIV = log_p_BIV.exp(), log_q_BIV.exp()
    if word == "tv":
        far_BI = (p_BIV - q_BIV).abs().sum(-1) / 2
    elif word == "kl":
        far_BI = torch.where(q_BIV > 0, q_BIV * (log_q_BIV - log_p_BIV), 0.0).sum(-1)
    else:
        own_BI = (entropy(p_BIV) + entropy(q_BIV)).sum(-1) / 2
        far_BI = entropy((p_BIV + q_BIV) / 2).sum(-1) - own_BI
    # Rounding must not make it negative: a threshold of 0 accepts nothing.
    far_BI = far_BI.clamp(min=0)
    place = {node: i for i, node in enumerate(tree.topology.inner)}
    parents = tree.topology.parents or ()
    return torch.stack([far_BI[:, place[max(p, 0)]] for p in parents], 1) < limit


def top_beta(tree: TokenTree, log_p_BNV: Tensor, noise: Noise, best: float, gap: float) -> Tensor:
    """Fewer than b tokens are better than x, and none by more than t."""
    own_BN = _drafted(log_p_BNV, tree)
    law_BNV = log_p_BNV.gather(1, _parents(tree)[..., None].expand_as(log_p_BNV))
    better_BN = (law_BNV > own_BN[..., None]).sum(-1)
    return (better_BN < best) & (own_BN >= law_BNV.amax(-1) - gap)


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


def _where_drawn(name: str, tree: TokenTree, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """What is said of p at the nodes whose children were drawn, [B, I, V], and q's logits there."""
    topology = tree.topology
    if topology.parents is None or tree.q_logits_BIV is None:
        raise ValueError(
            f"lossy {name}: got a tree without the draft's q, expected a chain or a static tree of "
            "a drafter with logits; use typical or lenience"
        )
    return torch.stack([p_BNV[:, node] for node in topology.inner], 1), tree.q_logits_BIV


def _parents(tree: TokenTree) -> Tensor:
    """Each node's parent [B, N]; the root's is itself."""
    return tree.topology.parent.clamp(min=0).expand_as(tree.tokens_BN)


def _drafted(x_BNV: Tensor, tree: TokenTree) -> Tensor:
    """x [B, N] of each node's token at its parent."""
    rows_B1 = torch.arange(x_BNV.shape[0], device=x_BNV.device)[:, None]
    return x_BNV[rows_B1, _parents(tree), tree.tokens_BN]


@dataclass(frozen=True)
class Form:
    """mask: of a tree, log p [B, N, V], the noise, `count` numbers above `low` (or its `least`) up
    to `high`, and one of `words`; law: of the logits p and q [B, I, V], the sampling and the same.
    defaults: () for none.
    """

    mask: Callable[..., Tensor] | None
    count: int
    defaults: tuple[float, ...] = ()
    low: float = 0
    high: float = 1
    least: float | None = None
    law: Callable[..., Tensor] | None = None
    words: tuple[str, ...] = ("",)


FORMS = {
    "typical": Form(typical, 2, (0.09, 0.3)),
    "lenience": Form(lenience, 1),
    "lenience-exp": Form(partial(lenience, power=True), 1),
    "fuzzy": Form(fuzzy, 1, least=0, words=("", "js", "kl", "tv")),
    "top-beta": Form(top_beta, 2, high=1e6, least=0),
    "rapid": Form(None, 1, high=100, least=0, law=cascades.rapid),
    "cascade": Form(None, 1, low=-1, least=-1, law=cascades.cascade, words=cascades.RULES),
}
