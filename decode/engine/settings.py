"""How a decoder decodes: everything that may be chosen beside target, drafter and sampling, and
what of these doesn't go together, refused before anything is decoded.
"""

import warnings
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import DynamicTree, Plan, parse_tree
from draftsmith.decode.verify.lossy import Lossy
from draftsmith.decode.verify.lossy import parse as parse_lossy
from draftsmith.decode.verify.rules import RULES


@dataclass(frozen=True)
class DecodeSettings:
    """K: draft calls a round, by default 4 or what the drafter can; a tree is cut to that depth.
    tree: `chain`, a published tree (`medusa-63`, `eagle-25`), `dynamic:levels,width,nodes`, or a
    JSON file of rank paths. policy: when to stop drafting, see `choice.POLICIES`. rule: a key of
    `rules.RULES`; at temperature 0 every rule is the coupled one. lossy: extra acceptance, see
    `lossy.parse`; it changes the target's law, so it needs allow_lossy. same_shape: draft, but
    accept nothing: plain decoding through rounds of the same batch and tree, the baseline that
    rounding (bf16) parts least from. attention: a backend of `decode/forward/attention.py`. fast:
    compiled layers and CUDA graphs, where they work.
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

    @classmethod
    def of(cls, settings: Any, **others: Any) -> "DecodeSettings":
        """What a command's settings say under the same names, and others."""
        said: dict[str, Any] = {f.name: getattr(settings, f.name, f.default) for f in fields(cls)}
        return cls(**said | others)

    def __post_init__(self) -> None:
        if self.K is not None and not 1 <= self.K <= 64:
            raise ValueError(f"K: got {self.K}, expected 1 to 64 drafted tokens a round")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}, expected at least 1")
        if self.rule not in RULES:
            raise ValueError(f"rule: got {self.rule!r}, expected one of {sorted(RULES)}")
        plan = self.plan
        policy, info = make_policy(self.policy, plan), RULES[self.rule]
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
        cuts = "any" if policy.share is None else "" if self.lossy else info.cuts
        if not cuts or (cuts == "prefix" and policy.reads_drawn):
            raise ValueError(
                f"policy {self.policy}: got rule={self.rule}, lossy={self.lossy!r}, which parts "
                "chosen so would bias; use rule=coupled, or policy=budget with rule=leviathan or "
                "block, without lossy"
            )
        if self.lossy and not self.allow_lossy:
            raise ValueError(
                f"lossy: got {self.lossy!r}, which changes the target's answers; say "
                "allow_lossy=true if that is what you want"
            )
        if self.acceptance is not None and self.acceptance.masks and not info.masks:
            raise ValueError(
                f"lossy: got {self.lossy!r} with rule {self.rule}, which judges whole paths; use "
                "rule=coupled, or leviathan"
            )
        if self.needs_q and isinstance(plan, DynamicTree):
            raise ValueError(
                f"lossy: got {self.lossy!r} with tree={self.tree}, expected a chain or a static "
                "tree, whose draft logits are kept"
            )

    def reaching(self, levels: int) -> "DecodeSettings":
        """The same for a drafter of so many levels: without a K, the tree is cut to what it drafts;
        a K of one's own is left for `check_drafter` to refuse.
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

    @property
    def needs_q(self) -> bool:
        """Whether it wants the draft's logits."""
        return self.acceptance is not None and self.acceptance.needs_q

    def check_drafter(self, drafter: Drafter, vocab_size: int, context: int) -> None:
        """ValueError for a tree that the drafter can't draft or the context can't hold, or an
        acceptance that needs what the drafter lacks.
        """
        plan = self.plan
        got, of = f"tree: got {self.tree}", f"a drafter of kind {drafter.kind}"
        if not (drafter.trees or plan.is_chain):
            raise ValueError(f"{got} with {of}, which drafts chains only; use tree=chain")
        breadth = plan.width if isinstance(plan, DynamicTree) else 1 + max(map(max, plan.paths))
        if breadth > vocab_size:
            raise ValueError(
                f"{got}, {breadth} children wide, expected at most the vocabulary of {vocab_size}"
            )
        if plan.levels >= context:
            raise ValueError(
                f"{got}, {plan.levels} levels deep, expected less than the context of {context}; "
                "give a smaller K"
            )
        if plan.levels > drafter.levels:
            raise ValueError(
                f"{got}, {plan.levels} levels deep, with {of} that drafts {drafter.levels} tokens "
                f"ahead; give K={drafter.levels} or less, or a flatter tree"
            )
        if plan.slots > drafter.room:
            raise ValueError(
                f"{got}, whose draft takes {plan.slots} slots, with {of} that has room for "
                f"{drafter.room}; give a smaller tree"
            )
        if make_policy(self.policy, plan).share and (drafter.chooses or drafter.likeliest):
            raise ValueError(
                f"policy {self.policy}: got {of}, which learns from every token that is verified; "
                "use policy=auto"
            )
        if self.lossy and drafter.asks:
            raise ValueError(
                f"lossy: got {self.lossy} with {of}, of whose tokens the target has no law, "
                "expected no lossy acceptance"
            )
        if self.needs_q and not drafter.samples:
            raise ValueError(
                f"lossy: got {self.lossy} with {of}, which has no distribution to compare; use "
                "typical or lenience"
            )

    def check_recording(self, drafter: Drafter | None) -> None:
        """ValueError where what is drafted can't be recorded node by node."""
        parted = make_policy(self.policy, self.plan).share is not None
        if drafter is None or not drafter.samples or parted or isinstance(self.plan, DynamicTree):
            raise ValueError(
                f"recording: got tree={self.tree} with drafter="
                f"{None if drafter is None else drafter.kind}, policy={self.policy}, expected a "
                "drafter with a q, and a chain or a static tree that is verified whole"
            )
        if self.rule not in ("coupled", "point_mass", "leviathan"):
            raise ValueError(
                f"recording: got rule={self.rule}, which judges whole paths; expected one that "
                "judges token by token: coupled, or leviathan"
            )

    def check_rule(self, drafter: Drafter | None, params: SamplingParams, identical: bool) -> None:
        """ValueError for a rule by rejection where answers must be plain decoding's, or without
        draws to reject; a warning for an acceptance head that learned from other draws. identical:
        of the rule that will be used at this temperature.
        """
        if drafter is not None and drafter.acceptance is not None and "acceptance" in self.policy:
            now = {"rule": self.rule, **asdict(params)}
            traced = drafter.acceptance.about.get("traced", {})
            differ = [
                f"{name} {was}, now {now[name]}"
                for name, was in sorted(traced.items())
                if now.get(name, was) != was
            ]
            if differ:
                warnings.warn(
                    f"policy acceptance: its head learned from {'; '.join(differ)}: answers stay "
                    "as they are, its chances may be off; train one on traces of this, or tune it",
                    stacklevel=4,
                )
        if self.policy.startswith("exits") and drafter is not None and not identical:
            raise ValueError(
                f"policy exits: got rule={self.rule} at temperature {params.temperature:g}, "
                "expected rule=coupled, by whose noise every exit knows what of it would be kept"
            )
        if self.same_shape and not identical:
            raise ValueError(
                f"same_shape: got rule={self.rule} at temperature {params.temperature:g}, expected "
                "a rule whose answers are plain decoding's; use rule=coupled"
            )
        if drafter is not None and not (identical or drafter.samples):
            raise ValueError(
                f"rule {self.rule}: got a drafter of kind {drafter.kind}, which draws from no "
                "distribution; use rule=coupled for this drafter"
            )
