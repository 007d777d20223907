"""Draft vocabularies of draft LMs and heads: lossless, and worth what the table says."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made, on_disk, ours
from saved_drafts import save_draft
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter, weights_read
from draftsmith.decode.drafters.load import drafter_of, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import export, serve_line
from draftsmith.models.vocab import FILE, DraftVocab
from draftsmith.train.drafts.start import earlier_head, given_draft
from draftsmith.train.text.prepared import answer_file, claim, load_prepared
from draftsmith.train.trim import AS_IT_IS, Trim, run, trimmed_head

V = 320
PROMPTS = [[5 + i, 9, 30 + i] for i in range(6)]
SOME = DraftVocab(torch.arange(0, V, 3), V)


def save_lm(folder: Path, vocab: DraftVocab | None, pair: Any) -> Path:
    target, draft, tokenizer = pair
    save_draft(
        folder,
        draft,
        target,
        tokenizer,
        provenance={"recipe": "test"},
        defaults={"K": 3},
        vocab=vocab,
    )
    return folder


@pytest.fixture(scope="session")
def pair(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    return tiny_target, tiny_draft, tiny_tokenizer


# ---- decoding -----------------------------------------------------------------------------------


def test_trimmed_logits_are_the_others_or_nothing(tiny_target: PreTrainedModel) -> None:
    """Padding rows among the kept ones have no logits either."""
    model, ids_BT = copy.deepcopy(tiny_target), torch.tensor([PROMPTS[0] * 2])
    whole, some = LMDrafter(model, 300), LMDrafter(model, 300, SOME)
    assert isinstance(some.runner.call, LeanBody)
    got_BTV, wanted_BTV = (d.teacher_logits(ids_BT) for d in (some, whole))
    has_V = SOME.t2d_V[:300]
    torch.testing.assert_close(got_BTV[..., has_V], wanted_BTV[..., has_V])
    assert got_BTV.shape == wanted_BTV.shape and got_BTV[..., ~has_V].isneginf().all()
    assert whole.parameter_bytes == weights_read(model)
    assert whole.parameter_bytes - some.parameter_bytes == (V - len(SOME.ids_D)) * 32 * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:3,4,10"])
def test_decoding_stays_lossless(
    pair: tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase],
    tree: str,
    temperature: float,
) -> None:
    """The target drafts for itself, without two thirds of the tokens that it writes."""
    target, _, tokenizer = pair
    params = SamplingParams(temperature=temperature, max_new_tokens=24, ignore_eos=True)
    plain = Decoder(target, tokenizer).generate(PROMPTS, params)
    drafter = LMDrafter(target, V, SOME)
    done = Decoder(target, tokenizer, drafter, tree=tree, batch_size=4).generate(PROMPTS, params)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    drafted = {t for c in done for t, own in zip(c.tokens, c.accepted, strict=True) if own}
    written = {t for c in plain for t in c.tokens}
    assert drafted and drafted <= set(SOME.ids_D.tolist()) and written - set(SOME.ids_D.tolist())


def test_alpha_is_that_of_the_trimmed_law(
    pair: tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """q renormalised over the kept tokens, against the definition."""
    target, draft, tokenizer = pair
    params = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True)
    answer = Decoder(target, tokenizer).generate(PROMPTS[:1], params)[0]
    ids_BT = torch.tensor([answer.prompt_tokens + answer.tokens])
    with torch.no_grad():
        p_TV, q_TV = (m(ids_BT).logits[0].softmax(-1) for m in (target, draft))
    q_TV = q_TV * SOME.t2d_V / q_TV[:, SOME.ids_D].sum(1, keepdim=True)
    wanted = torch.minimum(p_TV, q_TV)[2:-1].sum()
    row = teacher_forced(Runner(target, V), LMDrafter(draft, V, SOME), [answer], params)[0]
    assert row.positions == 20 and row.alpha == pytest.approx(float(wanted), rel=1e-5)


# ---- the folder ---------------------------------------------------------------------------------


def test_a_folder_keeps_the_whole_model_and_the_map(pair: Any, tmp_path: Path) -> None:
    target, draft, tokenizer = pair
    folder = save_lm(tmp_path / "draft", SOME, pair)
    loaded = load_drafter(str(folder), target, tokenizer)
    assert isinstance(loaded, LMDrafter) and torch.equal(loaded.vocab.ids_D, SOME.ids_D)
    assert len(loaded.runner.head.weight) == len(SOME.ids_D)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(plain.lm_head.weight, draft.lm_head.weight)
    # vLLM and SGLang read every safetensors file of a folder as weights.
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert f"all {V} tokens" in serve_line(folder, "target")
    with pytest.warns(UserWarning, match="comes last"):
        assert given_draft(str(folder), target, tokenizer).lm_head.weight.shape[0] == V
    save_lm(folder, None, pair)  # the folder is replaced whole
    assert not (folder / FILE).exists() and open_drafter(folder, None).vocab is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda meta, map_: map_.clear(), "a vocabulary_map and no draft_vocab.json"),
        (lambda meta, map_: meta.update(vocabulary_map=None), "and no vocabulary_map"),
        (lambda meta, map_: map_["d2t"].pop(), f"of 106 of {V} tokens, expected 107"),
        (lambda meta, map_: map_.update(target=4096), "of 107 of 4096 tokens, expected 107"),
        (lambda meta, map_: map_.update(tokenizer="another"), "belongs to another draft"),
        (lambda meta, map_: map_.update(d2t="0"), "without d2t"),
        (lambda meta, map_: map_["d2t"].__setitem__(-1, 900), "outside the vocabulary"),
        (lambda meta, map_: map_["d2t"].__setitem__(-1, -9), "ascending"),
    ],
)
def test_a_wrong_map_is_refused(pair: Any, tmp_path: Path, change: Any, says: str) -> None:
    folder = save_lm(tmp_path / "draft", SOME, pair)
    files = [folder / "draftsmith.json", folder / FILE]
    contents = [json.loads(file.read_text()) for file in files]
    change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content)) if content else file.unlink()
    with pytest.raises(ValueError, match=says) as error:
        open_drafter(folder, None)
    assert "expected" in str(error.value) or "without" in str(error.value)


def test_servers_get_the_whole_model(pair: Any, tmp_path: Path) -> None:
    target, draft, tokenizer = pair
    folder = save_lm(tmp_path / "draft", SOME, pair)
    path = on_disk(tmp_path / "target", target, tokenizer)
    export(str(folder), path, "vllm", str(tmp_path / "out"))
    assert not (tmp_path / "out" / FILE).exists()
    with pytest.warns(UserWarning, match="plain causal LM"):
        plain = open_drafter(tmp_path / "out", None)
    assert plain.vocab is None
    assert torch.equal(plain.model().lm_head.weight, draft.lm_head.weight)
    layout, findings = examine(str(folder), path)
    assert [f.says for f in findings if f.check == "draft vocabulary"] == [f"107 of {V} tokens"]
    assert "drafts with its whole LM head" in outlook(layout, findings)["vLLM 0.33"]
    assert outlook(layout, findings)["draftsmith"] == "reads it"


# ---- the choice ---------------------------------------------------------------------------------


def test_the_most_frequent_of_those_there_are() -> None:
    counts_V = torch.tensor([9, 0, 5, 5, 1, 8])
    whole = DraftVocab.whole(6)
    assert whole.among(counts_V, 3).ids_D.tolist() == [0, 2, 5]
    assert whole.among(counts_V, 3, keep=(1, 1)).ids_D.tolist() == [0, 1, 5]
    some = DraftVocab(torch.tensor([1, 2, 4]), 6)
    assert some.among(counts_V, 2, keep=(0,)).ids_D.tolist() == [2, 4]
    for size, keep in ((0, ()), (6, ()), (1, (0, 1))):
        with pytest.raises(ValueError, match=f"got {size} tokens"):
            whole.among(counts_V, size, keep)


@pytest.mark.parametrize(
    ("kind", "about", "rows"),  # of LM heads, left out, that a draft call doesn't read
    [
        ("eagle3", {}, 120),
        ("eagle1", {}, 240),
        ("mtp", {}, 240),
        ("medusa", {}, 240),
        ("medusa", {"own_heads": False}, 80),
        ("hydra", {"head_bias": True}, 240),
        ("dflash", {}, 60),
        ("dspark", {"rank": 32}, 60 + 240),
        ("block", {"light": "layer"}, 240),
        ("clover2", {}, 240),
        ("falcon-2", {}, 120),
    ],
    ids=str,
)
def test_a_trimmed_head_drafts_as_before_what_it_kept(
    tiny_target: PreTrainedModel, kind: str, about: dict[str, Any], rows: int
) -> None:
    head = made(kind, tiny_target, **about)
    fewer = DraftVocab(head.vocab.ids_D[::4], V)
    before, after = (drafter_of(h, tiny_target, V) for h in (head, trimmed_head(head, fewer)))
    ids_BT = torch.tensor([PROMPTS[0] * 2])
    taps_BTU = torch.randn(1, 6, 32 * len(head.taps))
    wanted_BTV, got_BTV = (d.teacher_logits(ids_BT, taps_BTU)[:, 1:] for d in (before, after))
    torch.testing.assert_close(got_BTV[..., fewer.ids_D], wanted_BTV[..., fewer.ids_D])
    assert got_BTV[..., ~fewer.t2d_V].isneginf().all()
    assert before.parameter_bytes - after.parameter_bytes == rows * 32 * 4
    assert len(head.vocab.ids_D) == len(before.vocab.ids_D) > len(after.vocab.ids_D)


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_hand(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A pair on disk, prompts, and the target's answers to those that aren't held out."""
    target, _, tokenizer = pair
    root = tmp_path_factory.mktemp("trim")
    lines = [{"prompt": f"word {i} of {i * i}", "completion": "x"} for i in range(120)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = load_rows(str(root / "prompts.jsonl"), "train")[:8]
    asked = [tokenizer(row.prompt).input_ids for row in rows]
    params = SamplingParams(temperature=1.0, max_new_tokens=24)
    done = Decoder(target, tokenizer, batch_size=8).generate(asked, params)
    claim(root / "answers", {"requests": 8}, {})
    with answer_file(root / "answers", 0, 1) as append:
        for i, one in enumerate(done):
            ids = {"prompt_ids": one.prompt_tokens, "token_ids": one.tokens}
            append({"index": i, "finish_reason": one.finish_reason, **ids})
    return {
        "drafter": str(save_lm(root / "draft", None, pair)),
        "target": on_disk(root / "target", target, tokenizer),
        "data": str(root / "answers"),
        "prompts": str(root / "prompts.jsonl"),
    }


def asking(at_hand: dict[str, str], out: Path, **more: Any) -> Trim:
    few = {"sizes": "40,80", "limit": 2, "max_new_tokens": 12, "temperature": 1.0}
    return Trim(**at_hand | {"out": str(out), "dtype": "float32"} | few | more)


def test_the_command_trims_a_draft(pair: Any, at_hand: dict[str, str], tmp_path: Path) -> None:
    rows, line = run(asking(at_hand, tmp_path / "out"), ["data=answers"])
    assert [row["name"] for row in rows] == [AS_IT_IS, 40, 80] and "vllm serve" in line
    opened = open_drafter(tmp_path / "out", fingerprint(pair[0], pair[2]))
    chosen = next(row for row in rows if row["chosen"])
    assert opened.vocab is not None and len(opened.vocab.ids_D) == chosen["name"]
    assert opened.meta["provenance"]["trim"]["tau"] == chosen["tau"]
    assert opened.meta["provenance"]["recipe"] == "test" and opened.meta["defaults"]["K"] == 3
    examples = load_prepared(at_hand["data"])
    counts_V = torch.bincount(examples.ids[examples.trained].long(), minlength=V)
    order = sorted(range(V), key=lambda v: (v != 0, -int(counts_V[v]), v))  # 0 ends an answer
    assert opened.vocab.ids_D.tolist() == sorted(order[: chosen["name"]])
    assert chosen["counted"] == int(counts_V[opened.vocab.ids_D].sum()) / int(counts_V.sum())
    whole = rows[0]
    assert whole["counted"] == whole["written"] == 1 and whole["tau_change"] == 0
    size = sum(p.numel() for p in pair[0].parameters()) - V * 32
    for row in rows:
        # K = 3, all in fp32; the target's untied embeddings aren't read.
        assert row["mbsu"] == pytest.approx(row["tau"] / (1 + 3 * row["bytes"] / (4 * size)))
        assert row["alpha"] <= 1 and row["tau"] >= 1 and row["c"] > 0
    assert whole["bytes"] > rows[2]["bytes"] > rows[1]["bytes"]
    # A trimmed draft LM still has all rows: it can grow again.
    again = asking(at_hand, tmp_path / "more", drafter=str(tmp_path / "out"), sizes="100", size=100)
    rows, _ = run(again, [])
    assert [row["tokens"] for row in rows] == [chosen["name"], 100]


def test_the_command_trims_an_eagle_head(
    pair: Any, at_hand: dict[str, str], tmp_path: Path
) -> None:
    target, _, tokenizer = pair
    head = made("eagle3", target)
    assert isinstance(head, Eagle)
    ours(tmp_path / "head", head, target, tokenizer)
    settings = asking(at_hand, tmp_path / "out", drafter=str(tmp_path / "head"), sizes="9", size=50)
    rows, _ = run(settings, [])
    assert [row["tokens"] for row in rows] == [160, 9, 50]
    got = open_drafter(tmp_path / "out", fingerprint(target, tokenizer)).head()
    assert isinstance(got, Eagle)
    places = [head.vocab.ids_D.tolist().index(i) for i in got.vocab.ids_D.tolist()]
    assert len(places) == 50
    assert torch.equal(got.lm_head.weight, head.lm_head.weight[places])
    assert torch.equal(got.fc.weight, head.fc.weight)


@pytest.mark.parametrize("kind", ["lm", "eagle1", "eagle3"])
def test_the_command_gives_a_preview(
    pair: Any, at_hand: dict[str, str], tmp_path: Path, kind: str
) -> None:
    target, _, tokenizer = pair
    if kind != "lm":
        at_hand = at_hand | {
            "drafter": str(ours(tmp_path / "head", made(kind, target), *pair[::2]))
        }
    settings = asking(at_hand, tmp_path / "out", sizes="70", ranks="16", rank=16)
    rows, _ = run(settings, [])
    tokens = rows[0]["tokens"]
    assert [(row["tokens"], row["rank"]) for row in rows] == [
        (tokens, None),
        (70, None),
        (tokens, 16),
    ]
    opened = open_drafter(tmp_path / "out", fingerprint(target, tokenizer))
    assert opened.meta["defaults"]["preview"] == 16 and opened.vocab is None
    drafter = load_drafter(str(tmp_path / "out"), target, tokenizer)
    assert drafter is not None and drafter.per_node is not None
    assert drafter.per_node.preview is not None and drafter.parameter_bytes == rows[2]["bytes"]
    # What was trimmed once is trimmed again: fewer tokens, by the preview that it has.
    again = asking(at_hand, tmp_path / "more", drafter=str(tmp_path / "out"), sizes="80", size=80)
    rows, _ = run(again, [])
    assert [(row["tokens"], row["rank"]) for row in rows] == [(tokens, 16), (80, 16)]
    assert open_drafter(tmp_path / "more", None).meta["defaults"]["preview"] == 16


@pytest.mark.parametrize("kind", ["medusa", "dspark", "eagle1"])
def test_other_heads_keep_their_rows_and_have_a_map_beside(
    pair: Any, at_hand: dict[str, str], tmp_path: Path, kind: str
) -> None:
    target, _, tokenizer = pair
    head = made(kind, target)
    ours(tmp_path / "head", head, target, tokenizer)
    settings = asking(at_hand, tmp_path / "out", drafter=str(tmp_path / "head"), sizes="9", size=50)
    rows, _ = run(settings, [])
    assert [row["tokens"] for row in rows] == [V, 9, 50]
    opened = open_drafter(tmp_path / "out", fingerprint(target, tokenizer))
    assert opened.vocab is not None and len(opened.vocab.ids_D) == 50
    for name, tensor in head.state_dict().items():
        assert torch.equal(opened.head().state_dict()[name], tensor)
    drafter: Any = load_drafter(str(tmp_path / "out"), target, tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=24, ignore_eos=True)
    plain = Decoder(target, tokenizer).generate(PROMPTS, params)
    done = Decoder(target, tokenizer, drafter, batch_size=2).generate(PROMPTS, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    drafted = {t for c in done for t, own in zip(c.tokens, c.accepted, strict=True) if own}
    assert drafted <= set(opened.vocab.ids_D.tolist())
    with pytest.warns(UserWarning, match="comes last"):
        again = earlier_head(str(tmp_path / "out"), target, tokenizer, (kind,), "")
    assert again.vocab.is_full  # so is what is trained from it
    assert open_drafter(ours(tmp_path / "more", again, target, tokenizer), None).vocab is None
    kept = ours(tmp_path / "kept", drafter.head, target, tokenizer)
    found = open_drafter(kept, None).vocab
    assert found is not None and torch.equal(found.ids_D, opened.vocab.ids_D)
    (tmp_path / "out" / FILE).unlink()
    with pytest.raises(ValueError, match=f"a vocabulary_map and no {FILE}"):
        open_drafter(tmp_path / "out", fingerprint(target, tokenizer))


def test_what_the_command_refuses(pair: Any, at_hand: dict[str, str], tmp_path: Path) -> None:
    def refuse(says: str, **more: Any) -> None:
        with warnings.catch_warnings(), pytest.raises(ValueError, match=says):
            warnings.simplefilter("ignore")
            run(asking(at_hand, tmp_path / "out", **more), [])
        assert not (tmp_path / "out").exists()

    refuse("expected whole numbers", sizes="many")
    refuse("its own or borrowed", drafter="ngram")
    for kind in ("kangaroo", "longspec"):
        head = ours(tmp_path / kind, made(kind, pair[0]), pair[0], pair[2])
        refuse("its own or borrowed", drafter=str(head))
    refuse("less than the 320 there are", sizes="320")
    refuse("say prompts=", prompts="")
    # A text file is taken whole: its prompts hold those that were counted.
    whole = tmp_path / "whole.txt"
    whole.write_text("\n".join(f"word {i} of {i * i}" for i in range(120)))
    refuse("were counted", prompts=str(whole), size=40)
    refuse("fit the context", max_new_tokens=600)
    with pytest.warns(UserWarning, match="no folder of train/prepare"):
        run(asking(at_hand, tmp_path / "rows", data=at_hand["prompts"], sizes="6", size=6), [])
