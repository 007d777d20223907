"""Logits -> the distribution that is sampled from, and the noise that samples it.

`transform` is the only place where temperature, top-k and top-p act; training and decoding, target
and draft, all call it. Sampling is *coupled*: the noise is a pure function of (request seed,
absolute position of the sampled token, token id), shared by target and draft, so the output depends
on model, prompt and seed alone (specs: Daliri et al., arXiv 2408.07978; exponential race form).

Shapes: B rows, D positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Streams of noise that must not be shared. COUPLED is the same for target and draft on purpose.
COUPLED, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3

# splitmix64's constants (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_STREAM_KEYS = [((i + 1) * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63) for i in range(4)]
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, and when to stop. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` is the run's seed: each request's own seed is derived from it, the prompt's index and the
    sample's index, so neither batch nor order of arrival changes an answer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: got {self.temperature}, expected a number >= 0")
        if self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, expected 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a share in (0, 1]; 1 is off")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, expected at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def transform(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The one map from raw logits to the logits that are sampled from, in fp32 (float64 stays).

    logits [..., V] -> [..., V]: divided by the temperature, then everything outside the top k and
    outside the smallest set of probability `top_p` set to -inf. Ties at the k-th value are kept.
    At temperature 0 only the cast happens: the argmax is not changed by any of the rest.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return logits
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        below[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -torch.inf)
    return logits


def request_seeds(run_seed: int, prompt_index: int, sample_index: int = 0) -> int:
    """The seed of one request, a signed 64-bit integer; distinct requests share no noise."""
    x = torch.tensor([run_seed, prompt_index, sample_index], dtype=torch.int64)
    key = _mix(x[0:1] * _GOLDEN + 1)
    key = _mix(key + x[1:2] * _GOLDEN)
    return int(_mix(key + x[2:3] * _GOLDEN))


def position_keys(seeds_B: Tensor, positions_BD: Tensor, stream: int = COUPLED) -> Tensor:
    """Keys [B, D] int64 of the noise at each absolute position, for one stream."""
    keys_B = _mix(seeds_B + _STREAM_KEYS[stream])
    return _mix(keys_B[:, None] + positions_BD * _GOLDEN)


def log_race(keys_BD: Tensor, vocab_size: int) -> Tensor:
    """log E [B, D, V] fp32 with E ~ Exp(1): the winner of the race is argmin E / p.

    E = -log(1 - u) from 32 bits. The winners have small u, where fp32 keeps its full relative
    precision, so ties among 128k tokens stay as rare as 32 bits allow; the usual -log(-log u) in
    fp32 loses just those bits.
    """
    tokens_V = torch.arange(1, vocab_size + 1, device=keys_BD.device) * _GOLDEN
    uniform = _uniform(_mix(keys_BD[..., None] + tokens_V))
    return uniform.neg_().log1p_().neg_().log_()


def request_race(
    params: SamplingParams, index: int, positions_T: Tensor, vocab_size: int
) -> Tensor | None:
    """log E [T, V] of prompt `index` at each absolute position; None when greedy."""
    if params.greedy:
        return None
    seed_1 = torch.tensor([request_seeds(params.seed, index)], device=positions_T.device)
    return log_race(position_keys(seed_1, positions_T[None]), vocab_size)[0]


def uniform(keys_BD: Tensor) -> Tensor:
    """One number in (0, 1) [B, D] fp32 for each key."""
    return _uniform(_mix(keys_BD + _GOLDEN))


def choose(logits: Tensor, log_race: Tensor | None) -> Tensor:
    """Sampled token ids [...] from transformed logits [..., V]; without noise, the argmax.

    argmin E / p = argmax (log p - log E), and the normaliser of p cancels. Ties go to the lowest
    id.
    """
    return logits.argmax(-1) if log_race is None else (logits - log_race).argmax(-1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors: a bijection, every output bit depends on all."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _uniform(bits: Tensor) -> Tensor:
    # The largest values round to 1 and would give E = inf twice: held just below.
    top = ((bits >> 32) & 0xFFFFFFFF).float()
    return top.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
