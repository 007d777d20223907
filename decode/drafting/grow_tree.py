"""Growing a round's tree, level by level, from any model that gives logits for fed nodes.

Whatever the law, a node's children are the best of its scores: log q alone (deterministic), log q
minus the noise that the target will use (coupled), or minus noise of their own (draws with and
without replacement; the best k under one exponential race are k draws without replacement). Or all
but the last are the best by log q alone, and that one is drawn from the rest (last drawn).

Shapes: B rows, N nodes, F of them fed in one call, M slots of the block drafted so far, C children,
V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.drafting.base import Call, Fed, Feed, Frontier, Round, picked
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.native import ChainStart, NativeBody
from draftsmith.decode.forward.product import BEST, VocabHead
from draftsmith.decode.sampling import likeliest, log_race, position_keys, unfiltered
from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    LAST_DRAWN,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.tree_shapes import (
    DynamicTree,
    Level,
    StaticTree,
    dynamic_slots,
    ranks,
    static_levels,
    static_topology,
)


def grow(
    request: Round, feed: Feed, head: VocabHead | None = None
) -> tuple[TokenTree, Tensor | None]:
    """The tree that `request` asks for; and, where it isn't the node's own number, the slot [B, N]
    beyond the committed ones in which each node was fed (of a node that wasn't: any). head: what
    multiplies the states that `feed` gives.
    """
    feed = corrected(request, feed, head)
    if isinstance(request.plan, DynamicTree):
        return grow_dynamic(request, request.plan, feed)
    return grow_static(request, request.plan, feed), None


def corrected(request: Round, feed: Feed, head: VocabHead | None) -> Feed:
    """What feeds nodes by a head with a preview: with the exact logits of those tokens too that win
    by the round's noise. As it is without one, or where the logits are to be a law, which must not
    know what it is drawn by.
    """
    if head is None or head.preview is None or request.race_BDV is None or request.want_q:
        return feed

    def fed(frontier: Frontier) -> Fed:
        logits_BFV, states_BFH = feed(frontier)
        scores_BFV = _scores(request, request.params.transform(logits_BFV), frontier.depth)
        best_BFM = scores_BFV.topk(min(BEST, logits_BFV.shape[-1])).indices
        return Fed(head.corrected(logits_BFV, states_BFH, best_BFM), states_BFH)

    return fed


def by_depth(made: Callable[[], Fed]) -> Feed:
    """What feeds nodes that share one law a depth: the first call makes all of them [B, K, ...]."""
    drafted: list[Fed] = []

    def feed(frontier: Frontier) -> Fed:
        if frontier.depth == 0:
            drafted.append(made())
        like = (-1, frontier.tokens_BF.shape[1], -1)
        return Fed(*(x_BKX[:, frontier.depth, None].expand(like) for x_BKX in drafted[-1]))

    return feed


def at_once(request: Round, native: NativeBody | None, head: VocabHead) -> NativeBody | None:
    """What drafts all of a round in one call, if there is such a thing, and the round asks for a
    `best_chain`.
    """
    drafts = native and best_chain(request) and native.drafts(head, len(request.lens_B))
    return native if drafts else None


def best_chain(request: Round) -> bool:
    """Whether a round asks for a chain of best tokens, by one temperature and no filters, and for
    no word of the calls.
    """
    return request.plan.is_chain and plain(request) and unfiltered(request.params)


def plain(request: Round) -> bool:
    """Whether a round asks for best tokens, and for no word of the calls."""
    watched = (request.calls, request.enough, request.chance) != (None, None, None)
    return request.law in (COUPLED, DETERMINISTIC) and not (watched or request.want_q)


def grow_at_once(
    request: Round,
    native: NativeBody,
    head: VocabHead,
    pool: KVPool,
    context: int,
    first_BH: Tensor | None,
    carried: Tensor | None,
    at_B: Tensor,
) -> TokenTree:
    """The chain that `grow` would come to, in one call; see `ChainStart`, without `first` from the
    pending tokens on.
    """
    steps, race_BDV = request.plan.levels, request.race_BDV
    race_BKV = None if race_BDV is None else race_BDV[:, :steps]
    drawn = race_BKV, request.params.law[0], context
    fed_B = None if first_BH is not None else request.pending_B.contiguous()
    start = ChainStart(first_BH, carried, at_B, *drawn, fed_B)
    tokens_BK, sure_BK = native.chain(head, pool, start, steps, sure=request.sure)
    tokens_BN = torch.cat([request.pending_B[:, None], tokens_BK], 1)
    sure_BN = None if sure_BK is None else F.pad(sure_BK, (1, 0))
    return TokenTree(tokens_BN, chain(steps, tokens_BN.device), request.law, sure_BN=sure_BN)


def grow_known(request: Round, logits: Callable[[], Tensor]) -> TokenTree | None:
    """The tree that `grow` would come to where all nodes of a depth share one law, by these raw
    logits [B, K, V]; None for rounds that it is not for.
    """
    plan, race_BDV, device = request.plan, request.race_BDV, request.pending_B.device
    if not isinstance(plan, StaticTree) or not plain(request):
        return None
    scores_BKV = request.params.transform(logits())
    if race_BDV is not None and request.law == COUPLED:
        scores_BKV = scores_BKV - race_BDV[:, : plan.levels]
    if plan.is_chain:
        topology, drawn_BN = chain(plan.levels, device), scores_BKV.argmax(-1)
    else:
        topology, (level_N, rank_N, breadth) = static_topology(plan, device), ranks(plan, device)
        drawn_BN = likeliest(scores_BKV, breadth)[1][:, level_N, rank_N]
    tokens_BN = torch.cat([request.pending_B[:, None], drawn_BN], 1)
    sure_BN = F.pad(_sure(scores_BKV), (1, 0)) if request.sure else None
    return TokenTree(tokens_BN, topology, request.law, sure_BN=sure_BN)


def grow_static(request: Round, plan: StaticTree, feed: Feed) -> TokenTree:
    """Draft call by draft call, until every row has enough or the plan ends."""
    device = request.pending_B.device
    tokens_BN = request.pending_B[:, None]
    path_BN = joint_BN = torch.zeros_like(tokens_BN, dtype=torch.float32)
    q_logits, drafted, sure = [], 0, [path_BN]
    for depth, level in enumerate(static_levels(plan, device)):
        q_logits_BFV, states_BFH = feed(_static_frontier(plan, depth, level, tokens_BN))
        q_logits_BFV = request.params.transform(q_logits_BFV)
        of_BFV = _drawn_from(request, q_logits_BFV, level)
        children_BC = _draw(request, of_BFV, depth, level)
        if request.law == LAST_DRAWN:
            children_BC = _given(q_logits_BFV, children_BC, level)
        if request.want_q:
            q_logits.append(of_BFV)
        if request.sure:
            sure.append(_sure(_scores(request, q_logits_BFV, depth)))
        tokens_BN = torch.cat([tokens_BN, children_BC], 1)
        drafted = depth + 1
        if request.calls is None and (request.enough is None or drafted == plan.levels):
            continue
        of_BC = level.of_C.expand_as(children_BC)
        call = _call(request, depth, Fed(q_logits_BFV, states_BFH), of_BC, children_BC)
        if request.chance is not None or request.calls is not None:
            call.above_BF = joint_BN[:, level.fed_F]
            joint_BN = torch.cat([joint_BN, call.joint_BC], 1)
        if request.chance is not None:
            above_BC = path_BN[:, level.fed_F[level.of_C]]
            call.path_BC = above_BC + request.chance(call)
            path_BN = torch.cat([path_BN, call.path_BC], 1)
        if drafted < plan.levels and _enough(request, call):
            break
    plan = plan.cut(drafted)
    topology = chain(drafted, device) if plan.is_chain else static_topology(plan, device)
    q_logits_BIV = torch.cat(q_logits, 1) if request.want_q else None
    sure_BN = torch.cat(sure, 1) if request.sure else None
    return TokenTree(tokens_BN, topology, request.law, q_logits_BIV, sure_BN=sure_BN)


def grow_dynamic(request: Round, plan: DynamicTree, feed: Feed) -> tuple[TokenTree, Tensor]:
    """EAGLE-2's expansion and reranking (Li et al., arXiv 2406.16858), ties to the earlier node.

    A node's score is the product along its path of the softmax of the scores its siblings were
    ranked by, times the plan's sharpness: at temperature 0 and sharpness 1 the draft's own
    probabilities; with shared noise, how sure it is which token wins the race. Where the round's
    `chance` (an acceptance head's) orders, it is the product of that.
    """
    batch, device, width = request.pending_B.shape[0], request.pending_B.device, plan.width
    zeros_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    # Of every candidate so far, level by level (the root is number 0): token, parent, score.
    tokens, parents = [request.pending_B[:, None]], [zeros_B1 - 1]
    above_BF = path_BF = joint_BF = torch.zeros(batch, 1, device=device)
    scores, fed = [above_BF], [zeros_B1]
    frontier = Frontier(0, tokens[0], None, zeros_B1[0])
    for drafted in range(1, plan.levels + 1):
        logits_BFV, states_BFH = feed(frontier)
        logits_BFV = request.params.transform(logits_BFV)
        log_q_BFV = _scores(request, logits_BFV, drafted - 1)
        if plan.sharpness != 1:
            log_q_BFV = log_q_BFV * plan.sharpness
        log_q_BFV = log_q_BFV.log_softmax(-1)
        own_BFK, children_BFK = likeliest(log_q_BFV, width)
        del log_q_BFV  # of all tokens of all nodes: what follows needs the room
        children_BK, call = children_BFK.flatten(1), None
        if request.chance is not None or request.enough is not None:
            place_F = torch.arange(frontier.tokens_BF.shape[1], device=device)
            of_BK = place_F.repeat_interleave(width).expand(batch, -1)
            call = _call(request, drafted - 1, Fed(logits_BFV, states_BFH), of_BK, children_BK)
        if call is not None and request.chance is not None:
            call.above_BF = joint_BF
            chance_BK = request.chance(call)
            call.path_BC = path_BK = path_BF.gather(1, of_BK) + chance_BK
            own_BFK = chance_BK.view_as(own_BFK) if request.orders else own_BFK
        # A draft's NaN must not break the tree: it scores least, and so does all below it.
        new_BFK = (above_BF[..., None] + own_BFK).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        new_BK, first = new_BFK.flatten(1), sum(level.shape[1] for level in tokens)
        tokens.append(children_BK)
        parents.append(fed[-1].repeat_interleave(width, 1))
        scores.append(new_BK)
        if call is not None and call.path_BC is None:
            call.path_BC = new_BK
        if drafted == plan.levels or (call is not None and _enough(request, call)):
            break
        best_BF = new_BK.sort(dim=1, descending=True, stable=True).indices[:, :width]
        above_BF = new_BK.gather(1, best_BF)
        if call is not None and request.chance is not None:
            joint_BF, path_BF = call.joint_BC.gather(1, best_BF), path_BK.gather(1, best_BF)
        frontier = _dynamic_frontier(frontier, children_BK, best_BF, drafted)
        fed.append(first + best_BF)
    plan = plan.cut(drafted)
    tokens_BC, parent_BC, score_BC = (torch.cat(levels, 1) for levels in (tokens, parents, scores))
    fed_BM = torch.cat(fed, 1)
    slot_BM = torch.arange(fed_BM.shape[1], device=device).expand_as(fed_BM)
    slot_BC = torch.zeros_like(tokens_BC).scatter_(1, fed_BM, slot_BM)
    # The best of all, in order of creation: parents come before their children, since no node
    # scores above its parent, and ties, those of -inf too, go to the earlier one.
    order_BC = score_BC.sort(dim=1, descending=True, stable=True).indices
    nodes = plan.nodes
    chosen_BN, rank_BN = order_BC[:, :nodes].sort(1)
    if request.keep is not None:
        kept = request.keep(score_BC.gather(1, chosen_BN), request.active_B)
        nodes = min(kept, nodes)
        chosen_BN, rank_BN = order_BC[:, :nodes].sort(1)
    depth_C = dynamic_slots(width, plan.levels, device)[1]
    topology = _topology(min(plan.levels, nodes - 1), parent_BC, depth_C, chosen_BN)
    tree = TokenTree(tokens_BC.gather(1, chosen_BN), topology, request.law, rank_BN=rank_BN)
    return tree, slot_BC.gather(1, chosen_BN)


def _topology(levels: int, parent_BC: Tensor, depth_C: Tensor, chosen_BN: Tensor) -> Topology:
    """How the chosen candidates hang together, at most so deep."""
    # The root scores best (log 1) and was created first: it is always node 0.
    parent_BN = torch.searchsorted(chosen_BN, parent_BC.gather(1, chosen_BN))
    parent_BN[:, 0] = -1
    nodes = chosen_BN.shape[1]
    eye_NN = torch.eye(nodes, dtype=torch.bool, device=parent_BN.device)
    ancestors_BNN = eye_NN.expand(parent_BN.shape[0], -1, -1)
    up_BNN = parent_BN.clamp(min=0)[..., None].expand_as(ancestors_BNN)
    for _ in range(levels):
        ancestors_BNN = eye_NN | ancestors_BNN.gather(1, up_BNN)
    return Topology(parent_BN, depth_C[chosen_BN], ancestors_BNN, levels)


def _static_frontier(plan: StaticTree, depth: int, level: Level, tokens_BN: Tensor) -> Frontier:
    if plan.is_chain or depth == 0:
        return Frontier(depth, tokens_BN[:, -1:], None, level.fed_F)
    topology, fed_F = static_topology(plan, tokens_BN.device), level.fed_F
    before = static_levels(plan, tokens_BN.device)[depth - 1]
    of_BF = torch.searchsorted(before.fed_F, topology.parent[fed_F]).expand(len(tokens_BN), -1)
    block, depth_M = topology.ancestors[fed_F, : level.first], topology.depth[: level.first]
    return Frontier(depth, tokens_BN[:, fed_F], of_BF, fed_F, block, depth_M)


def _dynamic_frontier(
    before: Frontier, children_BK: Tensor, best_BF: Tensor, depth: int
) -> Frontier:
    """The best of the children just drawn; they see what their parents saw, and themselves."""
    batch, width = best_BF.shape
    of_BF, tokens_BF = best_BF // width, children_BK.gather(1, best_BF)
    depth_M, _, eye_FF = dynamic_slots(width, depth, best_BF.device)
    own_BFF = eye_FF.expand(batch, -1, -1)
    block = own_BFF[:, :1, :1] if before.block is None else before.block  # the root sees itself
    block_BFM = torch.cat([picked(block, of_BF), own_BFF], 2)
    slot_F = torch.arange(len(depth_M) - width, len(depth_M), device=best_BF.device)
    return Frontier(depth, tokens_BF, of_BF, slot_F, block_BFM, depth_M)


def _draw(request: Round, q_logits_BFV: Tensor, depth: int, level: Level) -> Tensor:
    """The children [B, C] of the nodes just fed, by the law asked for."""
    if request.law == WITH_REPLACEMENT:
        child_C = level.first + torch.arange(level.of_C.shape[0], device=level.of_C.device)
        return (q_logits_BFV[:, level.of_C] - _own_race(request, child_C, q_logits_BFV)).argmax(-1)
    if request.law == LAST_DRAWN:
        scores_BFV = q_logits_BFV - _own_race(request, level.fed_F, q_logits_BFV)
        return scores_BFV.argmax(-1)[:, level.of_C]
    if request.law == WITHOUT_REPLACEMENT:
        scores_BFV = q_logits_BFV - _own_race(request, level.fed_F, q_logits_BFV)
        return _best(scores_BFV, level.siblings, level.of_C, level.order_C)
    return _best(_scores(request, q_logits_BFV, depth), level.breadth, level.of_C, level.rank_C)


def _drawn_from(request: Round, q_logits_BFV: Tensor, level: Level) -> Tensor:
    """The logits of what is drawn: of the last of k siblings without q's k - 1 best tokens."""
    if request.law != LAST_DRAWN or level.siblings == 1:
        return q_logits_BFV
    best_BFK = likeliest(q_logits_BFV, level.siblings - 1)[1]
    given_FK = torch.arange(best_BFK.shape[2], device=best_BFK.device) < _last(level)[:, None]
    kept_BFK = q_logits_BFV.gather(2, best_BFK).masked_fill(given_FK, -torch.inf)
    return q_logits_BFV.scatter(2, best_BFK, kept_BFK)


def _given(q_logits_BFV: Tensor, drawn_BC: Tensor, level: Level) -> Tensor:
    """The children [B, C], where those drawn stand for all of their nodes."""
    best_BC = _best(q_logits_BFV, level.siblings, level.of_C, level.order_C)
    return torch.where(level.order_C == _last(level)[level.of_C], drawn_BC, best_BC)


def _last(level: Level) -> Tensor:
    """The number [F] of each fed node's last child, the first being 0."""
    return torch.zeros_like(level.fed_F).scatter_reduce(0, level.of_C, level.order_C, "amax")


def _best(scores_BFV: Tensor, breadth: int, of_C: Tensor, rank_C: Tensor) -> Tensor:
    if breadth > 1:
        return likeliest(scores_BFV, breadth)[1][:, of_C, rank_C]
    best_BF = scores_BFV.argmax(-1)
    return best_BF if best_BF.shape[1] == 1 else best_BF[:, of_C]


def _scores(request: Round, q_logits_BFV: Tensor, depth: int) -> Tensor:
    """What children are ranked by where no draw is independent of the target's."""
    race_B1V = _race(request, depth)
    return q_logits_BFV if race_B1V is None else q_logits_BFV - race_B1V


def _sure(scores_BFV: Tensor) -> Tensor:
    """Log of the share [B, F] that the best score has of all: also where noise of its own draws the
    token, of which it then says nothing.
    """
    return scores_BFV.amax(-1) - scores_BFV.logsumexp(-1)


def _race(request: Round, depth: int) -> Tensor | None:
    """The shared noise of a level [B, 1, V]; None where children aren't ranked by any."""
    if request.race_BDV is None or request.law == DETERMINISTIC:
        return None
    return request.race_BDV[:, depth, None]


def _own_race(request: Round, node_C: Tensor, q_logits_BFV: Tensor) -> Tensor:
    """Noise of a round's own for each node: log E [B, C, V]."""
    assert request.seeds_B is not None, f"law {request.law} draws, but the round has no seeds"
    nodes_BC = node_C.expand(q_logits_BFV.shape[0], -1)
    return log_race(position_keys(request.seeds_B, nodes_BC), q_logits_BFV.shape[-1])


def _call(request: Round, depth: int, made: Fed, of_BC: Tensor, tokens_BC: Tensor) -> Call:
    """What a call came to (`made`: with its logits transformed), noted if anyone records."""
    call = Call(depth, request.active_B, *made, _race(request, depth), of_BC, tokens_BC)
    if request.calls is not None:
        request.calls.append(call)
    return call


def _enough(request: Round, call: Call) -> bool:
    """Whether no row wants another call: one reading of the device, if a policy asks."""
    if request.enough is None:
        return False
    return bool((request.enough(call) | ~request.active_B).all())
