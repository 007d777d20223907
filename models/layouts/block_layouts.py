"""Block drafters as servers and toolkits read them; every tensor is the head's, bit for bit.

    official      z-lab's DFlash and DeepSpec's DSpark, which vLLM and SGLang read. It names the
                  layers whose output is tapped, from 0: tap - 1.
    speculators   the unified format, which vLLM reads too. It counts layers that have run, as ours.

None has a place for a MASK of the head's own but vLLM, which takes one of DFlash from a file
(`MASK_FILE`) in place of the embedding of `mask_token_id`. By the loaders' source, see
`models.server_facts`.
"""

from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.layers.layer import rope_fields
from draftsmith.models.layouts.eagle_layouts import LAYER_KEYS, Config, Tensors, speculators_fields
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.target import head_weight
from draftsmith.models.vocab import DraftVocab

MASK_FILE = "mask_embedding.pt"
MARKOV = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}  # our light head -> DSpark's name
# Our name of a tensor's beginning -> theirs.
NAMES = {"light.before.": "markov_w1.", "light.after.": "markov_w2.", "light.gate.": "gate_proj."}
NAMES |= {"light.gates.": "joint_proj."}
MARKOV_HEAD = "markov_head."
AFTER = "light.after.weight"  # of which theirs has the rows of the draft vocabulary
ENDS, GATED = ("pad", "bos", "eos"), ("gated", "rnn")


def block_exported(
    to: str, config: Config, tensors: Tensors, target: PreTrainedModel, vocab: DraftVocab
) -> Exported:
    """The head of our own config.json and tensors; ValueError where `to` would draft otherwise.
    vocab: what it drafts, which only speculators' layout can say.
    """
    own_mask = tensors.pop("mask", None)
    layers = target.config.get_text_config().num_hidden_layers
    if reason := unread(to, config, layers):
        raise ValueError(f"to={to}: got a block drafter that it would draft wrongly with: {reason}")
    if to == "speculators" and not vocab.is_full:
        whole = {"lm_head.weight": head_weight(target).detach()}
        whole |= {AFTER: tensors[AFTER]} if AFTER in tensors else {}
        for name, rows_VX in whole.items():
            tensors[name] = rows_VX[vocab.ids_D.to(rows_VX.device)].to(tensors["fc.weight"])
        tensors |= {"d2t": vocab.d2t_D, "t2d": vocab.t2d_V}
    elif AFTER in tensors and not (vocab.is_full or tensors[AFTER][~vocab.t2d_V].any()):
        raise ValueError(
            f"to={to}: got a light head that was trained for {len(vocab.ids_D):,} of its tokens, "
            "which only speculators' layout can say; expected to=speculators"
        )
    for ours, theirs in NAMES.items():
        for name in [name for name in tensors if name.startswith(ours)]:
            tensors[MARKOV_HEAD + theirs + name.removeprefix(ours)] = tensors.pop(name)
    if own_mask is not None:
        # A token after which nothing is drafted stands in: its embedding isn't read elsewhere.
        ends = [getattr(target.config, f"{end}_token_id", None) for end in ENDS]
        known = [token for token in ends if isinstance(token, int)]
        config = config | {"mask_token": (*known, config["vocab_size"] - 1)[0]}
    rows = config["levels"] + (config["labels"] == "same")
    said = {"block_size": rows, "mask_token_id": config["mask_token"]}
    if spark := config["light"] in MARKOV:
        said |= {"markov_rank": config["rank"], "markov_head_type": MARKOV[config["light"]]}
        said |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    kept = {name: value for name, value in config.items() if name in LAYER_KEYS}
    if to == "speculators":
        made = said | speculators_fields("dspark" if spark else "dflash", target, config["levels"])
        made |= {
            "architectures": ["DSparkDraftModel" if spark else "DFlashDraftModel"],
            "aux_hidden_state_layer_ids": list(config["taps"]),
            "draft_vocab_size": len(vocab.ids_D),
            "dtype": dtype,
            "sample_from_anchor": config["labels"] == "shifted",
            # Of layers with a window, and these have none; but a vLLM takes false for "causal".
            "sliding_window_non_causal": True,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": kept,
        }
        return Exported(made, tensors, K=config["levels"])
    said |= {"target_layer_ids": [tap - 1 for tap in config["taps"]]}
    made = kept | rope_fields(config["rope_parameters"]) | said
    made |= {
        "architectures": ["Qwen3DSparkModel" if spark else "DFlashDraftModel"],
        "dflash_config": said,  # readers differ in where they look
        "is_causal": config["mask"] == "causal",
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "num_target_layers": layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    beside: dict[str, Any] = {} if own_mask is None else {MASK_FILE: {"embedding": own_mask}}
    return Exported(made, tensors, beside=beside, K=config["levels"])


def unread(to: str, config: Config, layers: float = inf) -> str | None:
    """Why a stack would draft wrongly with the head of this config.json of ours; None where it
    would not. layers: of the target.
    """
    light, same = config["light"], config["labels"] == "same"
    inside = all(isinstance(tap, int) and 0 < tap < layers for tap in config["taps"])
    reasons = (
        ("its layers have no norms on queries and keys: train it with head.layer=qwen3",
         config["model_type"] != "qwen3"),
        ("its MASK is a vector of its own: train it with head.mask_token, a token's embedding",
         config["mask_token"] < 0 and (to, light) != ("vllm", "none")),
        (f"readers differ in what taps {list(config['taps'])} are, other than 1 to its layers - 1",
         not inside),
        (f"it knows no light head of kind {light}", light not in ("none", *MARKOV)),
        ("it has no short convolutions as these are (convs)", config["convs"]),
        ("nothing tells it the noise (noise)", config["noise"]),
        ("its blocks are never causal (mask)", config["mask"] == "causal" and to != "vllm"),
        ("a recurrent light head reads the pending token twice there (labels: same)",
         light == "rnn" and same),
        (f"it draws with labels \"{'shifted' if same else 'same'}\" by such a head",
         to != "speculators" and same == (light != "none")),
        ("it has DSpark's first light head alone (markov)",
         to in ("vllm", "gguf") and light in GATED),
    )  # fmt: skip
    return next((reason for reason, holds in reasons if holds), None)


def vector_of(state: Tensor | dict[str, Any]) -> Tensor:
    """MASK in the content of `MASK_FILE`."""
    vector = state["embedding"] if isinstance(state, dict) else state
    assert isinstance(vector, torch.Tensor)
    return vector.reshape(-1)
