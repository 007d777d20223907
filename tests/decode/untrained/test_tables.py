"""Tables of the target's laws: what they hold, by which paths, and both forms of them."""

import copy
import random

import pytest
import torch
from looked_up import begun, chain_round, tau
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.token_tree import Topology
from draftsmith.decode.untrained import tables
from draftsmith.decode.untrained.tables import KEPT, LawTable, TableDrafter

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "C++"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the table."""
    if request.param == "torch":
        monkeypatch.setattr(LawTable, "made", property(lambda table: None))
    elif library(tables.SOURCE) is None:
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("form")
def test_a_table_holds_what_the_target_said() -> None:
    """Beside a dict that does the same one visit after the other."""
    generator = torch.Generator().manual_seed(0)
    for kind, orders in tables.ORDERS.items():
        table = LawTable(orders, kind == "stand", CPU)
        known: dict[tuple[int, ...], tuple[dict[int, float], int]] = {}
        for _ in range(30):
            context_XM = torch.randint(3, (4, 4), generator=generator)
            logits_XV = 3 * torch.rand(4, 12, generator=generator)
            logits_XV[:, KEPT:] -= 20  # what is pruned weighs nothing
            p_XV = logits_XV.softmax(-1)
            p_XK, ids_XK = p_XV.topk(KEPT)
            real_X = torch.rand(4, generator=generator) < 0.8
            table.learn(context_XM, ids_XK, p_XK, real_X)
            before = copy.deepcopy(known)  # what one call brings twice counts once, the last one
            for x in range(4):
                if not real_X[x]:
                    continue
                for order in orders:
                    key = tuple(context_XM[x, :order].tolist())
                    law, visits = before.get(key, ({}, 0))
                    new = dict(zip(ids_XK[x].tolist(), p_XK[x].tolist(), strict=True))
                    if kind == "stand" and visits:
                        mean = {
                            v: (law.get(v, 0) * visits + new.get(v, 0)) / (visits + 1)
                            for v in law.keys() | new.keys()
                        }
                        new = dict(sorted(mean.items(), key=lambda item: -item[1])[:KEPT])
                    known[key] = new, visits + 1
        for x in range(4):
            ids_1K, p_1K = table.laws(context_XM[x : x + 1])
            contexts = [tuple(context_XM[x, :order].tolist()) for order in reversed(orders)]
            law = next(known[key][0] for key in contexts if key in known)
            found = dict(zip(ids_1K[0].tolist(), p_1K[0].tolist(), strict=True))
            for token, p in law.items():
                assert abs(found.get(token, 0.0) - p) < 2e-3  # of fp16, over up to 30 visits


@pytest.mark.usefixtures("form")
def test_a_tree_s_nodes_teach_by_their_own_paths() -> None:
    """The context of a node is its path and the text before the root; of rows that ended nothing
    is learnt.
    """
    drafter = TableDrafter("stand", CPU, 50)
    drafter.reset(2, 32)
    for row in range(2):
        begun(drafter, row, [11, 12, 13])
    topology = Topology.from_parents([-1, 0, 0, 1], CPU)
    nodes_BN = torch.tensor([[13, 20, 21, 22], [13, 30, 31, 32]])
    ids_BNX = torch.arange(40, 44)[None, :, None].expand(2, 4, KEPT).clone()
    ids_BNX[..., 1:] = -1
    log_p_BNX = torch.where(ids_BNX >= 0, 0.0, -torch.inf)
    kept = Kept(
        nodes_BN[:, 1:2], torch.tensor([1, 0]), None, torch.tensor([2, 2]), nodes_BN=nodes_BN,
        topology=topology, ids_BNX=ids_BNX, log_p_BNX=log_p_BNX,
    )  # fmt: skip
    drafter.extend(kept)

    def said(*context: int) -> int:
        ids_1K, p_1K = drafter.store.laws(torch.tensor([list(context)]))
        return int(ids_1K[0, 0]) if p_1K[0, 0] > 0 else -1

    assert said(22, 20, 13, 12) == 43 and said(21, 13, 12, 11) == 42 and said(20, 9, 9, 9) == 41
    assert said(13, 12, 11, -1) == 40 and said(12, 11, -1, -1) == 13  # the prompt's own
    assert said(32, 30, 13, 12) == -1
    assert drafter.text_BS[0, :4].tolist() == [11, 12, 13, 20]


def test_a_table_learns_while_it_decodes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    for name in ("recycling", "stand"):
        drafter = load_drafter(name, tiny_target, tiny_tokenizer)
        decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=1, tree="dynamic:6,3,17")
        first, second = (tau(decoder.generate(PROMPTS, SETTINGS[0])) for _ in range(2))
        assert second > first > 1


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", list(tables.ORDERS))
def test_what_a_round_teaches_stands_after_its_own_root(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    """Also of rounds that drafted nothing: the root is the text's last token, not the next one."""
    drafter = load_drafter(kind, tiny_target, tiny_tokenizer)
    assert isinstance(drafter, TableDrafter)
    extend, sizes = drafter.extend, []

    def watched(kept: Kept) -> None:
        assert kept.nodes_BN is not None
        going_B = kept.n_new_B > 0
        assert kept.nodes_BN[going_B, 0].equal(drafter.tail(1)[going_B, 0])
        sizes.append(kept.nodes_BN.shape[1])
        extend(kept)

    drafter.extend = watched
    Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2, K=3).generate(PROMPTS, SETTINGS[0])
    assert 1 in sizes and max(sizes) > 1


@pytest.mark.parametrize("kind", list(tables.ORDERS))
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.skipif(library(tables.SOURCE) is None, reason="no C++ compiler")
def test_a_chain_in_one_call_is_the_one_that_torch_grows(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a life of two rows that trees of several shapes teach: every law, also where more tokens
    are alike than are kept, and the chains to the last token and level, also where a row rests.
    """
    draw, vocab, K = random.Random(1), 30, 5
    generator = torch.Generator().manual_seed(0)
    pair = [TableDrafter(kind, CPU, vocab) for _ in range(2)]
    monkeypatch.setattr(pair[1].store, "made", None)
    for drafter in pair:
        drafter.reset(2, 200)
    levels = []
    for step in range(60):
        row, rest = step % 2, draw.random() < 0.2
        if step < 2 or draw.random() < 0.1:
            after = draw.sample(range(vocab), KEPT + 4)
            text = [token for one in after for token in (draw.choice([1, 2]), one)]
            for drafter in pair:
                begun(drafter, row, text)
        topology = Topology.from_parents(draw.choice([[-1, 0, 1], [-1, 0, 0, 1, 1, 3]]), CPU)
        nodes_BN = torch.randint(4, (2, topology.nodes), generator=generator)
        nodes_BN[:, 0] = pair[0].tail(1)[:, 0]
        sharp_BNV = 6 * torch.rand(2, topology.nodes, vocab, generator=generator)
        log_p_BNX, ids_BNX = sharp_BNV.log_softmax(-1).topk(KEPT)
        n_new_B = torch.tensor([draw.randint(0, 2), draw.randint(1, 2)])
        for drafter in pair:
            drafter.extend(
                Kept(
                    nodes_BN[:, 1:3], n_new_B, None, drafter.lens_B - 1, nodes_BN=nodes_BN,
                    topology=topology, ids_BNX=ids_BNX, log_p_BNX=log_p_BNX,
                )
            )  # fmt: skip
        context_XM = torch.randint(4, (50, max(tables.ORDERS[kind])), generator=generator)
        (ids_XK, p_XK), (other_XK, q_XK) = (drafter.store.laws(context_XM) for drafter in pair)
        assert p_XK.equal(q_XK) and ids_XK[p_XK > 0].equal(other_XK[q_XK > 0])
        asked = chain_round(pair[0], K, temperature, step=step, rest=rest)
        own, other = (drafter.propose(asked).tokens_BN for drafter in pair)
        assert own.equal(other)
        levels.append(own.shape[1] - 1)
    assert min(levels) < 3 and max(levels) == K, "some have hope for few levels, some to the end"
