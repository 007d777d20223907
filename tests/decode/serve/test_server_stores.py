"""A server's stores: shared by its lanes, kept in their files, forgotten on request; no answer
changes by any of it.
"""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from foreign_tokens import heart
from forked import Forked, free_port
from head_folders import made as random_head
from head_folders import ours
from live_server import Live, ask_all, expected, live, save_pair, truth, until, wait_until_up
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.serve.server import Backend, ServerConfig
from draftsmith.decode.untrained.foreign import OmniDrafter
from draftsmith.decode.untrained.suffix import SuffixDrafter
from draftsmith.decode.untrained.texts import LookupDrafter, claimed
from draftsmith.models.disk import store as disk
from draftsmith.models.fingerprint import fingerprint

ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "seed": 3}
ASKED |= {"temperature": 1.0, "return_token_ids": True}


def drafts(made: Live, model: str, **changed: Any) -> tuple[int, list[int]]:
    """Rounds of one answer, and its tokens."""
    lane = next(lane for lane in made.backend.service.lanes.values() if lane.model == model)
    before = lane.past.rounds
    tokens = made.post({"model": model, **ASKED, **changed}).json()["choices"][0]["token_ids"]
    until(lambda: lane.on_way == 0)
    return lane.past.rounds - before, tokens


def told(made: Live, path: str, model: str = "tiny", **more: Any) -> httpx.Response:
    return made.http.post(path, json={"model": model, **more})


def held(path: Path, tokens: list[int]) -> bool:
    """Whether a file of texts has this one."""
    ring = load_file(path)["ring_R"]
    windows = ring.unfold(0, len(tokens), 1)
    return bool((windows == torch.tensor(tokens)).all(1).any())


def test_lanes_share_a_store_and_begin_with_its_file(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What one lane answered the other copies once it is settled; a later server goes on with it;
    a store that isn't named stays the server's own.
    """
    file = tmp_path / "new" / "store.safetensors"
    # By `auto` how often the target is asked would be the clock's.
    how: dict[str, Any] = {"drafter": f"suffix:{file}", "K": 12, "batch_size": 2}
    how["policy"] = "fixed"
    how["drafters"] = (f"twin=suffix:{tmp_path}/new/../new/{file.name}", "own=suffix", "laws=stand")
    want = truth(
        *(tiny_target, tiny_tokenizer, ASKED["prompt"]),
        temperature=1.0, seed=3, max_new_tokens=40, ignore_eos=True,
    )  # fmt: skip
    with live(tiny_target, tiny_tokenizer, **how) as made:
        fresh, tokens = drafts(made, "tiny")
        assert tokens == want and not file.exists()
        said = told(made, "/save")
        assert said.json() == {
            "object": "store", "models": ["tiny", "tiny:twin"], "file": str(file)
        }  # fmt: skip
        assert said.status_code == 200 and held(file, want)
        again, tokens = drafts(made, "tiny:twin")
        assert tokens == want and again < fresh / 2
        # Without a store in common nothing is copied.
        alone, tokens = drafts(made, "tiny:own")
        assert tokens == want and alone == fresh
        others = drafts(made, "tiny", seed=4)[1]
    assert held(file, want) and held(file, others)  # the last by the server's end
    with live(tiny_target, tiny_tokenizer, **how) as made:
        again, tokens = drafts(made, "tiny:twin", seed=4)
        assert tokens == others and again < fresh / 2
        both = told(made, "/forget", draft="twin")
        assert both.status_code == 200 and both.json()["models"] == ["tiny", "tiny:twin"]
        assert not held(file, want[:4]) and not held(file, others[:4])
        assert drafts(made, "tiny") == (fresh, want)
        for path, model, says in (
            ("/save", "tiny:own", "no store with a file"),
            ("/save", "tiny:laws", "as suffix:FILE"),
            ("/forget", "none", "isn't served here"),
        ):
            got = told(made, path, model)
            assert got.status_code in (400, 404) and says in got.json()["error"]["message"]
        assert told(made, "/forget", "tiny:laws").json()["file"] is None
        assert made.http.post("/forget").status_code == 400


def test_a_head_s_lane_shares_too_and_the_key_guards(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    head = random_head("medusa", tiny_target)
    folder = ours(tmp_path / "head", head, tiny_target, tiny_tokenizer)
    how = {"drafter": "suffix", "drafters": (f"head=suffix+{folder}", "plain=none")}
    with live(tiny_target, tiny_tokenizer, K=3, api_key="secret", **how) as made:
        assert told(made, "/forget").status_code == 401
        assert told(made, "/save").status_code == 401
        made.http.headers["Authorization"] = "Bearer secret"
        lanes = made.backend.service.lanes
        one, two = (lanes[tag].decoder.drafter for tag in ("default", "head"))
        assert isinstance(one, SuffixDrafter) and one.store is two.looked.store  # type: ignore[union-attr]
        assert told(made, "/forget").json()["models"] == ["tiny", "tiny:head"]
        got = told(made, "/forget", "tiny:plain")
        assert got.status_code == 400 and "no store" in got.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["suffix", "stand"])
def test_answers_are_plain_while_stores_are_saved_and_forgotten(
    kind: str,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    how = {"drafter": f"{kind}:{tmp_path / 'store'}", "drafters": (f"two={kind}:{tmp_path}/store",)}
    numbers = list(range(30))
    with live(tiny_target, tiny_tokenizer, K=4, **how) as made:
        over = threading.Event()

        def meddle() -> None:
            for number in range(1000):
                assert told(made, "/forget" if number % 3 == 2 else "/save").status_code == 200
                if over.is_set():
                    return

        other = threading.Thread(target=meddle)
        other.start()
        got = asyncio.run(ask_all(made, numbers, ["tiny", "tiny:two"]))
        over.set()
        other.join()
    assert got == [expected(number, tiny_target, tiny_tokenizer) for number in numbers]


def test_a_cache_of_n_grams_is_a_store(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Begun where there is no file, shared, saved, begun with, forgotten."""
    own, model = heart("bytes")
    for part in (own, model):
        part.save_pretrained(tmp_path / "lm")
    file = tmp_path / "cache"
    name = f"omni:{file}+{tmp_path}/lm"
    how: dict[str, Any] = {"drafter": name, "drafters": (f"two={name}",), "K": 3}
    with live(tiny_target, tiny_tokenizer, **how) as made:
        got = asyncio.run(ask_all(made, list(range(4)), ["tiny", "tiny:two"]))
        assert got == [expected(n, tiny_target, tiny_tokenizer) for n in range(4)]
        lanes = made.backend.service.lanes
        one, two = (lanes[tag].decoder.drafter for tag in ("default", "two"))
        assert isinstance(one, OmniDrafter) and isinstance(two, OmniDrafter)
        assert one.store is two.store and len(one.store.grams) > len(one.store.mapped)
        assert told(made, "/save").status_code == 200
        grams = dict(one.store.grams)
        again = load_drafter(name, tiny_target, tiny_tokenizer)
        assert isinstance(again, OmniDrafter) and again.store.grams == grams
        assert told(made, "/forget").status_code == 200
        assert one.store.grams.keys() == one.store.mapped.keys()


def test_drafts_of_other_tokenizers_have_caches_of_their_own(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """They can't share a file, nor does a store hold a draft that another version followed."""
    for kind in ("bytes", "other"):
        for part in heart(kind):
            part.save_pretrained(tmp_path / kind)
    names = [f"omni+{tmp_path / kind}" for kind in ("bytes", "other", "bytes")]
    how: dict[str, Any] = {"drafter": names[0], "K": 3}
    how["drafters"] = [f"b={names[1]}", f"c={names[2]}"]
    with live(tiny_target, tiny_tokenizer, **how) as made:
        models = ["tiny", "tiny:b", "tiny:c"]
        got = asyncio.run(ask_all(made, list(range(6)), models))
        assert got == [expected(n, tiny_target, tiny_tokenizer) for n in range(6)]
        a, b, c = (made.backend.stores.of[tag] for tag in ("default", "b", "c"))
        assert a is c and a.shared is not b.shared
        later = load_drafter(names[0], tiny_target, tiny_tokenizer)
        assert later is not None
        made.backend.service.swap(made.backend.service.lanes["c"], later, 1)
        until(lambda: made.backend.service.lanes["c"].version == 1)
        assert later in a.drafters and len(a.drafters) == 2
    own = tuple(name.replace("omni", f"omni:{tmp_path / 'cache'}") for name in names[:2])
    how = {"target": "tiny", "drafter": own[0], "drafters": (f"b={own[1]}",), "max_length": 64}
    with pytest.raises(ValueError, match=r"got b with the store .*another tokenizer; expected a f"):
        Backend(ServerConfig(**how), tiny_target, tiny_tokenizer)


def test_stores_that_do_not_fit_are_one_line(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Another tokenizer's, one cut in half, two writers: between processes, and of two kinds."""
    drafter = load_drafter("suffix", tiny_target, tiny_tokenizer)
    assert isinstance(drafter, LookupDrafter)
    mine, other, cut, both = (tmp_path / name for name in ("mine", "other", "cut", "both"))
    mark = fingerprint(None, tiny_tokenizer)["tokenizer"]
    drafter.save(mine, mark)
    drafter.save(other, "another tokenizer")
    cut.write_bytes(mine.read_bytes()[:1000])

    def refused(says: str, drafter: str, *drafters: str) -> None:
        how = ServerConfig(target="tiny", drafter=drafter, drafters=drafters, max_length=64)
        with pytest.raises(ValueError, match=says) as found:
            Backend(how, tiny_target, tiny_tokenizer)
        assert "\n" not in str(found.value)

    refused("other: got a shard that is cut or foreign.*write it anew", f"suffix:{other}")
    refused("cut: got a shard that is cut or foreign.*write it anew", f"suffix:{cut}")
    refused("is being written by process.*name another", f"suffix:{both}", f"b=stand:{both}")
    lock = claimed(mine)
    refused("is being written by process.*name another file", f"suffix:{mine}")
    with pytest.raises(ValueError, match="is being written by process"):
        drafter.save(mine, mark)
    lock.release()
    drafter.save(mine, mark)


def test_a_full_disk_leaves_the_file(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "store"
    with live(tiny_target, tiny_tokenizer, drafter=f"suffix:{file}", K=4) as made:
        first = drafts(made, "tiny")[1]
        assert told(made, "/save").status_code == 200
        before = file.read_bytes()
        drafts(made, "tiny", seed=9)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk, "write_atomically", full)
        got = told(made, "/save")
        assert got.status_code == 500
        assert "file is as it was: No space left" in got.json()["error"]["message"]
        assert drafts(made, "tiny")[1] == first  # it serves on
    assert file.read_bytes() == before


def test_a_killed_server_has_what_it_acknowledged(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """kill -9 at the middle of a save, by the process itself; and the next server takes the file,
    though the dead one held its lock.
    """
    target, _ = save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    file, port = tmp_path / "store", free_port()
    url = f"http://127.0.0.1:{port}"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from draftsmith.decode.serve import server\n"
        "from draftsmith.models.disk import store\n"
        "real, calls = store.write_atomically, iter(range(10))\n"
        "def write(path, content):\n"
        "    if next(calls) == 2:\n"
        "        path.with_name(f'.{path.name}.half').write_bytes(content[: len(content) // 2])\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(path, content)\n"
        "store.write_atomically = write\n"
        "sys.exit(server.main(sys.argv[1:]))\n"
    )
    serve = [f"target={target}", f"drafter=suffix:{file}", f"port={port}", "max_length=64"]
    serve += ["batch_size=2", "threads=1", "K=8"]

    def answer(seed: int) -> list[int]:
        asked = {"model": "tiny", **ASKED, "seed": seed}
        made = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
        return list(made.raise_for_status().json()["choices"][0]["token_ids"])

    process = Forked(["-c", code, *serve])
    try:
        wait_until_up(process, url)
        acknowledged = []
        for seed in range(2):
            acknowledged.append(answer(seed))
            saved = httpx.post(f"{url}/save", json={"model": "tiny"}, timeout=600)
            assert saved.status_code == 200
        answer(2)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/save", json={"model": "tiny"}, timeout=600)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
    assert all(held(file, tokens) for tokens in acknowledged)
    process = Forked(["-m", "draftsmith", "serve", *serve])
    try:
        wait_until_up(process, url)
        assert [answer(seed) for seed in range(2)] == acknowledged
        # A second server may not have the file.
        second = Forked(["-m", "draftsmith", "serve", *serve[:2], f"port={free_port()}"])
        assert second.wait() != 0 and "is being written by process" in second.told
        assert "Traceback" not in second.told, second.told
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.told
    finally:
        process.kill()
    assert all(held(file, tokens) for tokens in acknowledged)
