"""DFlash and DSpark against the real `speculators`: the same weights, text and anchors; logits,
loss and gradients; and their folders, both ways.

Its loss of a block's row k is weighed by exp(-k / gamma), and all is divided by the rows trained.
"""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from head_folders import equal_heads, made, on_disk, ours
from tiny_heads import words
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.block import Block
from draftsmith.models.layouts.block_layouts import block_exported
from draftsmith.models.servers.export import export
from draftsmith.models.taps import TargetStates, target_states
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.objectives import block as objectives
from draftsmith.train.objectives.block import Anchors, BlockObjective, Drawn
from draftsmith.train.text.batches import Batch

T, DOCUMENTS, AT, GAMMA = 40, (18, 22), (3, 9, 12, 21, 30), 4.0
LOSSES = {"fkl": "kl_div", "rkl": "rkl", "tv": "tv"}


@dataclass
class Case:
    """A drafter, the name of the loss, and whether it drafts every third token alone."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    loss: str = "fkl"
    some: bool = False

    @property
    def name(self) -> str:
        words = [self.kind, *map(str, self.fields.values()), self.loss, "some" * self.some]
        return " ".join(filter(None, words))


SHIFTED, SAME = {"labels": "shifted", "mask": "full"}, {"labels": "same", "mask": "full"}
CASES = [
    *(Case("dflash", loss=loss) for loss in LOSSES),
    Case("dflash", {"taps": (1, 2, 3), "levels": 7}),
    Case("block", {"light": "none"} | SHIFTED),
    Case("dspark"),
    Case("block", {"light": "markov"} | SAME),
    *(Case("block", {"light": light} | SHIFTED) for light in ("gated", "rnn")),
    Case("block", {"light": "gated"} | SAME, "tv"),
]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return build_llama(320, layers=4, hidden=32, seed=0).requires_grad_(False)


def head_of(case: Case, target: LlamaForCausalLM) -> Block:
    head = made(case.kind, target, qwen=True, layers=2, **case.fields)
    assert isinstance(head, Block)
    if case.some:
        head.drafts = DraftVocab(torch.arange(0, 320, 3), 320)
    return head.bind(target)


def written(head: Block, target: LlamaForCausalLM) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = head.to_json(), head.on_disk()
    exported = block_exported("speculators", config, tensors, target, head.vocab)
    return exported.config, exported.tensors


def their_model(head: Block, target: LlamaForCausalLM) -> Any:
    """Their draft of the config and tensors that we write; its verifier's are the target's."""
    oracle.speculators()
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config, tensors = written(head, target)
    config["speculators_config"]["verifier"]["name_or_path"] = None
    read = SpeculatorModelConfig.from_dict(config)
    read.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.registered_model_class_from_config(read)(read)
    rows_VH = target.lm_head.weight
    borrowed = {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": rows_VH}
    borrowed |= {"verifier_lm_head.weight": rows_VH}
    borrowed |= {"verifier_norm.weight": target.model.norm.weight}
    missing, unknown = model.load_state_dict(tensors | borrowed, strict=False)
    assert not unknown and not missing
    return model.eval()


def batch() -> Batch:
    """A packed row of two documents."""
    torch.manual_seed(5)
    document_T = torch.repeat_interleave(torch.arange(2), torch.tensor(DOCUMENTS))
    position_T = torch.cat([torch.arange(n) for n in DOCUMENTS])
    mask_T = torch.ones(T, dtype=torch.bool)
    mask_T[:-1] = document_T[1:] == document_T[:-1]
    attend_TT = (document_T[:, None] == document_T[None]).tril()
    ids_T = torch.randint(320, (T,))
    return Batch(ids_T[None], position_T[None], mask_T[None], attend_TT[None, None], (0,))


def their_step(model: Any, taps_1TU: Tensor, last_1TG: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Logits [M, b, V] without a light head, and the loss."""
    from speculators.losses import resolve_loss_config

    text, kept = batch(), []
    hook = model.lm_head.register_forward_hook(lambda *call: kept.append(call[2]))
    eager = resolve_loss_config(LOSSES[loss], "eager")
    own = {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
    _, value, _ = model(
        hidden_states=taps_1TU,
        input_ids=text.input_ids,
        document_ids=torch.repeat_interleave(torch.arange(2), torch.tensor(DOCUMENTS))[None],
        loss_mask=torch.ones(1, T, dtype=torch.bool),
        position_ids=text.position_ids,
        verifier_last_hidden_states=last_1TG,
        loss_config=eager,
        gamma=GAMMA,
        max_anchors=len(AT),
        **(own if hasattr(model, "markov_head") else {}),
    )
    hook.remove()
    return kept[0].unflatten(1, (len(AT), -1))[0], value


def our_step(head: Block, case: Case, seen: TargetStates, target: LlamaForCausalLM) -> Tensor:
    """The loss by their normaliser."""
    given = (head, target, words(320), lambda _: seen)
    objective = BlockObjective(Anchors(decay=GAMMA), *given, loss=case.loss)
    output = objective(batch())
    depth_n = torch.exp(-torch.arange(head.levels) / GAMMA)
    return output.loss * depth_n.sum() / (len(AT) * head.levels + 1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(case, target)
    model = their_model(head, target)
    head.requires_grad_(True)
    from speculators.models.dflash import core

    at_M = torch.tensor(AT)
    monkeypatch.setattr(core, "select_anchors", lambda *_: (at_M, torch.ones_like(at_M).bool()))
    whole = torch.ones(1, len(AT), head.levels, dtype=torch.bool)
    drawn = Drawn(at_M[None], whole, torch.ones(1, len(AT), 1))
    monkeypatch.setattr(objectives, "draw", lambda *_: drawn)
    text = batch()
    inputs = {"input_ids": text.input_ids, "position_ids": text.position_ids}
    inputs["attention_mask"] = text.attention_mask
    seen = target_states(target, head.taps, **inputs)
    last_1TG = target_states(target, (4,), **inputs).taps_BTF  # theirs norms it itself
    theirs_MbV, their_loss = their_step(model, seen.taps_BTF, last_1TG, case.loss)
    base_BMnH, _ = head.drafted(seen.taps_BTF, text.input_ids, text.position_ids, at_M[None])
    ours_MnV = base_BMnH[0] @ target.lm_head.weight.T
    assert (theirs_MbV[:, head.first :] - ours_MnV).abs().max() < 2e-5
    our_loss = our_step(head, case, seen, target)
    assert abs(their_loss - our_loss) < 2e-6
    their_loss.backward()
    our_loss.backward()
    _, names = written(head, target)
    where = {id(tensor): name for name, tensor in names.items()}
    found, compared = dict(model.named_parameters()), 0
    for name, parameter in head.state_dict(keep_vars=True).items():
        other = found[next(n for n, t in names.items() if t.data_ptr() == parameter.data_ptr())]
        assert torch.allclose(parameter.grad, other.grad, atol=2e-6), name
        compared += 1
    assert compared == len(where) > 20


def reread(folder: Path, target: LlamaForCausalLM) -> Any:
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        opened = open_drafter(folder, None, target_config=target.config)
    head = opened.head()
    head.drafts = opened.vocab
    return head


FOLDERS = [case for case in CASES if case.loss == "fkl"]
FOLDERS += [Case(kind, some=True) for kind in ("dflash", "dspark")]


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_both_ways(
    case: Case, target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """What their loader makes of our folder, and ours of theirs, tensor by tensor."""
    oracle.speculators()
    from speculators import SpeculatorModel, SpeculatorModelConfig

    path = on_disk(tmp_path / "target", target, tiny_tokenizer)
    head = head_of(case, target)
    folder = ours(tmp_path / "head", head, target, tiny_tokenizer, head.drafts)
    line = export(str(folder), path, "speculators", str(tmp_path / "out"))
    assert line == f"vllm serve {tmp_path / 'out'}"
    config = SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
    config.transformer_layer_config._attn_implementation = "eager"
    assert config.target_vocab_size == 320
    assert config.draft_vocab_size == len(head.vocab.ids_D) == (107 if case.some else 320)
    proposal = config.speculators_config.proposal_methods[0]
    assert proposal.speculative_tokens == head.levels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SpeculatorModel.from_pretrained(str(tmp_path / "out"), config=config).eval()
    _, wanted = written(head, target)
    wanted = {"lm_head.weight": target.lm_head.weight} | wanted
    wanted["embed_tokens.weight"] = target.model.embed_tokens.weight
    loaded = {n: t for n, t in model.state_dict().items() if not n.startswith("verifier_")}
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name
    model.save_pretrained(tmp_path / "back")
    mine, back = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "back"))
    layer, kept = (each.pop("transformer_layer_config") for each in (mine, back))
    assert {name: kept[name] for name in layer} == layer
    # Nothing that it writes is missing from ours, and nothing of ours is lost there.
    assert {k: v for k, v in back.items() if k not in ("transformers_version", "auto_map")} == mine
    if case.some and head.light.rank:  # of other tokens' rows nothing is said
        head.light.after.weight[~head.vocab.t2d_V] = 0
    for again in ("out", "back"):
        found = reread(tmp_path / again, target)
        equal_heads(found, head)
        assert torch.equal(found.vocab.ids_D, head.vocab.ids_D)
        same: dict[str, Any] = {"layer": None}
        same |= {"rank": 1} if head.config.light == "none" else {}  # nothing has it
        assert vars(found.config) | same == vars(head.config) | same


def test_a_confidence_head_is_left_out(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Folders as the package trains them: with that head, and without a word about labels."""
    oracle.speculators()
    from speculators import SpeculatorModelConfig
    from speculators.models.dspark import DSparkDraftModel

    head = head_of(Case("dspark"), target)
    config, tensors = written(head, target)
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    del config["sample_from_anchor"]
    config["speculators_config"]["verifier"]["name_or_path"] = None
    model = DSparkDraftModel(SpeculatorModelConfig.from_dict(config))
    model.load_state_dict(tensors, strict=False)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="its confidence head is left out"):
        opened = open_drafter(tmp_path / "theirs", None)
    equal_heads(opened.head(), head)
    assert opened.kind == "dspark"


def test_the_frame_is_theirs() -> None:
    """A block's row is at its anchor's position and further, in their mask too."""
    oracle.speculators()
    from speculators.models.dflash.attention import create_anchor_block_mask_mod
    from speculators.models.dflash.utils import get_base_indices_for_anchored_blocks

    at_M = torch.tensor([2, 6])
    assert get_base_indices_for_anchored_blocks(at_M, 3).tolist() == [2, 3, 4, 6, 7, 8]
    documents_T = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    mod, queries, keys = create_anchor_block_mask_mod(documents_T, 9, at_M, 3)
    seen = SimpleNamespace(q=torch.arange(queries)[:, None], k=torch.arange(keys)[None])
    row = mod(*torch.zeros(2, 1, 1).long(), seen.q, seen.k)[4]
    assert row.nonzero().flatten().tolist() == [4, 5, 9 + 3, 9 + 4, 9 + 5]
