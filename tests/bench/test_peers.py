"""The benchmark beside other engines: what it reads from them, how it chooses and compares; and,
where `make peers` was run, that they decode what we decode.
"""

import copy
import json
import math
import subprocess
import sys
import xml.dom.minidom
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved_drafts import save_draft
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.bench.speed import peers
from draftsmith.bench.speed.peers_arms import Clock, Place, Told, Who, ours
from draftsmith.bench.speed.peers_arms import transformers as theirs
from draftsmith.bench.speed.peers_llama import LlamaServer, drafting, read_example, read_server
from draftsmith.bench.speed.peers_openvino import answer
from draftsmith.bench.speed.peers_page import page, picture
from draftsmith.models.servers.export import export

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / ".peers/llama.cpp/build/bin/llama-speculative-simple"
OPENVINO = ROOT / ".peers/openvino/bin/python"
TEXTS = ("def main(", "import os, sys\n", "for x in range(3): print(x)", "the cat sat on the mat")
PRINTED = """
0.00.341.637 I encoded   21 tokens in    0.017 seconds, speed: 1267.733 t/s
0.00.341.657 I decoded   68 tokens in    0.137 seconds, speed:  495.967 t/s
0.00.341.684 I n_draft   = 4
0.00.341.690 I n_predict = 68
0.00.341.711 I n_drafted = 54
0.00.341.724 I n_accept  = 51
"""


def test_what_an_example_prints_is_read() -> None:
    told = read_example(PRINTED)
    assert told == {
        "counted": 68,
        "seconds": 0.137,
        "drafted": 54,
        "accepted": 51,
        "rounds": 17,
        "prompt": 21,
    }
    with pytest.raises(ValueError, match="expected what its example prints"):
        read_example(PRINTED.replace("n_accept", "n_other"))


def test_a_server_s_answer_is_read_without_its_first_token() -> None:
    timings = {"predicted_n": 5, "predicted_ms": 20.0, "draft_n": 6, "draft_n_accepted": 2}
    told = read_server({"tokens": [3, 1, 4, 1, 5], "timings": timings})
    assert Told(**told).rate == 4 / 0.02
    assert (told["drafted"], told["accepted"], told["rounds"]) == (6, 2, 2)
    plain = read_server({"tokens": [3, 1, 4], "timings": {"predicted_ms": 20.0}})
    assert (plain["drafted"], plain["rounds"]) == (0, 2)


def test_llama_cpp_is_told_what_drafts() -> None:
    assert drafting("plain", "d.gguf", 4) == []
    assert drafting("speculative", "d.gguf", 4)[:4] == [
        "-md",
        "d.gguf",
        "--spec-type",
        "draft-simple",
    ]
    assert drafting("prompt lookup", "d.gguf", 4)[-1] == "4"


def test_openvino_s_first_pass_is_outside() -> None:
    """Four passes of 1, 3, 1 and 2 tokens; 7 ms of 27 go to the first."""
    mean = lambda value: lambda: SimpleNamespace(mean=value)  # noqa: E731
    raw = SimpleNamespace(m_batch_sizes=[1, 3, 1, 2])
    metrics = SimpleNamespace(get_generate_duration=mean(27.0), get_ttft=mean(7.0), raw_metrics=raw)
    extended = SimpleNamespace(get_num_accepted_tokens=lambda: 3, get_num_draft_tokens=lambda: 6)
    asked: list[Any] = []

    def generate(tensor: Any, config: Any) -> Any:
        asked.append(config)
        tokens = [[1, 2, 3, 4, 5, 6, 7]]
        return SimpleNamespace(tokens=tokens, perf_metrics=metrics, extended_perf_metrics=extended)

    genai = SimpleNamespace(GenerationConfig=SimpleNamespace)
    told = answer(genai, SimpleNamespace(generate=generate), None, 7, 4, "speculative")
    assert Told(**told).rate == pytest.approx(6 / 0.02) and told["rounds"] == 3
    assert (told["drafted"], told["accepted"]) == (6, 3)
    assert asked[0].num_assistant_tokens == 4 and asked[0].max_new_tokens == 7
    answer(genai, SimpleNamespace(generate=generate), None, 7, 4, "plain")
    assert not hasattr(asked[1], "num_assistant_tokens")


def told(rate: float, tokens: list[int], **more: int) -> Told:
    return Told(len(tokens) / rate, len(tokens), tokens, **more)


def answers() -> peers.Answers:
    """Two prompts, two turns each: ours at 20 and 40 tokens a second, the peer's half as fast and
    once with another token.
    """
    right, wrong = [1, 2, 3], [1, 2, 4]
    slow, fast = told(1, right, rounds=2, drafted=4, accepted=1), {"rounds": 2, "drafted": 4}
    mine = [
        [told(20, right, **fast, accepted=1), slow],
        [slow, told(40, right, **fast, accepted=3)],
    ]
    other = [[told(10, right), told(5, right)], [told(20, wrong), told(10, wrong)]]
    plain = [[told(10, right, rounds=3)], [told(10, right, rounds=3)]]
    text = [[Told(0.1, 3, rounds=2, drafted=4, accepted=2)] for _ in range(2)]
    return {
        Who("plain", "ours"): plain,
        Who("speculative", "ours", "2"): mine,
        Who("speculative", "peer", "3"): other,
        Who("speculative", "llama.cpp example", "4"): text,
    }


def test_ratios_are_of_each_prompt_s_best_turn() -> None:
    rows = {(row["what"], row["peer"]): row for row in peers.compared(answers())}
    row = rows["speculative", "peer"]
    assert row["ratio"] == pytest.approx(2) and row["interval"] == pytest.approx([2, 2])
    assert row["same"] == 0.5 and (row["ours_K"], row["theirs_K"]) == ("2", "3")
    assert row["ours_tau"] == pytest.approx(6 / 4) and row["theirs_tau"] is None
    assert row["ours"] == pytest.approx(6 / (3 / 20 + 3 / 40))
    assert rows["speculative", "ours, plain"]["ratio"] == pytest.approx(3)
    assert "same" not in rows["speculative", "llama.cpp example"]
    assert rows["speculative", "llama.cpp example"]["theirs_kept"] == 0.5


def test_each_way_goes_on_at_its_fastest_K() -> None:
    tries = {Who("speculative", "ours", str(K)): [[told(K % 4, [1, 2])]] for K in (1, 2, 3, 4.5)}
    tries[Who("plain", "ours")] = [[told(1, [1])]]
    assert set(peers.best(tries)) == {Who("speculative", "ours", "3"), Who("plain", "ours")}


def test_page_and_picture_show_every_row() -> None:
    about = {"pair": "own", "parameters": "5M", "threads": 1, "prompts": 2, "dtype": "bfloat16"}
    about |= {"commit": "abc", "command": "python bench/speed/peers.py", "machine": "m"}
    rows = [row | about for row in peers.compared(answers())]
    shares = rows[0] | {"what": "accepted", "ratio": 0.99, "ours": 0.5, "theirs": 0.505}
    assert "we accept 0.500, the peer 0.505: 0.990 of it" in page([*rows, shares])
    shown = page([*rows, *(row | {"pair": "twin", "parameters": "516M"} for row in rows)])
    assert "## The pair itself, 5M, one thread" in shown and "## Its costly twin, 516M" in shown
    assert "| speculative | peer | 2.00 | 2.00 to 2.00 |" in shown and "| 50% |" in shown
    drawn = xml.dom.minidom.parseString(picture(rows)).documentElement
    names = "".join(node.toxml() for node in drawn.getElementsByTagName("text"))
    assert "peer, speculative" in names and "accepted" not in names


@pytest.fixture
def pair(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> dict[str, Path]:
    """Folders in fp32: a target, and as its draft the same with noise, right half the time."""
    draft = copy.deepcopy(tiny_target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    save_draft(tmp_path / "draft", draft, tiny_target, tiny_tokenizer, defaults={"K": 4})
    return {name: tmp_path / name for name in ("target", "draft")}


def place(
    pair: dict[str, Path],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **files: Path,
) -> Place:
    how = (str(pair["draft"]), "float32", 1, str(ROOT / ".peers"))
    exported = {name.replace("_", "."): path for name, path in files.items()}
    return Place(target, tokenizer, *how, exported, ExitStack())


def test_our_arm_and_transformers_give_the_same_answers_and_count_alike(
    pair: dict[str, Path], tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    here = place(pair, tiny_target, tiny_tokenizer)
    ids = tiny_tokenizer("def main(")["input_ids"]
    plain = ours(here, "plain", 0)(ids, 24)
    assert (plain.counted, plain.rounds, plain.drafted) == (23, 23, 0)
    found = {}
    for what in ("speculative", "prompt lookup"):
        for name, call in (("ours", ours(here, what, 3)), ("theirs", theirs(here, what, "3"))):
            found[name] = call(ids, 24)
            assert found[name].tokens == plain.tokens and found[name].seconds > 0
        assert found["ours"].counted == 23
    mine = ours(here, "speculative", 3)(ids, 24)
    assert mine.drafted == 3 * mine.rounds and mine.counted <= mine.accepted + mine.rounds
    bare = theirs(here, "plain", "")(ids, 24)
    assert (bare.counted, bare.rounds) == (23, 23)


def test_a_clock_leaves_out_the_first_tokens() -> None:
    clock = Clock()
    for count in (5, 1, 3, 2):  # a prompt, then what three passes gave
        clock.put(torch.zeros(count))
    assert clock.told([1, 2, 3, 4, 5, 6]).counted == 5 and clock.came == []


def converted(pair: dict[str, Path], folder: Path) -> dict[str, Path]:
    """GGUF files: the target by llama.cpp's script, the draft by `export`."""
    draft = folder / "draft.gguf"
    export(str(pair["draft"]), str(pair["target"]), "gguf", str(draft), str(peers.CONVERTER))
    how = peers.PeersBench(target=str(pair["target"]), dtype="float32")
    return peers.files_of(how, str(pair["target"]), folder, ["llama.cpp"])


@pytest.mark.slow
@pytest.mark.skipif(not BUILT.exists(), reason="needs llama.cpp: make peers")
def test_llama_cpp_accepts_what_we_accept(
    pair: dict[str, Path],
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """In fp32, greedy, K = 4: the shares of accepted tokens within 2%."""
    files = converted(pair, tmp_path / "made")
    files = {name.replace(".", "_"): path for name, path in files.items()}
    here = place(pair, tiny_target, tiny_tokenizer, **files)
    words = [f"{a} {b} " for a in TEXTS for b in TEXTS]
    ids = [tiny_tokenizer(text)["input_ids"] for text in words]
    plain = ours(here, "plain", 0)
    special = len(tiny_tokenizer.all_special_ids) + 3  # it forbids all that may end an answer
    ids = [one for one in ids if min(plain(one, 72).tokens) >= special]
    mine, other = peers.same_rounds(here, ids, 4, 64)
    assert len(mine) >= 4
    shares = [peers.share(mine), peers.share(other)]
    assert 0.1 < shares[0] < 0.9 and math.isclose(*shares, rel_tol=0.02), shares
    # Its last draft is cut to what it may still write.
    assert all(abs(a.rounds - b.rounds) <= 1 for a, b in zip(mine, other, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    not BUILT.with_name("llama-server").exists(), reason="needs llama.cpp: make peers"
)
@pytest.mark.parametrize("what", ["plain", "speculative", "prompt lookup"])
def test_llama_cpp_s_server_gives_our_answers(
    pair: dict[str, Path],
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    what: str,
) -> None:
    files = converted(pair, tmp_path / "made")
    options = ["-m", str(files["target.gguf"]), "-t", "1"]
    options += drafting(what, str(files["draft.gguf"]), 3)
    here = place(pair, tiny_target, tiny_tokenizer)
    server = LlamaServer(str(ROOT / ".peers"), options, tmp_path / "server.log")
    try:
        for text in TEXTS:
            ids = tiny_tokenizer(text)["input_ids"]
            found = server.complete(ids, 24)
            assert found["tokens"] == ours(here, "plain", 0)(ids, 24).tokens
            assert (found["drafted"] > 0) >= (what == "speculative")
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.skipif(not OPENVINO.exists(), reason="needs OpenVINO GenAI: make peers")
def test_openvino_gives_our_answers(
    pair: dict[str, Path],
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    how = peers.PeersBench(target=str(pair["target"]), drafter=str(pair["draft"]), dtype="float32")
    made = peers.files_of(how, str(pair["target"]), tmp_path / "made", ["openvino"])
    ids = tiny_tokenizer(TEXTS[0])["input_ids"]
    arms = ("plain", "plain, SDPA", "speculative", "lookup")
    asked = [{"arm": arm, "ids": ids, "new_tokens": 24, "K": 3} for arm in arms]
    files = [made["target.ov"], made["draft.ov"]]
    worker = [OPENVINO, ROOT / "bench/speed/peers_openvino.py", *files, "1", "f32"]
    lines = "\n".join(map(json.dumps, asked))
    run = subprocess.run(worker, input=lines, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    wanted = ours(place(pair, tiny_target, tiny_tokenizer), "plain", 0)(ids, 24).tokens
    for line in run.stdout.splitlines():
        assert json.loads(line)["tokens"] == wanted
    assert len(run.stdout.splitlines()) == len(arms)


def test_a_prompt_that_is_not_split_the_same_again_is_left_out(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = tiny_tokenizer("def main(")["input_ids"]
    assert peers.same_again(ids, tiny_tokenizer)
    half = tiny_tokenizer("naïve")["input_ids"][:3]  # the first half of a character
    assert not peers.same_again(half, tiny_tokenizer)


def test_a_failed_export_says_why(tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(ValueError, match="ended with code 1: no such model"):
        peers.run_once(broken, tmp_path / "made")
