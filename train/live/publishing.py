"""When a draft that learns is served: only once it is better, and no longer than it is.

Better means: on the newest requests that are never trained on, alpha is higher than that of the
version that serves, on the same rows, by more than `margin` at the lower end of a 95% interval
(bootstrap over requests, paired, with a fixed seed). Served answers are the target's either way;
what is at stake is speed.

What that slice can't see (weights saved wrongly, a server that drafts otherwise) the traffic does:
once new versions have served enough requests, what they accepted is compared with what was accepted
before them, and where it is less, the last version that passed is served again. What the serving
version's own alpha loses from the ones to the others (a new topic) doesn't count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftsmith.decode.evaluate.metrics import paired_difference
from draftsmith.decode.serve.buffer import ReplayBuffer
from draftsmith.decode.serve.versions import Versions
from draftsmith.train.live.batches import Alpha, still_there
from draftsmith.train.live.learner import OnlineDrafts

Told = tuple[int, dict[str, Any]]  # a request's number, and what the head of its file says


@dataclass(kw_only=True)
class Publishing:
    """The group `publish` of a recipe: when a version is published, and taken back."""

    heldout_requests: int = 32  # the newest that are measured on
    heldout_least: int = 8  # fewer decide nothing
    margin: float = 0.0  # of alpha, that the lower end of the gain's interval must pass
    rollback_requests: int = 32  # before and after a swap
    rollback_drop: float = 0.05  # of accepted / drafted in use, beyond what alpha explains


@dataclass(eq=False)
class Publisher:
    """The evaluation of a learning draft: measures it, publishes it, takes it back."""

    config: Publishing
    buffer: ReplayBuffer
    versions: Versions
    drafts: OnlineDrafts
    tell: Callable[[str], None]  # prints a line

    def __post_init__(self) -> None:
        config, kept = self.config, self.versions.kept()
        if config.heldout_least < 2 or config.rollback_requests < 1:
            raise ValueError(
                f"got heldout_least={config.heldout_least}, rollback_requests="
                f"{config.rollback_requests}, expected at least 2 and 1"
            )
        self._serve()
        # What was published and not judged in use, what that is compared with, what didn't pass.
        self.unjudged = {self.version} - {0}
        self.trusted = max((v for v in kept if v < self.version), default=0)
        self.bad: set[int] = set()

    def __call__(self) -> dict[str, float]:
        """Roll back or publish where that is due. `version`: the one that serves now; `published`:
        the newest one; and alpha of both sides where there was enough to measure on.
        """
        self._roll_back()
        figures = self._compare()
        published = max(self.versions.kept(), default=0)
        return {"published": published, "version": self.version, **figures}

    def _serve(self) -> None:
        """Measure against what is current from now on."""
        self.version, path = self.versions.current()
        self.drafts.serve(path)
        self._known: dict[int, Alpha] = {}

    def _compare(self) -> dict[str, float]:
        config = self.config
        numbers = self.buffer.heldout_numbers()[-config.heldout_requests :]
        rows: dict[int, tuple[float, ...]] = {}
        for number, served in still_there(self.buffer.read, numbers):
            ours = self.drafts.candidate(served)
            if number not in self._known:
                self._known[number] = self.drafts.serving(served)
            if ours[1]:
                rows[number] = (*ours, *self._known[number])
        if len(rows) < config.heldout_least:
            return {}
        self._known = {number: (top, bottom) for number, (_, _, top, bottom) in rows.items()}
        a, b, c, d = zip(*rows.values(), strict=True)
        gain, (low, high) = paired_difference((a, b), (c, d))
        alpha, serving = sum(a) / sum(b), sum(c) / sum(d)
        if low > config.margin:
            why = f"alpha +{gain:.4f} [{low:.4f}, {high:.4f}] on {len(rows)} held-out requests"
            version = self.versions.publish(
                lambda path: self.drafts.save(path, alpha), why, spare=self.trusted
            )
            self.tell(f"version {version} serves: {why}")
            self.unjudged.add(version)
            self._serve()
        return {"alpha": alpha, "alpha_serving": serving, "gain": gain, "gain_low": low}

    def _roll_back(self) -> None:
        """Judge versions that have served enough; take them back if less is accepted now."""
        many = self.config.rollback_requests
        before, after = self._in_use(many) if self.unjudged else ([], [])
        if len(after) < many:
            return
        served = {about["version"] for _, about in after}
        was, now = _accepted(before), _accepted(after)
        lost = was - now
        if lost > self.config.rollback_drop:
            lost -= max(0.0, self._alpha_of(before) - self._alpha_of(after))
        # So few before them (at the very beginning) that they tell nothing: they pass.
        if lost <= self.config.rollback_drop or 2 * len(before) < many:
            self.trusted = max(served)
            self.unjudged -= served
            return
        self.bad |= self.unjudged
        names = ", ".join(map(str, sorted(served)))
        why = f"version {names} accepts {now:.3f} of what it drafts, before it {was:.3f}"
        if self.trusted not in self.versions.kept():
            self.trusted = 0
        self.versions.point(self.trusted, why)
        self.tell(f"version {self.trusted} serves again: {why}")
        self.unjudged = set()
        self._serve()
        self.drafts.go_back()

    def _in_use(self, many: int) -> tuple[list[Told], list[Told]]:
        """The newest requests that judged versions served, and all that unjudged ones did."""
        before: list[Told] = []
        after: list[Told] = []
        newest = reversed(self.buffer.all_numbers())
        for number, about in still_there(self.buffer.about, newest):
            if about["version"] in self.unjudged:
                after.append((number, about))
            elif about["version"] not in self.bad:
                before.append((number, about))
            if len(before) == many:
                break
        return before, after

    def _alpha_of(self, served: list[Told]) -> float:
        """Of the version that serves, on these requests."""
        kept = still_there(self.buffer.read, [number for number, _ in served])
        rows = [self.drafts.serving(request) for _, request in kept]
        return sum(top for top, _ in rows) / sum(bottom for _, bottom in rows) if rows else 0.0


def _accepted(served: list[Told]) -> float:
    drafted = sum(about["drafted"] for _, about in served)
    return sum(about["accepted"] for _, about in served) / max(1, drafted)
