"""How a decoder decodes: everything that may be chosen beside target, drafter and sampling."""

from dataclasses import dataclass, replace

from draftsmith.decode.policies.policy import make_policy
from draftsmith.decode.tree_shapes import DynamicTree, Plan, parse_tree
from draftsmith.decode.verify.lossy import Lossy
from draftsmith.decode.verify.lossy import parse as parse_lossy
from draftsmith.decode.verify.rules import RULES


@dataclass(frozen=True)
class Settings:
    """The decoder's settings.

    K: draft calls a round, by default 4 or what the drafter can; a tree is cut to that depth.
    tree: `chain`, a published tree (`medusa-63`, `eagle-25`), `dynamic:levels,width,nodes`, or a
    JSON file of rank paths. policy: when to stop drafting, see `policy.POLICIES`. rule: a key of
    `verify.RULES`; at temperature 0 every rule is the coupled one. lossy: extra acceptance, see
    `lossy.parse`; it changes the target's law, so it needs allow_lossy. same_shape: draft, but
    accept nothing: plain decoding through the very products that speculative decoding makes, the
    baseline for exact comparison where rounding depends on shapes (bf16). attention: a backend of
    `decode/forward/attention.py`. fast: compiled layers and CUDA graphs, where they work.
    """

    K: int | None = None
    batch_size: int = 1
    rule: str = "coupled"
    tree: str = "chain"
    policy: str = "fixed"
    lossy: str = ""
    allow_lossy: bool = False
    same_shape: bool = False
    attention: str = "auto"
    fast: bool = True

    def __post_init__(self) -> None:
        if self.K is not None and not 1 <= self.K <= 64:
            raise ValueError(f"K: got {self.K}, expected 1 to 64; drafter=None is plain decoding")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}, expected at least 1")
        if self.rule not in RULES:
            raise ValueError(f"rule: got {self.rule!r}, expected one of {sorted(RULES)}")
        plan = self.plan
        make_policy(self.policy, plan)
        info = RULES[self.rule]
        if not info.trees and not plan.is_chain:
            raise ValueError(
                f"rule {self.rule}: got tree={self.tree}, expected a chain; use tree=chain, or "
                "rule=coupled, recursive or traversal for trees"
            )
        if isinstance(plan, DynamicTree) and not info.identical:
            raise ValueError(
                f"rule {self.rule}: got tree={self.tree}, whose nodes are chosen by what was "
                "drawn, which would bias a rule by rejection; use rule=coupled, or a static tree"
            )
        if self.lossy and not self.allow_lossy:
            raise ValueError(
                f"lossy: got {self.lossy!r}, which changes the target's answers; say "
                "allow_lossy=true if that is what you want"
            )
        if self.lossy and not info.masks:
            raise ValueError(
                f"lossy: got {self.lossy!r} with rule {self.rule}, which judges whole paths; use "
                "rule=coupled, or leviathan"
            )
        needs_q = self.acceptance is not None and self.acceptance.needs_q
        if needs_q and isinstance(plan, DynamicTree):
            raise ValueError(
                f"lossy: got {self.lossy!r} with tree={self.tree}, expected a chain or a static "
                "tree, whose draft logits are kept"
            )

    def reaching(self, levels: int) -> "Settings":
        """The same for a drafter of so many levels: without a K, the tree is cut to what it drafts;
        a K of one's own is left for `compatible` to refuse.
        """
        short = self.K is None and levels < self.plan.levels
        return replace(self, K=levels) if short else self

    @property
    def plan(self) -> Plan:
        """The tree asked for, cut to depth K; ValueError for one that can't be read."""
        return parse_tree(self.tree, self.K)

    @property
    def acceptance(self) -> Lossy | None:
        """The extra acceptance asked for."""
        return parse_lossy(self.lossy) if self.lossy else None
