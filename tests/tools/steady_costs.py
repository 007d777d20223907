"""c as `stopping` measures it, several times over: do the calls agree within 10%, here, now?

python tests/tools/steady_costs.py TARGET DRAFTER [CALLS]
"""

import sys

import torch

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.traces.tune_stops import measured


def main(target: str, drafter: str, calls: int = 5) -> int:
    torch.set_num_threads(1)
    decoder = Decoder.from_pretrained(target, drafter, dtype="bfloat16")
    found = [measured(decoder) for _ in range(calls)]
    print("c:", *(f"{c:.4f}" for c, _ in found), " v:", *(f"{v:.3f}" for _, v in found))
    apart = [max(values) / min(values) - 1 for values in zip(*found, strict=True)]
    print(f"apart by {apart[0]:.1%} in c, {apart[1]:.1%} in v")
    return int(apart[0] > 0.1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:4])))
