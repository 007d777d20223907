"""Tokenizers that aren't the target's, and tiny models of them that know one text by heart."""

import argparse
import copy
import inspect
import json
from functools import cache
from typing import Any

import torch
from tiny_llama import build_llama
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round
from draftsmith.decode.untrained.foreign import ForeignDrafter
from draftsmith.models.tokenizer import END, PAD, stand_in_tokenizer, train_bpe

VERSE = "the cat sat on the mat, naïve 猫 sat on the cat. " * 3
VERSES = [VERSE[:cut] for cut in (20, 33, 5, 61)]


def permuted(
    tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM
) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """The same vocabulary and the same model, by other ids."""
    order = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(3)).tolist()
    said: Any = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    said["model"]["vocab"] = {name: order[i] for name, i in said["model"]["vocab"].items()}
    for token in said["added_tokens"]:
        token["id"] = order[token["id"]]
    made = Tokenizer.from_str(json.dumps(said))
    own = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD)
    twin = copy.deepcopy(model)
    for parameter in (twin.model.embed_tokens.weight, twin.lm_head.weight):
        parameter.data[order] = parameter.data.clone()
    return own, twin


def bytes_alone() -> PreTrainedTokenizerFast:
    return train_bpe(["a"], 258)


def other_bpe() -> PreTrainedTokenizerFast:
    """Of another text, with other merges at other ids."""
    return train_bpe([inspect.getsource(argparse), VERSE], 380, ("assistant",))


def letters(*names: str) -> PreTrainedTokenizerFast:
    """A token for each of these, and nothing else."""
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    bpe.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def marked() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are letters of their own, one is put before every text, what isn't in
    the vocabulary is spelled in bytes by their numbers.
    """
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *numbers, *"▁acehmnosts", "th", "the", "▁the", "at", "sat", "▁sat", "cat"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(words))}
    joins = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("s", "at"), ("▁", "sat")]
    bpe = Tokenizer(models.BPE(vocab, joins, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


def by_heart(tokenizer: PreTrainedTokenizerBase, seed: int, layers: int = 2) -> LlamaForCausalLM:
    """A model that goes on with VERSE and then ends."""
    model = build_llama(len(tokenizer), layers=layers, hidden=32, seed=seed)
    model.config.eos_token_id = tokenizer.eos_token_id
    ids_1T = torch.tensor([[*tokenizer(VERSE).input_ids, tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        logits_1TV = model(ids_1T).logits
        nn.functional.cross_entropy(logits_1TV[0, :-1], ids_1T[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@cache
def heart(kind: str) -> tuple[PreTrainedTokenizerBase, LlamaForCausalLM]:
    """Tokenizer and model; the target's alone is `target`."""
    if kind == "target":
        return stand_in_tokenizer(320), by_heart(stand_in_tokenizer(320), 0)
    tokenizer = bytes_alone() if kind == "bytes" else other_bpe()
    return tokenizer, by_heart(tokenizer, 1)


class Watched(ForeignDrafter):
    """Compares what the first call of each round says with a fresh pass over the row's text."""

    seen = halved = 0

    def feed(self, request: Round) -> Feed:
        before = sum(len(text.ids) for text in self.texts)
        ask = super().feed(request)
        self.halved += sum(len(text.ids) for text in self.texts) < before

        def feed(frontier: Frontier) -> Fed:
            fed = ask(frontier)
            for row in request.active_B.nonzero()[:, 0].tolist() if frontier.depth == 0 else ():
                ids_1N = torch.tensor([self._ids(self.texts[row])])
                want_H = self.runner.states(ids_1N)[0][0, -1]
                assert torch.allclose(fed.states_BFH[row, 0], want_H, atol=1e-3), row
                self.seen += 1
            return fed

        return feed
