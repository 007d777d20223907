"""What a draft reads of a long prompt: its beginning, its end, and what is like its end.

Shapes: N tokens of a prompt, C chunks of it, U different tokens of its end.
"""

import torch
from torch import Tensor

CHUNK = 32
LEAST = 4 * CHUNK  # of a budget: then at least one chunk is chosen


def retrieved(tokens_N: Tensor, budget: int) -> Tensor:
    """At most `budget` tokens of a prompt, in their order; all where they are no more.

    Half of the budget are the last tokens, the rest the first chunk and the chunks that share most
    with the last tokens: sum over shared tokens of log(1 + C / chunks that hold it).
    """
    length = len(tokens_N)
    if length <= budget:
        return tokens_N
    latest = budget // 2
    latest += (length - latest) % CHUNK
    chunks_CK, end = tokens_N[:-latest].view(-1, CHUNK), tokens_N[-latest:]
    # By a table over the ids, not chunk by token: a prompt may have thousands of each.
    ids_U, place = end.unique(), torch.full((int(tokens_N.max()) + 1,), -1, device=end.device)
    place[ids_U] = torch.arange(len(ids_U), device=end.device)
    found_CK = place[chunks_CK]
    holds_CU = torch.zeros(len(chunks_CK), len(ids_U) + 1, device=end.device)
    holds_CU = holds_CU.scatter_(1, found_CK.where(found_CK >= 0, len(ids_U)), 1.0)[:, :-1]
    rare_U = (1 + len(chunks_CK) / holds_CU.sum(0).clamp(min=1)).log()
    score_C = holds_CU @ rare_U
    score_C[0] = torch.inf
    best_C = score_C.topk((budget - latest) // CHUNK).indices.sort().values
    return torch.cat([chunks_CK[best_C].flatten(), end])
