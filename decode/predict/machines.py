"""What computes: memory, speed and overheads, for what is planned or predicted without it."""

from typing import NamedTuple


class Pass(NamedTuple):
    """What a forward reads: bytes of weights in bf16, and of keys and values a token of context;
    layers: how many, in which kernels are launched.
    """

    layers: float
    weights: float
    kv: float = 0.0


class Machine(NamedTuple):
    """gib: of memory; tflops: dense bf16 peak; bandwidth: GB/s; layer, call: microseconds that each
    layer and each call adds to a forward of a token; reached: the share of the peak of a forward of
    many tokens, assumed; overlaps: whether it reads while it computes; cache: megabytes that are
    read again at `near` GB/s; round: microseconds that every round takes beside its passes; loop:
    that those of trees, and of kinds whose rounds are made one at a time, take beside that; host:
    what looking up takes, as a share of `predict.HOST`; token: microseconds that each token of a
    pass takes beside its products.
    """

    gib: float
    tflops: float
    bandwidth: float
    layer: float = 30.0
    call: float = 100.0
    reached: float = 0.5
    overlaps: bool = True
    cache: float = 0.0
    near: float = 0.0
    round: float = 0.0
    loop: float = 0.0
    host: float = 1.0
    token: float = 0.0

    def seconds(self, work: Pass, tokens: float = 1, context: float = 0) -> float:
        """A forward of so many tokens after so many, of all rows together. A bf16 weight is two
        bytes, and two operations a token.
        """
        read = self.moving(work.weights + work.kv * context)
        done = self.computing(work.weights * tokens, self.reached)
        took = max(read, done) if self.overlaps else read + done
        return 1e-6 * (self.call + work.layers * self.layer + tokens * self.token) + took

    def moving(self, size: float) -> float:
        """Seconds to read so many bytes, again and again: what the cache doesn't hold from afar."""
        held = min(size, 1e6 * self.cache)
        return (held / self.near if held else 0.0) / 1e9 + (size - held) / (1e9 * self.bandwidth)

    def computing(self, operations: float, reached: float) -> float:
        """Seconds of so many operations, at a share of the peak."""
        return operations / (1e12 * self.tflops * reached)


# GPUs: the makers' data sheets (SXM), and an assumed dozen kernels a layer in a CUDA graph. cpu:
# one thread of an AMD EPYC with AVX-512, bandwidth by a twin of 516M (docs/results/peers.json; of
# bf16's bytes, three quarters of which are read), loop by profile; all others are those of a
# search by which docs/results/quickstart.json and load.json come out nearest. cpu-amx: an Intel
# Xeon with AMX, by a search over load.json's rows of the 15M target and of its twin; cpu-intel: one
# without, over those of the 15M target.
MACHINES = {
    "h100": Machine(79, 989, 3350),
    "h200": Machine(139, 989, 4800),
    "b200": Machine(178, 2250, 8000),
    "a100": Machine(79, 312, 2039),  # of 80 GB
    "a100-40": Machine(39, 312, 1555),
    "l40s": Machine(44, 362, 864),
    "rtx4090": Machine(23.5, 165, 1008),
    "cpu": Machine(16, 0.5, 42, 1.4, 61, 0.95, True, 32, 196, round=76, loop=300, host=0.7),
    "cpu-amx": Machine(
        *(16, 0.42, 21.6, 0.3, 2, 0.95, False, 32, 30), round=391, loop=300, host=0.7, token=54
    ),
    "cpu-intel": Machine(
        *(16, 0.39, 12.6, 0, 46, 0.93, True, 32, 82), round=287, loop=300, host=0.7, token=95
    ),
}
