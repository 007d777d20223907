"""The cache of likeliest tokens, and the teachers that read it or what a server told.

What the files of any cache must survive is in test_tap_cache.py. Shapes: N tokens, V vocabulary.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fake_endpoint import running
from safetensors.torch import load_file
from tapped_texts import SHARD_BYTES, batches, contents, some_batches
from torch import Tensor

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.disk import store
from draftsmith.models.target import vocab_size
from draftsmith.train import distill
from draftsmith.train.answers.top_logprobs import read_top_logprobs
from draftsmith.train.losses.pure import divergence
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.prepare import main as prepare
from draftsmith.train.teachers import store as token_shards
from draftsmith.train.teachers.likeliest import TopKCache, open_top_logprobs
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import StateTeacher, TopKTeacher, lost, open_teacher
from draftsmith.train.text.batches import Batches
from draftsmith.train.text.prepared import load_prepared

K = 12
CPU = torch.device("cpu")
AS_IT_IS = SamplingParams(1.0)


@pytest.fixture
def make(tmp_path: Path, tiny_target, tiny_tokenizer, monkeypatch: pytest.MonkeyPatch):
    def cache(
        name: str = "cache",
        k: int = K,
        warp: SamplingParams = AS_IT_IS,
        text: Batches | None = None,
        target=tiny_target,
    ) -> TopKCache:
        monkeypatch.setattr(token_shards, "SHARD_BYTES", SHARD_BYTES // 12)
        return TopKCache(tmp_path / name, target, tiny_tokenizer, text or batches(), k, warp)

    return cache


def written(cache: TopKCache) -> TopKCache:
    cache.claim()
    cache.write()
    return cache


def everything(cache: TopKCache) -> TopKRows:
    spans = cache.batches.cut.spans.tolist()
    return cache.rows(torch.cat([torch.arange(*span) for span in spans]), CPU)


def plain(cache: TopKCache, target) -> Tensor:
    """log p [N, V] of every token, each piece by itself through the whole model."""
    ids, found = cache.batches.examples.ids, []
    for span in cache.batches.cut.spans.tolist():
        logits = target(ids[slice(*span)].long()[None]).logits[0, :, : cache.vocab_size]
        found.append(cache.warp.transform(logits).log_softmax(-1))
    return torch.cat(found)


@pytest.mark.parametrize(
    "warp", [AS_IT_IS, SamplingParams(0.0), SamplingParams(0.6, top_k=9, top_p=0.95)]
)
def test_rows_are_the_targets_likeliest(make, tiny_target, warp: SamplingParams) -> None:
    cache = written(make(warp=warp))
    assert len(cache) > 1
    log_p_NV, rows = plain(cache, tiny_target), everything(cache)
    best_N = log_p_NV.topk(K).values
    listed = log_p_NV.gather(1, rows.ids_NJ)
    torch.testing.assert_close(listed, best_N, atol=1e-5, rtol=0)
    assert all(len(set(ids)) == K for ids in rows.ids_NJ.tolist())
    rest_N = log_p_NV.scatter(1, rows.ids_NJ, -torch.inf).logsumexp(-1)
    want = torch.cat([listed, rest_N[:, None]], -1)
    # float16 keeps 11 binary digits.
    torch.testing.assert_close(rows.log_p_NB, want, atol=1e-5, rtol=2**-11)
    cut = rows.log_p_NB == -torch.inf
    assert cut[:, 9:].all() if warp.top_k else not cut.any()


def test_padding_of_the_vocabulary_is_never_listed(make, tiny_target) -> None:
    """Rows of the head beyond the tokenizer's tokens, with the largest logits of all."""
    wide = type(tiny_target)(copy.deepcopy(tiny_target.config))
    wide.load_state_dict(tiny_target.state_dict())
    wide.resize_token_embeddings(384)
    with torch.no_grad():
        wide.lm_head.weight[320:] = 9.0
    rows = everything(written(make(target=wide.requires_grad_(False).eval())))
    assert rows.ids_NJ.max() < 320
    torch.testing.assert_close(rows.log_p_NB, everything(written(make("own"))).log_p_NB)


def test_a_token_takes_what_is_told(make, capsys) -> None:
    cache = written(make())
    assert cache.token_bytes == 2 * K + 2 * (K + 1)
    shard = load_file(cache.path(0))
    assert {name: tensor.dtype for name, tensor in shard.items()} == {
        "ids": torch.uint16,
        "log_p": torch.float16,
    }
    told = " ".join(capsys.readouterr().out.split())
    tokens = int(cache.offsets[-1])
    assert f"{tokens:,} tokens, 12 likeliest tokens each, 50 bytes a token" in told
    assert "its last state, which is exact, has 64" in told and "GB free" in told
    size = sum(path.stat().st_size for path in cache.folder.glob("top-k*"))
    assert size == pytest.approx(tokens * 50, rel=0.1)


def test_two_processes_write_the_folder_of_one(make) -> None:
    one = written(make())
    for rank in (1, 0):
        cache = make("two")
        cache.claim()
        cache.write(rank, 2)
    assert contents(cache) == contents(one)


def test_goes_on_after_a_kill(make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one, cache = store.write_atomically, written(make()), make("killed")

    def killed(path: Path, content: bytes) -> None:
        if path == cache.path(1):
            raise KeyboardInterrupt
        whole(path, content)

    monkeypatch.setattr(store, "write_atomically", killed)
    cache.claim()
    with pytest.raises(KeyboardInterrupt):
        cache.write()
    monkeypatch.undo()
    first = cache.path(0).stat().st_mtime_ns
    assert contents(written(make("killed"))) == contents(one)
    assert cache.path(0).stat().st_mtime_ns == first


def test_another_cache_is_refused(make, tiny_draft) -> None:
    written(make())
    for differs, changed in {
        "top k: 12 there, 13 now": {"k": 13},
        r"transform: \[1.0, 0, 1.0, 0.0\] there, \[0.5": {"warp": SamplingParams(0.5)},
        "max_length: 40 there, 39 now": {"text": batches(max_length=39)},
        "target body: ": {"target": tiny_draft},
    }.items():
        with pytest.raises(ValueError, match=rf"{differs}.*choose another folder"):
            make(**changed).claim()
    make(warp=SamplingParams(0.0)).claim()  # compared as it is, too
    for k in (0, 321):
        with pytest.raises(ValueError, match=rf"cache\.top_k: got {k}, expected 1 to 320"):
            make(k=k)


def test_a_full_disk_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = dataclass(type("Usage", (), {"__annotations__": {"free": int}, "free": 100}))
    monkeypatch.setattr(token_shards.shutil, "disk_usage", lambda path: usage())
    with pytest.raises(ValueError, match=r"0\.0 GB free.*likeliest tokens; .*lower cache\.top_k"):
        make().claim()


@pytest.mark.parametrize("packing", [True, False])
def test_the_teacher_with_all_tokens_is_the_exact_one(
    make, tiny_target, tiny_draft, packing: bool
) -> None:
    """As far as float16 goes; and text that is in no cache has its pass."""
    warp = SamplingParams(0.8)
    exact = StateTeacher(tiny_target, 320)
    teacher = TopKTeacher(written(make(k=320, warp=warp)).rows, exact)
    for batch in some_batches(packing)[:2]:
        weight_N, draft = batch.loss_mask.flatten().float(), StateTeacher(tiny_draft, 320)(batch)
        q = (draft.hidden_NG.requires_grad_(), draft.head_VG.detach())
        for name in ("fkl", "jsd"):  # tv's slope jumps where p meets q
            found = [
                rows.divergence(divergence(name), q, weight_N, warp.transform)
                for rows in (teacher(batch), exact(batch))
            ]
            slopes = [torch.autograd.grad(one.total, q[0])[0] for one in found]
            for one, other in zip((*found[0], slopes[0]), (*found[1], slopes[1]), strict=True):
                scale = other.abs().max().item()
                torch.testing.assert_close(one, other, atol=3e-3 * scale, rtol=0)
    unknown = teacher(type(batch)(**vars(batch) | {"places": None}))
    assert not isinstance(unknown, TopKRows)


def test_open_teacher(tmp_path: Path, tiny_target, tiny_tokenizer, tiny_draft, capsys) -> None:
    models = (Accelerator(cpu=True), tiny_target, tiny_tokenizer, batches(), tiny_draft)
    given = ("stdlib", AS_IT_IS, *models)
    teacher = open_teacher(Cache(path=str(tmp_path / "top"), top_k=32), *given)
    assert isinstance(teacher, TopKTeacher)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("│") for line in lines if "│" in line]
    found = {row[1].strip(): [cell.strip() for cell in row[2:5]] for row in rows}
    fkl, alpha = ([float(found[k][i]) for k in ("2", "8", "32", "all")] for i in (1, 2))
    assert fkl == sorted(fkl) and alpha == sorted(alpha, reverse=True) and fkl[0] < fkl[-1]
    outside = [float(found[k][0].rstrip("%")) for k in ("2", "8", "32")]
    assert outside == sorted(outside, reverse=True) and 0 < outside[-1] < outside[0] < 100
    for wrong in ({"top_k": 8}, {"top_k": 8, "path": "x", "int8": True}):
        with pytest.raises(
            ValueError, match=r"cache\.top_k=8, cache\.path='x?', .*expected cache=<"
        ):
            open_teacher(Cache(**wrong), *given)
    assert isinstance(open_teacher(Cache(), *given), StateTeacher)


def test_the_table_is_the_full_loss_when_nothing_is_cut(make, tiny_target, tiny_draft) -> None:
    cache = written(make(k=320))
    teacher = TopKTeacher(cache.rows, StateTeacher(tiny_target, 320))
    table = lost(teacher, tiny_draft, some_batches(True)[0], AS_IT_IS)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][-2:] == ["320", "all"] and cells[1][-2] == "0.00%"
    assert float(cells[2][-2]) == pytest.approx(float(cells[2][-1]), rel=1e-3)


# ---- from a server -------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, tiny_tokenizer, tiny_target, monkeypatch: pytest.MonkeyPatch):
    """A server that echoes, telling three likeliest tokens and the written one: what argv to ask
    it by, and the log-probabilities by the token written."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"prompt": f"def f{i}(x, y): return x"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def likely(token: int) -> dict[int, float]:
        return {5: -0.75, (token * 7) % 300 + 10: -1.5, 6: -2.5} | (
            {token: -4.0} if token % 2 else {}
        )

    with running(tiny_tokenizer, likely=likely) as server:
        argv = [f"target.path={tmp_path / 'target'}", f"prompts={tmp_path / 'rows.jsonl'}"]
        argv += [f"out={tmp_path / 'out'}", f"endpoint={server.url}", "split=all", "device=cpu"]
        yield (
            [*argv, "max_new_tokens=20", "endpoint.top_logprobs=3", "endpoint.retries=0"],
            likely,
            server,
        )


def test_what_a_server_told_is_trained_on(
    served, tmp_path: Path, tiny_tokenizer, tiny_draft, tiny_target, capsys
) -> None:
    argv, likely, server = served
    prepare(argv)
    assert "likeliest tokens: 78." in " ".join(capsys.readouterr().out.split())
    assert server.bodies[0]["logprobs"] == 3 and server.bodies[0]["return_tokens_as_token_ids"]
    out = str(tmp_path / "out")
    kept = open_top_logprobs(out, tiny_tokenizer, AS_IT_IS)
    examples = load_prepared(out)
    text = batches(examples=examples)
    models = (Accelerator(cpu=True), tiny_target, tiny_tokenizer, text, tiny_draft)
    teacher = open_teacher(Cache(), out, AS_IT_IS, *models)
    assert kept is not None and isinstance(teacher, TopKTeacher)
    batch = text.batch(0, 0, 0, accumulation=1, world=1)
    rows, q = teacher(batch), StateTeacher(tiny_draft, 320)(batch)
    weight_N = batch.loss_mask.flatten().float()
    q_hidden, q_head = q.hidden_NG, q.head_VG
    got = rows.divergence(divergence("fkl"), (q_hidden, q_head), weight_N, lambda z: z).loss_N
    q_NV, next_N = (q_hidden @ q_head.T).softmax(-1), batch.input_ids.roll(-1, 1).flatten()
    assert weight_N.sum() > 20
    for n in weight_N.nonzero().flatten().tolist():
        p = likely(int(next_N[n]))
        listed = {token: (torch.tensor(value).exp(), q_NV[n, token]) for token, value in p.items()}
        rest = [1 - sum(pair[side] for pair in listed.values()) for side in (0, 1)]
        want = sum(p * (p / q).log() for p, q in [*listed.values(), rest])
        assert got[n].item() == pytest.approx(want.item(), rel=1e-4, abs=1e-5)


def test_distill_trains_on_what_a_server_told(served, tmp_path: Path, capsys) -> None:
    argv, _, _ = served
    prepare(argv)
    AcceleratorState._reset_state(reset_partial_state=True)
    sizes = ["draft.hidden=16", "draft.heads=2", "draft.kv_heads=1", "draft.intermediate=32"]
    sizes += ["dtype=float32", "steps=2"]
    text = ["text.max_length=40", "heldout.prompt_tokens=8", "heldout.max_new_tokens=8"]
    text += ["heldout.limit=2", "heldout=stdlib"]
    told = [f"target.path={tmp_path / 'target'}", f"data={tmp_path / 'out'}", "batch_size=2"]
    distill.main([*sizes, *text, *told, f"out={tmp_path / 'run'}"])
    assert "compares with the log-probabilities there" in " ".join(capsys.readouterr().out.split())
    AcceleratorState._reset_state(reset_partial_state=True)
    cache = [f"cache={tmp_path / 'top'}", "cache.top_k=8", f"out={tmp_path / 'cached'}"]
    distill.main([*sizes, *text, *told, *cache, "temperature=0.5"])
    assert "top-k against full logits: this draft" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "top").glob("top-k*")] == ["top-k-00000.safetensors"]
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match=r"at temperature 1 without filters: got .*\(0\.5, 0"):
        distill.main([*sizes, *text, *told, f"out={tmp_path / 'other'}", "temperature=0.5"])


def test_what_could_not_be_sure_is_refused(served, tmp_path: Path, tiny_tokenizer) -> None:
    argv, _, server = served
    for wrong in ("temperature=0.7", "top_k=5", "temperature=0"):
        with pytest.raises(ValueError, match=r"servers differ in whether"):
            prepare([*argv, wrong])
    for wrong in (["endpoint.api=chat"], ["endpoint="], ["endpoint.top_logprobs=-1"]):
        with pytest.raises(ValueError, match=r"endpoint.top_logprobs: got -?\d.*expected 0"):
            prepare([*argv, *wrong])
    server.habits["ids"] = False
    with pytest.raises(ValueError, match=r"got \d+ for 0 tokens, expected for each token"):
        prepare(argv)
    server.habits |= {"ids": True, "apis": "chat text"}
    with pytest.raises(SystemExit, match="no tokens here"):
        prepare(argv)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        [None],
        [{}],
        [{"x": -0.1}],
        [{"17": -0.1}],
        [{"token_id:320": -0.1}],
        [{"token_id:3": 0.4}],
        [{"token_id:3": -0.1, "token_id:4": -0.1}],
        [{"token_id:3": float("nan")}],
    ],
)
def test_what_is_no_log_probability_by_id_is_refused(told: Any) -> None:
    choice = {"logprobs": None if told is None else {"top_logprobs": told}}
    with pytest.raises(ValueError, match=r'got .*, expected .*"token_id:<number below 320>"'):
        read_top_logprobs(choice, 1, 320)


def test_another_tokenizers_log_probabilities_are_refused(served, tmp_path: Path) -> None:
    from draftsmith.models.tokenizer import stand_in_tokenizer

    prepare(served[0])
    other = stand_in_tokenizer(300)
    assert vocab_size(other) == 300
    with pytest.raises(ValueError, match="another tokenizer's tokens"):
        open_top_logprobs(str(tmp_path / "out"), other, AS_IT_IS)
