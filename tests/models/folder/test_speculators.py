"""EAGLE-3 against the real `speculators`: the same weights and inputs, all steps, loss included.

Its arrays begin at token 1 (`shift_batch`): its row i is our position t = i, with the token i + 1
and the target's state i + 1. Its loss of step s is a mean over the trained rows of that step.
"""

from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from tapped import LAYERS, llama
from tiny_eagle import eagle, layer_config
from torch import Tensor
from transformers import Qwen3Config

from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.taps import target_states
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.losses.chunked import chunked_steps
from draftsmith.train.losses.pure import divergence
from draftsmith.train.objectives.eagle import trained
from draftsmith.train.text.batches import Batch

T, DOCUMENTS = 21, (8, 13)
THEIRS = {"fkl": "kl_div", "rkl": "rkl", "tv": "tv", "nla": "nla"}


@dataclass
class Case:
    """A setting of both: fields of EagleConfig, steps, and the name of the loss."""

    name: str
    fields: dict[str, Any]
    steps: int = 3
    loss: str = "fkl"


CASES = [
    Case("plain", {}),
    *(Case(f"{s} steps", {}, steps=s) for s in (1, 7)),
    Case("qwen3", {"layer": layer_config(Qwen3Config)}, steps=7),
    Case("two layers", {"layer": layer_config(layers=2)}),
    Case("two qwen3 layers", {"layer": layer_config(Qwen3Config, layers=2)}),
    Case("half the vocabulary", {"draft_vocab": 48}, steps=7),
    *(Case(flag, {flag: True}) for flag in ("fc_norm", "norm_before_fc", "norm_before_residual")),
    Case("norm_output", {"norm_output": True}, steps=7),
    Case(
        "all at once",
        {"layer": layer_config(Qwen3Config), "draft_vocab": 48, "taps": (0, 1, 3)}
        | {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        steps=7,
    ),
    *(Case(f"{n} taps", {"taps": tuple(range(n))}) for n in (1, 2, 3, 4)),
    *(Case(loss, {"draft_vocab": 48}, loss=loss) for loss in ("rkl", "tv", "nla")),
]


def their_model(head: Eagle):
    """Their draft with our weights; their verifier's parts are the target's."""
    oracle.speculators()
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config, target = head.config, llama()
    layer = type(config.layer)(**config.layer.to_dict())
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    flags = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config.draft_vocab,
            # Only their number counts: the states are handed over.
            eagle_aux_hidden_state_layer_ids=list(range(len(config.taps))),
            speculators_config=about,
            **{flag: getattr(config, flag) for flag in flags},
        )
    )
    rows_DG = target.lm_head.weight[head.vocab.ids_D]
    borrowed = {
        "embed_tokens.weight": target.model.embed_tokens.weight,
        "verifier_lm_head.weight": rows_DG,
        "verifier_norm.weight": target.model.norm.weight,
    }
    missing, unknown = model.load_state_dict({**head.state_dict(), **borrowed}, strict=False)
    assert not unknown
    assert not missing
    return model.eval()


def batch() -> Batch:
    """One packed row: two documents, of which the first has a prompt."""
    torch.manual_seed(5)
    document_T = torch.repeat_interleave(torch.arange(2), torch.tensor(DOCUMENTS))
    position_T = torch.cat([torch.arange(n) for n in DOCUMENTS])
    loss_T = torch.ones(T, dtype=torch.bool)
    loss_T[:3] = False  # of tokens
    mask_T = torch.zeros(T, dtype=torch.bool)
    mask_T[:-1] = loss_T[1:] & (document_T[1:] == document_T[:-1])
    attend_TT = (document_T[:, None] == document_T[None]).tril()
    ids_T = torch.randint(97, (T,))
    return Batch(ids_T[None], position_T[None], mask_T[None], attend_TT[None, None], (0,))


def head_of(case: Case) -> Eagle:
    head = eagle(llama(), **({"taps": (1, 2, 3)} | case.fields))
    if case.fields.get("draft_vocab", 97) < 97:
        head.set_vocab(DraftVocab(torch.arange(48) * 2 + 1, 97))
    return head


def their_step(model, case: Case, hidden_1TU: Tensor, last_1TG: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, T - 1, D] and their loss, by their own forward on their own frame."""
    from speculators.losses import resolve_loss_config

    text = batch()
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: logits.append(call[2]))
    document_1T = torch.repeat_interleave(torch.arange(2), torch.tensor(DOCUMENTS))[None]
    _, loss, _ = model(
        hidden_states=hidden_1TU[:, :-1],
        input_ids=text.input_ids[:, 1:],
        document_ids=document_1T[:, :-1],
        loss_mask=text.loss_mask[:, 1:],
        position_ids=text.position_ids[:, :-1],
        verifier_last_hidden_states=last_1TG[:, 1:],
        ttt_steps=case.steps,
        ttt_step_loss_decay=0.8,
        loss_config=resolve_loss_config(THEIRS[case.loss], "eager"),
    )
    hook.remove()
    return torch.cat(logits), loss


def our_step(head: Eagle, case: Case, hidden_1TU: Tensor, norm_1TG: Tensor):
    """Logits [S, T, D], and the loss by their normaliser: a mean at each step."""
    text = batch()
    args = (text.input_ids, text.position_ids, text.attention_mask)
    states = head.unroll(head.fuse(hidden_1TU), *args, steps=case.steps)
    logits_STD = torch.cat([state @ head.head_DH.T for state in states])
    # Their mask at (t, s) is that of position n = t + 1 + s alone: a pair whose n is in the next
    # document counts there, but not here.
    mask_SN = torch.stack(
        [F.pad(text.loss_mask[0, 1 + s :], (1 + s, 0)) for s in range(case.steps)]
    )
    assert (mask_SN >= trained(text, case.steps)).all()
    count_S1 = mask_SN.sum(1, keepdim=True) + 1e-5
    weight_SN = mask_SN * 0.8 ** torch.arange(case.steps)[:, None] / count_S1
    p_head_DG = llama().lm_head.weight[head.vocab.ids_D]
    states_SNH = [state.flatten(0, 1) for state in states]
    losses = [divergence(case.loss)] * case.steps
    found = chunked_steps(
        losses, states_SNH, head.head_DH, norm_1TG[0], p_head_DG, weight_SN.float()
    )
    return logits_STD, found[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case) -> None:
    head = head_of(case)
    model = their_model(head)
    text, target = batch(), llama()
    inputs = {"input_ids": text.input_ids, "position_ids": text.position_ids}
    inputs["attention_mask"] = text.attention_mask
    hidden_1TU = target_states(target, head.taps, **inputs).taps_BTF
    # Theirs norms the last state itself, ours has it from the target.
    last_1TG = target_states(target, (LAYERS,), **inputs).taps_BTF
    norm_1TG = target_states(target, (), **inputs).norm_BTG
    theirs, their_loss = their_step(model, case, hidden_1TU, last_1TG)
    ours, our_loss = our_step(head, case, hidden_1TU, norm_1TG)
    assert theirs.shape == ours[:, :-1].shape
    for step in range(case.steps):
        worst = (theirs[step] - ours[step, :-1]).abs().max()
        assert worst < 1e-5, f"step {step}: logits differ by {worst}"
    assert abs(their_loss - our_loss) < 1e-6
    # And so do the gradients: theirs keeps its LM head frozen.
    their_loss.backward()
    our_loss.backward()
    found = dict(model.named_parameters())
    compared = 0
    for name, parameter in head.named_parameters():
        if name != "lm_head.weight":
            assert torch.allclose(parameter.grad, found[name].grad, atol=1e-5), name
            compared += 1
    assert compared > 8


def test_the_frame_is_theirs() -> None:
    """Their own shift of a document is what `their_step` hands over."""
    oracle.speculators()
    from speculators.models.eagle3.data import shift_batch

    numbers = torch.arange(6)
    shifted = shift_batch(
        {name: numbers for name in ("input_ids", "hidden_states", "verifier_last_hidden_states")}
        | {"loss_mask": numbers, "position_ids": numbers, "lengths": torch.tensor([6])}
    )
    assert shifted["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert shifted["hidden_states"].tolist() == [0, 1, 2, 3, 4]
    assert shifted["verifier_last_hidden_states"].tolist() == [1, 2, 3, 4, 5]
    # A constant more, which rotary angles don't see.
    assert shifted["position_ids"].tolist() == [1, 2, 3, 4, 5]
