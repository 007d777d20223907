"""Logits -> the distribution that is sampled from, and the noise that samples it.

`transform` is the only place where temperature, top-k, top-p and min-p act; training and decoding,
target and draft, all call it. Sampling is *coupled*: the noise is a pure function of (request seed,
absolute position of the sampled token, token id), shared by target and draft, so the output depends
on model, prompt and seed alone (specs: Daliri et al., arXiv 2408.07978; exponential race form).

Shapes: B rows, D positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, uniforms

# Streams of noise that must not be shared. COUPLED is the same for target and draft on purpose.
COUPLED, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3

# splitmix64's constants (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_STREAM_KEYS = [((i + 1) * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63) for i in range(4)]
# Shift right, the bits that stay of an unsigned shift, factor.
_FINALISER = (
    (30, 0x3FFFFFFFF, 0xBF58476D1CE4E5B9 - (1 << 64)),
    (27, 0x1FFFFFFFFF, 0x94D049BB133111EB - (1 << 64)),
)

# Elements of a block of `top_k_values`: of 32, 64 and 128 the fastest. Measured against torch.topk
# on 1 thread of a CPU that others used, k = 10: 128k tokens 0.14 to 0.21 ms (1 row), 0.37 to 1.25
# (8); 32k 0.12 to 0.06, 0.20 to 0.32; 4k 0.11 to 0.01, 0.14 to 0.05. Not measured on CUDA.
TWO_STAGES_FROM = 1 << 15  # tokens of vocabulary; below, one top-k is faster on a CPU
_BLOCK = 64
LEAST_LOG_P = -9999.0  # as OpenAI's


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, and when to stop. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p`
    0 are off. An answer ends with an end token (unless `ignore_eos`), one of `stop_token_ids`, or
    where its text holds one of the strings `stop`, and follows `json_schema`, where one is given.

    `seed` is the run's seed: each request's own seed is derived from it, the prompt's index and the
    sample's index, so neither batch nor order of arrival changes an answer.

    Raises ValueError for values out of range, filters at temperature 0, empty or repeated `stop`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    json_schema: str = ""  # text of one that answers follow; see `engine.grammar`

    @classmethod
    def of(cls, settings: Any) -> "SamplingParams":
        """What a command's settings say under the same names; what they don't name stays as it is.
        ValueError as above.
        """
        names = [field.name for field in fields(cls) if hasattr(settings, field.name)]
        return cls(**{name: getattr(settings, name) for name in names})

    def __post_init__(self) -> None:
        # Much smaller ones overflow fp32 once logits are divided by them.
        if self.temperature != 0 and not 1e-5 <= self.temperature < math.inf:
            expected = "expected 0 (greedy) or a number of at least 1e-5"
            raise ValueError(f"temperature: got {self.temperature}, {expected}")
        if self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, expected 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a share in (0, 1]; 1 is off")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p: got {self.min_p}, expected a share in [0, 1); 0 is off")
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            if self.greedy and getattr(self, name) != off:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with temperature 0, which always takes the "
                    f"best token; expected {off} (off), or a temperature above 0"
                )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, expected a signed 64-bit integer")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, expected at least 1")
        if self.json_schema and self.ignore_eos:
            raise ValueError("ignore_eos: got true with json_schema, expected false: answers end")
        if isinstance(self.stop, str):
            raise ValueError(f"stop: got {self.stop!r}, expected several strings: ({self.stop!r},)")
        for text in self.stop:
            if not text or self.stop.count(text) > 1:
                raise ValueError(
                    f"stop: got {text!r} among {list(self.stop)}, expected strings that are not "
                    "empty, each once; leave it out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def law(self) -> tuple[float, ...]:
        """What of it a round depends on; seeds, lengths and stops are state of the rows."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def transform(self, logits: Tensor) -> Tensor:
        """`transform` of raw logits [..., V] with these values."""
        return transform(logits, self.temperature, self.top_k, self.top_p, self.min_p)


def transform(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The one map from raw logits to the logits that are sampled from, in fp32 (float64 stays).

    logits [..., V] -> [..., V]: divided by the temperature, then set to -inf everything outside the
    top k (ties at the k-th value are kept), outside the smallest set of probability `top_p` (among
    ties the higher ids are kept), and less probable than `min_p` times the best token.
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
        # Stable: what is kept of a tie must not depend on how many rows are sorted at once.
        ascending, order = logits.sort(dim=-1, stable=True)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        below[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -torch.inf)
    if min_p > 0:
        least = logits.amax(-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(logits < least, float("-inf"))
    return logits


def top_k_values(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, largest first, and their ids: torch.topk, except that ties go
    to the lowest id, whatever the device and the other rows.

    scores [..., V] (fp32 or narrower, no NaN) -> values [..., k], ids [..., k]. Exact: with equal
    maxima ordered by block, the k best blocks hold the k best elements, so only these are searched.
    """
    vocab, blocks = scores.shape[-1], scores.shape[-1] // _BLOCK
    if blocks < 2 * k:
        ids = torch.arange(vocab, device=scores.device)
        return _by_key(scores, ids, k)
    maxima = scores[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK)).amax(-1)
    best = _by_key(maxima, torch.arange(blocks, device=scores.device), k)[1]
    inside = torch.arange(_BLOCK, device=scores.device)
    rest = torch.arange(blocks * _BLOCK, vocab, device=scores.device)
    ids = (best[..., None] * _BLOCK + inside).flatten(-2)
    ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], -1)
    return _by_key(scores, ids, k)


def likeliest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by what is faster (measured), with ties as torch has them in small vocabularies."""
    small = scores.shape[-1] < TWO_STAGES_FROM
    values, ids = scores.topk(k, dim=-1) if small else top_k_values(scores, k)
    return values, ids


def told_log_probs(logits: Tensor, chosen: Tensor, k: int) -> Tensor:
    """What clients are told of chosen tokens [...], at temperature 1 without filters, from raw
    logits [..., V]: float64 [..., 1 + 2 k], the token's own log-probability, the k likeliest ids
    (k at most V), their log-probabilities. None is less than `LEAST_LOG_P`: JSON has no -inf.
    """
    log_p = logits.float().log_softmax(-1).clamp_(min=LEAST_LOG_P)
    own, (values, ids) = log_p.gather(-1, chosen[..., None]), top_k_values(log_p, k)
    return torch.cat([own.double(), ids.double(), values.double()], -1)


def _by_key(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of scores [..., V] among `ids` ([V], or [..., C] of them), ties to the lowest id.

    One int64 key an element: above, the bits of its fp32 value in an order that integers share;
    below, minus its id.
    """
    among = scores if ids.ndim == 1 else scores.gather(-1, ids)
    bits = (among.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.long() << 32) - ids
    best = -keys.topk(k, dim=-1).values & 0xFFFFFFFF
    return scores.gather(-1, best), best


def request_seeds(run_seed: int, prompt_index: int) -> int:
    """The seed of one request, a signed 64-bit integer; distinct requests share no noise."""
    x = torch.tensor([run_seed, prompt_index], dtype=torch.int64)
    key = _mix(x[:1] * _GOLDEN + 1)
    return int(_mix(_mix(key + x[1:] * _GOLDEN)))


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
    if keys_BD.device.type == "cpu" and library() is not None:
        uniform = uniforms(keys_BD, vocab_size)
    else:
        uniform = _uniform(_mix(keys_BD[..., None] + _steps(vocab_size, keys_BD.device)))
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

    argmin E / p = argmax (log p - log E): the normaliser of p cancels. Ties go to the lowest id.
    """
    return logits.argmax(-1) if log_race is None else (logits - log_race).argmax(-1)


@cache  # recordings of rounds read these tensors: none may go
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    """What each token adds to a position's key."""
    with torch.inference_mode(False):
        return torch.arange(1, vocab_size + 1, device=device) * _GOLDEN


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors, in place: a bijection, every output bit depends on
    all.
    """
    for shift, mask, factor in _FINALISER:
        x.bitwise_xor_((x >> shift).bitwise_and_(mask)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


def _uniform(bits: Tensor) -> Tensor:
    # The largest values round to 1 and would give E = inf twice: held just below.
    top = bits.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).float()
    return top.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


class RowParams:
    """`SamplingParams`, row by row: what a round asks of them, for rows of several laws. A greedy
    row's noise is 0, which is the argmax.
    """

    greedy = False  # not all rows: those would be of one law

    def __init__(self, of_B: Sequence[SamplingParams], device: torch.device) -> None:
        rows: dict[tuple[float, ...], list[int]] = {}
        for row, params in enumerate(of_B):
            rows.setdefault(params.law, []).append(row)
        self.law = tuple(number for params in of_B for number in params.law)
        self.groups = [(of_B[same[0]], torch.tensor(same, device=device)) for same in rows.values()]
        self.greedy_B = torch.tensor([params.greedy for params in of_B], device=device)

    def transform(self, logits: Tensor) -> Tensor:
        """`sampling.transform` of raw logits [B, ..., V] with each row's values."""
        found = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        for params, rows_G in self.groups:
            found[rows_G] = params.transform(logits[rows_G])
        return found

    def quiet(self, race: Tensor) -> Tensor:
        """The noise [B, ..., V], 0 in greedy rows."""
        return race.masked_fill_(self.greedy_B.view(-1, *[1] * (race.ndim - 1)), 0.0)


BatchParams = SamplingParams | RowParams


def together(of_B: Sequence[SamplingParams], device: torch.device) -> BatchParams:
    """The parameters of rows 0..B-1: one for all of them where they sample alike."""
    alike = len({params.law for params in of_B}) == 1
    return of_B[0] if alike else RowParams(of_B, device)


def unfiltered(params: BatchParams) -> bool:
    """Whether rows sample alike, by a temperature and nothing else."""
    return isinstance(params, SamplingParams) and params.law[1:] == (0, 1.0, 0.0)
