"""What to draft: the shapes that a round's tree may be asked to have.

A static tree is a set of rank paths: (0, 2) is the third-best child of the best child of the root.
A dynamic tree (EAGLE-2, Li et al., arXiv 2406.16858) chooses its nodes by the draft's confidence.

Shapes: B rows, N nodes, F of them fed to the draft in one call, C children drawn from these.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from math import prod
from pathlib import Path as File

import torch
from torch import Tensor

from draftsmith.decode.token_tree import Topology

RankPath = tuple[int, ...]
MAX_NODES = 512


@dataclass(frozen=True)
class Level:
    """One draft call of a static tree. fed_F: nodes fed; the children they get are nodes
    first..first + C - 1: of_C says of which fed node each is, rank_C its rank there, order_C its
    place among its siblings; breadth and siblings: the largest of these, plus one.
    """

    fed_F: Tensor
    of_C: Tensor
    rank_C: Tensor
    order_C: Tensor
    first: int
    breadth: int
    siblings: int


@dataclass(frozen=True)
class StaticTree:
    """Rank paths in order of depth, then of rank; each one's beginning is among them. by: which of
    a drafter's `ways` drafts it, 0 for its usual one.
    """

    paths: tuple[RankPath, ...]
    by: int = 0

    @classmethod
    def from_paths(cls, paths: Iterable[RankPath]) -> "StaticTree":
        """The tree of these paths in any order; ValueError for one that hangs in the air."""
        found = {tuple(path) for path in paths}
        for path in sorted(found):
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in found):
                raise ValueError(
                    f"tree: got the path {list(path)} without {list(path[:-1])}, expected ranks "
                    "from 0 up and every path's beginning; add it"
                )
        if not 0 < len(found) < MAX_NODES:
            raise ValueError(f"tree: got {len(found)} paths, expected 1 to {MAX_NODES - 1}")
        return cls(tuple(sorted(found, key=lambda path: (len(path), path))))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.paths, self.by))

    @property
    def levels(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        """The root included."""
        return len(self.paths) + 1

    @property
    def slots(self) -> int:
        """Slots beyond the committed ones that a draft with a KV needs."""
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return self.levels == len(self.paths)

    @property
    def fed(self) -> tuple[int, ...]:
        """Nodes fed in each draft call: those of a level that have children."""
        inner = {path[:-1] for path in self.paths}
        return tuple(sum(len(path) == depth for path in inner) for depth in range(self.levels))

    def cut(self, levels: int) -> "StaticTree":
        """The tree without what lies deeper than `levels`."""
        if levels >= self.levels:
            return self
        return replace(self, paths=tuple(path for path in self.paths if len(path) <= levels))

    def within(self, nodes: int) -> "StaticTree":
        """Its first nodes."""
        return replace(self, paths=self.paths[: nodes - 1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        number = {path: i for i, path in enumerate(self.paths, 1)} | {(): 0}
        return (-1, *(number[path[:-1]] for path in self.paths))


@dataclass(frozen=True)
class DynamicTree:
    """levels draft calls; each feeds the `width` most promising new nodes and takes as many
    children of each; in the end the `nodes` best of all, the root included, are kept.

    sharpness: what the draft's scores are multiplied by before their softmax is taken for the
    chance that a node is kept. 1 is EAGLE-2; a draft whose best guess comes true more often than it
    says wants more (`calibrate` fits it): with 4 levels and 16 nodes the quickstart's pair has tau
    4.14 at temperature 0 and 3.76 at 1 with it, 4.49 and 4.01 with 2. by: as of `StaticTree`.
    """

    levels: int
    width: int
    nodes: int
    sharpness: float = 1.0
    by: int = field(default=0, kw_only=True)

    is_chain = False

    def __post_init__(self) -> None:
        most = min(self.most(self.levels), MAX_NODES)
        if min(self.levels, self.width) < 1 or not 2 <= self.nodes <= most:
            raise ValueError(
                f"tree: got dynamic:{self.levels},{self.width},{self.nodes}, expected levels and "
                f"width of at least 1, and 2 to {most} nodes"
            )
        if not 0 < self.sharpness < 100:
            raise ValueError(f"tree: got sharpness {self.sharpness}, expected a number above 0")

    @property
    def slots(self) -> int:
        return 1 + self.levels * self.width

    @property
    def fed(self) -> tuple[int, ...]:
        """Nodes fed in each draft call."""
        return 1, *[self.width] * (self.levels - 1)

    def most(self, levels: int) -> int:
        """Nodes there can be in so many levels."""
        return 1 + self.width + (levels - 1) * self.width**2

    def cut(self, levels: int) -> "DynamicTree":
        levels = min(levels, self.levels)
        return replace(self, levels=levels, nodes=min(self.nodes, self.most(levels)))

    def within(self, nodes: int) -> "DynamicTree":
        return replace(self, nodes=min(self.nodes, nodes))


Plan = StaticTree | DynamicTree


def chain_plan(levels: int) -> StaticTree:
    """`levels` tokens in a row."""
    return StaticTree(tuple((0,) * depth for depth in range(1, levels + 1)))


def parse_tree(text: str, K: int | None) -> Plan:
    """`chain`, a name of PUBLISHED, `dynamic:levels,width,nodes`, `kary:4,2,2` (so many children of
    each node, level by level) or a JSON file of rank paths, cut to depth K; a chain without a K has
    4 levels. ValueError for anything else.
    """
    if text == "chain":
        return chain_plan(4 if K is None else K)
    name, _, numbers = text.partition(":")
    plan: Plan
    if name == "dynamic":
        try:
            levels, width, nodes, *sharpness = numbers.split(",")
            plan = DynamicTree(int(levels), int(width), int(nodes), *map(float, sharpness[:1]))
        except ValueError as error:
            form = "expected dynamic:levels,width,nodes, and a sharpness if you like"
            raise ValueError(f"tree: got {text!r} ({error}); {form}") from None
    elif name == "kary":
        counts = [int(count) if count.isdecimal() else 0 for count in numbers.split(",")]
        if not 0 < prod(counts) < MAX_NODES:
            raise ValueError(
                f"tree: got {text!r}, expected kary:4,2,2, the children of each node by level, and "
                f"fewer than {MAX_NODES} nodes"
            )
        plan = StaticTree.from_paths(
            path
            for depth in range(1, len(counts) + 1)
            for path in product(*map(range, counts[:depth]))
        )
    elif text in PUBLISHED:
        # Ranks of the children along each path: "02" is (0, 2).
        plan = StaticTree.from_paths(tuple(map(int, word)) for word in PUBLISHED[text].split())
    elif File(text).is_file():
        plan = read_tree(File(text))
    else:
        raise ValueError(
            f"tree: got {text!r}, expected chain, {', '.join(PUBLISHED)}, "
            "dynamic:levels,width,nodes, kary:4,2,2, or a JSON file of rank paths, "
            "[[0], [1], [0, 0]]"
        )
    return plan if K is None else plan.cut(K)


def read_tree(file: File) -> StaticTree:
    """A JSON list of rank paths, as Medusa and EAGLE publish them (`calibrate` writes it too)."""
    try:
        rows = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"tree: {file} is no JSON ({error})") from None
    if isinstance(rows, dict):
        rows = rows.get("paths")
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not lists or not all(isinstance(rank, int) for row in rows for rank in row):
        raise ValueError(f"tree: {file} holds no list of rank paths, [[0], [1], [0, 0]]")
    return StaticTree.from_paths(tuple(row) for row in rows)


def rank_path(plan: Plan | None, nodes: list[int]) -> tuple[int, ...]:
    """The rank path of the last node kept; of a dynamic tree, what is said of the nodes; zeros of
    nodes that aren't the plan's own.
    """
    if not isinstance(plan, StaticTree):
        return tuple(nodes)
    path = plan.paths[nodes[-1] - 1] if nodes else ()
    return path if len(path) == len(nodes) else (0,) * len(nodes)


@cache  # recordings of rounds read these tensors: none may go
def static_topology(tree: StaticTree, device: torch.device) -> Topology:
    """Its topology on a device, made once."""
    return Topology.from_parents(tree.parents, device)


@cache
def static_levels(tree: StaticTree, device: torch.device) -> tuple[Level, ...]:
    """Its draft calls on a device, made once."""
    paths = ((), *tree.paths)
    found = []
    for depth in range(tree.levels):
        children = [node for node, path in enumerate(paths) if len(path) == depth + 1]
        fed = sorted({tree.parents[node] for node in children})
        of = [fed.index(tree.parents[node]) for node in children]
        rank = [paths[node][-1] for node in children]
        order = [of[:i].count(parent) for i, parent in enumerate(of)]
        fed_F, of_C, rank_C, order_C = (
            torch.tensor(values, device=device) for values in (fed, of, rank, order)
        )
        level = Level(fed_F, of_C, rank_C, order_C, children[0], max(rank) + 1, max(order) + 1)
        found.append(level)
    return tuple(found)


@cache
def dynamic_slots(width: int, levels: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of dynamic trees of so many levels: the depths of the nodes fed, in order of their slots, and
    of all candidates; and the nodes of a level, each marked for itself.
    """
    fed = [0, *(depth for depth in range(1, levels + 1) for _ in range(width))]
    all_C = [0, *fed[1 : width + 1], *(depth for depth in fed[width + 1 :] for _ in range(width))]
    eye_FF = torch.eye(width, dtype=torch.bool, device=device)
    return torch.tensor(fed, device=device), torch.tensor(all_C, device=device), eye_FF


@cache
def ranks(tree: StaticTree, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Of its nodes but the root: depths from 0 on, and ranks; and the most ranks."""
    level, rank = zip(*((len(path) - 1, path[-1]) for path in tree.paths), strict=True)
    return torch.tensor(level, device=device), torch.tensor(rank, device=device), max(rank) + 1


# The trees that the papers' own code ships, as ranks of the children along each path.
PUBLISHED = {
    "medusa-63": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 "
        "31 40 50 60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 "
        "040 050 060 070 100 101 200 0000 0001"
    ),
    "eagle-25": (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
}
