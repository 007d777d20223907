"""Every attention backend gives the states of a forward along each path, of every kind of layer."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from draftsmith.decode.forward import attention
from draftsmith.decode.forward.attention import Attend, Seen, available, mix, resolve
from draftsmith.decode.forward.runner import Runner

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
VOCAB, WINDOW = 97, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention"]
LAYERS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "ungrouped": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4})),
    "sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "mixed": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, layer_types=KINDS, sliding_window=WINDOW)
    ),
    "sinks": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            head_dim=8,
            layer_types=KINDS,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
}
# Three rows of different lengths, shorter and longer than the window, and one of each topology.
PROMPTS = [list(range(5, 22)), [9, 4, 7], list(range(40, 49))]
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]
TREE = [-1, 0, 0, 1, 1, 2, 3, 6]
TREES = {
    "chain": [CHAIN] * 3,
    "tree": [TREE] * 3,
    "trees": [TREE, CHAIN, [-1, 0, 0, 0, 1, 4, 4, 2]],
}
BACKENDS = ("masked", "split", "varlen", "flex")


@cache
def built(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LAYERS[kind]().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data += 2  # a sink that takes most of a short row's weight
    return model


def path(parents: list[int], node: int) -> list[int]:
    return ([] if node == 0 else path(parents, parents[node])) + [node]


def token(row: int, node: int) -> int:
    return (31 * row + 7 * node + 3) % VOCAB


@cache
@torch.inference_mode()
def by_path(kind: str, shape: str) -> Tensor:
    """[B, N, H]: the last state of transformers' eager forward over prompt and path."""
    model = copy.deepcopy(built(kind))
    model.set_attn_implementation("eager")
    states = []
    for row, (prompt, parents) in enumerate(zip(PROMPTS, TREES[shape], strict=True)):
        for node in range(len(parents)):
            ids = torch.tensor([prompt + [token(row, n) for n in path(parents, node)]])
            states.append(model.base_model(ids, use_cache=False).last_hidden_state[0, -1])
    return torch.stack(states).unflatten(0, (3, -1))


@torch.inference_mode()
def by_backend(kind: str, shape: str, backend: str, pieces: tuple[int, ...] = (8,)) -> Tensor:
    """[B, N, H]: ragged prompts prefilled, then the nodes in `pieces` of so many at a time."""
    runner = Runner(copy.deepcopy(built(kind)), VOCAB, "split")
    runner.attention = backend  # past the check, so that varlen runs on its stand-in
    pool = runner.pool(3, 40)
    lens_B = torch.tensor([len(prompt) for prompt in PROMPTS])
    tokens_BN = torch.tensor([prompt + [0] * (17 - len(prompt)) for prompt in PROMPTS])
    runner.prefill(pool, torch.arange(3), tokens_BN, lens_B)
    parents = TREES[shape]
    depth_BN = torch.tensor([[len(path(p, n)) - 1 for n in range(8)] for p in parents])
    family = [[[m in path(p, n) for m in range(8)] for n in range(8)] for p in parents]
    nodes_BN = torch.tensor([[token(row, n) for n in range(8)] for row in range(3)])
    slots_BN = lens_B[:, None] + torch.arange(8)
    states, done = [], 0
    for piece in pieces:
        now = slice(done, done + piece)
        block = torch.tensor(family)[:, now, : done + piece]
        seen = Seen(lens_B, 64, block, depth_BN[:, : done + piece])
        if shape == "chain" and piece == 8:
            seen = Seen(lens_B, 64)
        elif shape == "tree":
            seen = Seen(lens_B, 64, block[0], depth_BN[0, : done + piece])
        at_BN = lens_B[:, None] + depth_BN[:, now]
        hidden_BNH, _ = runner.verify(pool, nodes_BN[:, now], at_BN, slots_BN[:, now], seen)
        states.append(hidden_BNH)
        done += piece
    return torch.cat(states, 1)


def flash_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *places: Any,
    return_aux: AuxRequest,
    scale: float,
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """What torch's call computes, a sequence and a head at a time; log-sum-exps [H, T]. places:
    ends of sequences of queries, of keys, and their longest. For an empty sequence the kernel's
    answer is arbitrary: NaN here.
    """
    cu_seq_q, cu_seq_k, max_q, max_k = places
    assert query.shape[1] == key.shape[1] and return_aux.lse
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
    mixed, lse = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.nan)
    for row, used in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[row : row + 2].tolist()
        start = int(cu_seq_k[row])
        assert used <= max_k and last - first <= max_q
        for head in range(query.shape[1] if used else 0):
            seen = slice(start, start + used)
            scores = query[first:last, head] @ key[seen, head].T * scale
            mixed[first:last, head] = scores.softmax(-1) @ value[seen, head]
            lse[head, first:last] = scores.logsumexp(-1)
    return mixed, lse


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash", flash_stand_in)


def close(ours: Tensor, own: Tensor) -> bool:
    return torch.allclose(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_states_are_those_of_each_path(kind: str, backend: str) -> None:
    for shape in TREES:
        assert close(by_backend(kind, shape, backend), by_path(kind, shape)), shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_may_grow_in_pieces(backend: str) -> None:
    """Queries fewer than the block's slots, as a drafter that grows its tree asks for."""
    for shape in ("tree", "trees"):
        grown = by_backend("mixed", shape, backend, pieces=(1, 2, 5))
        assert close(grown, by_path("mixed", shape))


def no_weights(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([part for part, _ in parts]).mean(0), parts[0][1]


seen_in_windows = Attend.allowed


def windowless(self: Attend, window: int | None) -> Tensor:
    return seen_in_windows(self, None)


BROKEN: list[tuple[str, str, str, Any]] = [
    ("split", "full", "merge", no_weights),
    ("varlen", "full", "merge", no_weights),
    ("masked", "mixed", "Attend.allowed", windowless),
    ("split", "sliding", "Attend.allowed", windowless),
    ("flex", "sliding", "Attend.allowed", windowless),
    ("masked", "sinks", "kept", lambda lse, sinks: torch.ones_like(lse)[..., None]),
]


@pytest.mark.parametrize(("backend", "kind", "name", "broken"), BROKEN)
def test_broken_twins_differ(
    backend: str, kind: str, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"draftsmith.decode.forward.attention.{name}", broken)
    error = (by_backend(kind, "tree", backend) - by_path(kind, "tree")).abs().max()
    assert error > 1e-2


def test_a_window_of_slots_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings share a position: a window over slots instead sees less."""
    chained = Attend.__init__

    def by_slot(self: Attend, seen: Seen, positions: Tensor, **settings: Any) -> None:
        length = positions.shape[1]
        depth = torch.arange(length if seen.block is None else seen.block.shape[-1])
        at_BN = seen.lens_B[:, None] + depth[-length:]
        chained(self, Seen(seen.lens_B, seen.width, seen.block, depth), at_BN, **settings)

    monkeypatch.setattr(Attend, "__init__", by_slot)
    for backend in ("masked", "split"):
        assert close(by_backend("sliding", "chain", backend), by_path("sliding", "chain"))
        error = (by_backend("sliding", "tree", backend) - by_path("sliding", "tree")).abs().max()
        assert error > 1e-2


def operands(seed: int) -> tuple[Seen, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lens_B = torch.tensor([0, 1, 40, 64])
    block = torch.rand(4, 5, 6, generator=generator) < 0.5
    block[:, torch.arange(5), torch.arange(1, 6)] = True
    depth_BM = torch.randint(0, 4, (4, 6), generator=generator)
    seen = Seen(lens_B, 128, block, depth_BM)
    return (seen, lens_B[:, None] + depth_BM[:, 1:], *(random(4, h, n, 8) for h, n in SHAPES))


SHAPES = ((6, 5), (2, 128), (2, 128))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_in_fp64_on_edges(backend: str) -> None:
    """Rows without a prefix, a width filled to the end, windows that hide the whole prefix."""
    sinks_H = torch.linspace(-3, 3, 6, dtype=torch.float64)
    for window, sinks in ((None, None), (3, None), (30, sinks_H), (None, sinks_H)):
        seen, positions_BN, *tensors = operands(seed=1)
        mixed = []
        for name in (backend, "masked"):
            attend = Attend(seen, positions_BN, groups=3, dtype=torch.float64, backend=name)
            mixed.append(mix(attend, *tensors, scale=0.3, window=window, sinks_H=sinks))
        assert mixed[0].shape == (4, 5, 6, 8)
        assert (mixed[0] - mixed[1]).abs().max() < 1e-12


def fakes(device: str, dtype: torch.dtype) -> tuple[Seen, Tensor, list[Tensor]]:
    """The shapes of `operands`, without numbers."""
    lens_B = torch.zeros(4, dtype=torch.int64, device=device)
    block = torch.zeros(4, 5, 6, dtype=torch.bool, device=device)
    depth_BM = torch.zeros(4, 6, dtype=torch.int64, device=device)
    tensors = [torch.zeros(4, h, n, 8, dtype=dtype, device=device) for h, n in SHAPES]
    return Seen(lens_B, 128, block, depth_BM), lens_B[:, None] + depth_BM[:, 1:], tensors


@pytest.mark.parametrize("backend", ["masked", "split"])
def test_no_backend_waits_for_a_number(backend: str) -> None:
    with FakeTensorMode():
        seen, positions_BN, tensors = fakes("cpu", torch.float32)
        attend = Attend(seen, positions_BN, groups=3, dtype=torch.float32, backend=backend)
        assert mix(attend, *tensors, scale=None, window=3).shape == (4, 5, 6, 8)


def test_the_call_to_flash_fits_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function, traced without a device: arguments, shapes and types pass."""
    monkeypatch.setattr(attention, "flash", varlen_attn)
    if "varlen" not in available(torch.device("cuda"), torch.bfloat16):
        pytest.skip("this torch's varlen_attn takes no row lengths")
    seen, positions_BN, tensors = fakes("meta", torch.bfloat16)
    attend = Attend(seen, positions_BN, groups=3, dtype=torch.bfloat16, backend="varlen")
    mixed = mix(attend, *tensors, scale=None)
    assert mixed.shape == (4, 5, 6, 8) and mixed.dtype == torch.bfloat16


def test_backends_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16, fp32 = torch.bfloat16, torch.float32
    assert available(cpu, bf16) == available(cuda, fp32) == ["masked", "split", "flex"]
    assert resolve("auto", cpu, bf16) == resolve("auto", cuda, fp32) == "masked"
    assert resolve("auto", cuda, bf16) == "masked"
    if "varlen" in available(cuda, bf16):
        assert resolve("varlen", cuda, bf16) == "varlen"
    with pytest.raises(ValueError, match="got 'varlen', expected auto, masked, split, flex"):
        resolve("varlen", cpu, bf16)
    with pytest.raises(ValueError, match="got 'paged'"):
        Runner(copy.deepcopy(built("full")), VOCAB, "paged")
    monkeypatch.setattr(attention, "flash", lambda query, key, value, scale: None)
    with pytest.raises(ValueError, match=r"torch 2\.12"):
        resolve("varlen", cuda, bf16)


def test_logits_keep_the_sums_of_half_precision_products() -> None:
    """On CUDA, traced without a device: fp32 leaves the product, not a cast of bf16."""
    runner = Runner(copy.deepcopy(built("full")).bfloat16(), VOCAB)
    hidden = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    logits = runner.logits(hidden)
    assert logits.dtype == torch.float32 and torch.equal(logits, logits.bfloat16().float())
    runner.head.tensors = (runner.head.weight.to("meta"),), ()
    wide = runner.logits(hidden.to("meta"))
    assert wide.dtype == torch.float32 and wide.shape == (2, 3, VOCAB)
