"""What goes together: settings, drafter, sampling. Refused before anything is decoded."""

import warnings
from dataclasses import asdict

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.engine.settings import Settings
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import DynamicTree
from draftsmith.models.scorers import Scored


def check_drafter(settings: Settings, drafter: Drafter, vocab_size: int, context: int) -> None:
    """ValueError for a tree that the drafter can't draft or the context can't hold, or an
    acceptance that needs what the drafter lacks.
    """
    tree, plan, acceptance = settings.tree, settings.plan, settings.acceptance
    if not (drafter.trees or plan.is_chain):
        raise ValueError(
            f"tree: got {tree} with a drafter of kind {drafter.kind}, which drafts chains only; "
            "use tree=chain"
        )
    breadth = plan.width if isinstance(plan, DynamicTree) else 1 + max(map(max, plan.paths))
    if breadth > vocab_size:
        raise ValueError(
            f"tree: got {tree}, {breadth} children wide, expected at most the vocabulary of "
            f"{vocab_size}"
        )
    if plan.levels >= context:
        raise ValueError(
            f"tree: got {tree}, {plan.levels} levels deep, expected less than the context of "
            f"{context}; give a smaller K"
        )
    if plan.levels > drafter.levels:
        raise ValueError(
            f"tree: got {tree}, {plan.levels} levels deep, with a drafter of kind {drafter.kind} "
            f"that drafts {drafter.levels} tokens ahead; give K={drafter.levels} or less, or a "
            "flatter tree"
        )
    if acceptance is not None and acceptance.needs_q and not drafter.samples:
        raise ValueError(
            f"lossy: got {acceptance} with a drafter of kind {drafter.kind}, which has no "
            "distribution to compare; use typical or lenience"
        )


def check_acceptance(drafter: Drafter) -> Scored:
    """The drafter's acceptance head; ValueError where it has none."""
    if drafter.acceptance is None:
        raise ValueError(
            f"policy acceptance: got a drafter of kind {drafter.kind} without an acceptance head, "
            "expected one in its folder's acceptance/; train one with train/scorers.py, or use "
            "policy=confidence"
        )
    return drafter.acceptance


def check_recording(settings: Settings, drafter: Drafter | None) -> None:
    """ValueError where what is drafted can't be recorded node by node."""
    judged = settings.rule in ("coupled", "point_mass", "leviathan")
    if drafter is None or not drafter.samples or isinstance(settings.plan, DynamicTree):
        raise ValueError(
            f"recording: got tree={settings.tree} with drafter="
            f"{None if drafter is None else drafter.kind}, expected a drafter with a q, and a "
            "chain or a static tree"
        )
    if not judged:
        raise ValueError(
            f"recording: got rule={settings.rule}, which judges whole paths; expected one that "
            "judges token by token: coupled, or leviathan"
        )


def check_rule(
    settings: Settings, drafter: Drafter | None, params: SamplingParams, *, identical: bool
) -> None:
    """ValueError for a rule by rejection where answers must be plain decoding's, or without draws
    to reject; a warning for an acceptance head that learned from other draws. identical: of the
    rule that will be used at this temperature.
    """
    if drafter is not None and drafter.acceptance is not None and "acceptance" in settings.policy:
        now = {"rule": settings.rule, **asdict(params)}
        traced = drafter.acceptance.about.get("traced", {})
        differ = [
            f"{name} {was}, now {now[name]}"
            for name, was in sorted(traced.items())
            if now.get(name, was) != was
        ]
        if differ:
            warnings.warn(
                f"policy acceptance: its head learned from {'; '.join(differ)}: answers stay as "
                "they are, its chances may be off; train one on traces of this, or tune it",
                stacklevel=4,
            )
    if settings.same_shape and not identical:
        raise ValueError(
            f"same_shape: got rule={settings.rule} at temperature {params.temperature:g}, expected "
            "a rule whose answers are plain decoding's; use rule=coupled"
        )
    if drafter is not None and not (identical or drafter.samples):
        raise ValueError(
            f"rule {settings.rule}: got a drafter of kind {drafter.kind}, which draws from no "
            "distribution; use rule=coupled for this drafter"
        )
