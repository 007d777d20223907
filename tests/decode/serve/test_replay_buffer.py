"""The replay buffer and the versions of a draft: what was acknowledged outlives any kill."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request, open_request
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import ReplayBuffer, Served, as_served
from draftsmith.decode.serve.versions import KEPT, Versions


def made_up(number: int = 0, *, states: bool = False) -> Served:
    """A request of 3 + 4 tokens whose content tells its number."""
    return Served(
        tokens_T=torch.full((7,), number, dtype=torch.int32),
        prompt=3,
        accepted_A=torch.tensor([False, True, False, True]),
        corrected_A=torch.tensor([False, False, True, False]),
        ids_NJ=torch.arange(6, dtype=torch.int32).view(3, 2),
        log_p_NB=torch.tensor([0.5, 0.3, 0.2]).log().half().expand(3, 3),
        norm_NH=torch.full((3, 4), float(number)).bfloat16() if states else None,
        taps_TU=torch.ones(6, 8).bfloat16() if states else None,
        version=2,
        about={"index": number, "finish_reason": "stop", "temperature": 1.0, "rounds": 2},
    )


@pytest.mark.parametrize("states", [False, True])
def test_what_was_added_is_read_again(tmp_path: Path, states: bool) -> None:
    buffer = ReplayBuffer(tmp_path)
    assert buffer.numbers() == buffer.heldout_numbers() == []
    written = made_up(5, states=states)
    number = buffer.add(written)
    found = ReplayBuffer(tmp_path).read(number)
    for name, value in vars(written).items():
        if isinstance(value, torch.Tensor):
            assert getattr(found, name).dtype == value.dtype
            assert torch.equal(getattr(found, name), value), name
        else:
            assert getattr(found, name) == value, name
    counts = {"prompt": 3, "version": 2, "answer": 4, "accepted": 2, "corrected": 1}
    assert buffer.about(number) == written.about | counts


def test_what_stays_is_the_newest_and_a_uniform_sample(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, recent=10, reservoir=20, heldout_every=5, heldout=3)
    for number in range(120):
        assert buffer.add(made_up(number)) == number
    assert buffer.heldout_numbers() == [105, 110, 115]
    trained = [number for number in range(120) if number % 5]
    assert buffer.numbers()[-10:] == trained[-10:]
    older = buffer.numbers()[:-10]
    assert len(older) == 20
    # Under a uniform law the mean rank of 20 of 86 has a standard deviation of 4.9.
    assert abs(sum(trained.index(number) for number in older) / 20 - 42.5) < 15
    assert [buffer.read(number).tokens_T[0] for number in older] == older
    with pytest.raises(FileNotFoundError):
        buffer.read(1 if 1 not in older else 2)


def test_the_sample_is_the_same_after_a_restart(tmp_path: Path) -> None:
    kept = []
    for name, pieces in {"whole": [90], "cut": [31, 1, 58]}.items():
        for many in pieces:
            sizes = {"recent": 4, "reservoir": 8, "heldout_every": 3, "heldout": 5}
            buffer = ReplayBuffer(tmp_path / name, **sizes)
            for _ in range(many):
                buffer.add(made_up())
            buffer.close()
        kept.append((buffer.numbers(), buffer.heldout_numbers()))
    assert kept[0] == kept[1] and len(kept[0][0]) == 12


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = ReplayBuffer(tmp_path), ReplayBuffer(tmp_path)
    first.add(made_up())
    with pytest.raises(ValueError, match=rf"written by process {os.getpid()}; expected one server"):
        second.add(made_up())
    assert second.heldout_numbers() == [0], "reading is free"
    first.close()
    assert second.add(made_up()) == 1


def test_broken_files_are_named(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path)
    for _ in range(2):
        buffer.add(made_up())
    path = tmp_path / "000000000001.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    for read in (buffer.read, buffer.about):
        with pytest.raises(ValueError, match=r"000000000001.safetensors: got a shard that is cut"):
            read(1)
    assert buffer.read(0).prompt == 3
    with pytest.raises(ValueError, match="heldout_every: got 1"):
        ReplayBuffer(tmp_path, heldout_every=1)


def test_parts_that_differ_in_length_are_refused() -> None:
    fields = vars(made_up())
    for name in ("corrected_A", "ids_NJ", "log_p_NB"):
        with pytest.raises(ValueError, match="a served request"):
            Served(**fields | {name: fields[name][:-1]})


def write_for_ever(folder: Path, told: int) -> None:
    """What a server and its learner do, as fast as they can; tells each number once it has it."""
    buffer = ReplayBuffer(folder / "buffer", recent=4, reservoir=4)
    versions = Versions(folder)
    buffer.open_for_writing()
    newest = max([-1, *buffer.numbers(), *buffer.heldout_numbers()])

    def write(path: Path) -> None:
        path.mkdir()
        for name in "abc":
            (path / name).write_bytes(b"x" * 100_000)

    while True:
        newest = buffer.add(made_up(newest + 1))
        os.write(told, f"added {newest}\n".encode())
        os.write(told, f"published {versions.publish(write, 'test')}\n".encode())


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """kill -9 at some moment of one writer after another."""
    last = {"added": -1, "published": 0}
    for lines in (1, 2, 7, 12, 20, 31):
        heard, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_for_ever(tmp_path, told)
            finally:
                os._exit(1)
        os.close(told)
        with os.fdopen(heard) as news:
            for number, line in enumerate(news):
                last |= {line.split()[0]: int(line.split()[1])}
                if number == lines:
                    os.kill(child, signal.SIGKILL)  # what it told before is heard to the end
        os.waitpid(child, 0)
        buffer = ReplayBuffer(tmp_path / "buffer", recent=4, reservoir=4)
        versions = Versions(tmp_path)
        found = [*buffer.numbers(), *buffer.heldout_numbers()]
        # One more may have been renamed before its number was told.
        assert max(found) - last["added"] in (0, 1)
        assert [buffer.read(number).tokens_T[0] for number in found] == found
        version, path = versions.current()
        assert version - last["published"] in (0, 1) and path is not None
        assert [file.stat().st_size for file in path.iterdir()] == [100_000] * 3
        buffer.open_for_writing()
        assert not list((tmp_path / "buffer").glob(".*.half"))
        buffer.close()


def folder_of(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "content").write_text(content)

    return write


def test_versions_are_published_rolled_back_and_dropped(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    assert versions.current() == (0, None)
    for number in range(1, KEPT + 3):
        assert versions.publish(folder_of(f"{number}"), why="better") == number
    version, path = Versions(tmp_path).current()
    assert path is not None and (version, (path / "content").read_text()) == (6, "6")
    assert versions.kept() == [3, 4, 5, 6]
    versions.point(5, "worse in use")
    assert json.loads((tmp_path / "current.json").read_text())["why"] == "worse in use"
    assert versions.publish(folder_of("7"), why="better") == 7, "no number is used again"
    versions.point(0, "start over")
    assert versions.current() == (0, None)
    assert versions.publish(folder_of("8"), why="better") == 8
    with pytest.raises(ValueError, match=r"got version 2, expected one of \[0, 5, 6, 7, 8\]"):
        versions.point(2, "")


def test_a_version_that_fails_changes_nothing(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.publish(folder_of("1"), why="better")

    def full(path: Path) -> None:
        folder_of("half")(path)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        versions.publish(full, why="better")
    assert versions.current()[0] == 1 and versions.kept() == [1]
    assert versions.publish(folder_of("2"), why="better") == 2
    assert sorted(os.listdir(tmp_path / "versions")) == ["000001", "000002"]


def test_one_learner_publishes(tmp_path: Path) -> None:
    with Versions(tmp_path / "a").publishing(), Versions(tmp_path / "b").publishing():
        second = Versions(tmp_path / "a").publishing()
        with pytest.raises(
            ValueError, match=r"a is being written by process .* expected one learner a tag"
        ):
            second.__enter__()
    with Versions(tmp_path / "a").publishing():
        pass


def test_a_version_may_be_spared(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for number in range(8):
        versions.publish(folder_of("x"), "test", spare=2 if number < 7 else 0)
        assert (2 in versions.kept()) == (1 <= number < 7)
    assert versions.kept() == [5, 6, 7, 8]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": -1}', '{"version": "1"}'])
def test_a_spoiled_pointer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "current.json").write_text(content)
    with pytest.raises(ValueError, match=r"current\.json: got"):
        Versions(tmp_path).current()
    (tmp_path / "current.json").write_text('{"version": 3}')
    with pytest.raises(ValueError, match="names version 3"):
        Versions(tmp_path).current()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_finished_request_holds_what_the_target_said(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    """Against one pass of transformers over the whole text."""
    found: list[Served] = []
    decoder = Decoder(tiny_target, tiny_tokenizer)
    params = SamplingParams(temperature, max_new_tokens=6, ignore_eos=True)

    def finished(request: Request, harvested: Harvested | None) -> None:
        assert harvested is not None
        kept = {"k": 5, "version": 3, "states": True}
        served = as_served(request, harvested, decoder.runner, **kept)
        assert served is not None
        found.append(served)

    session = decoder.open_session(2, 64, finished=finished, harvest=True)
    for index, prompt in enumerate(["abc", "of one"]):
        request = open_request(
            prompt, index, index, tokenizer=tiny_tokenizer, params=params, context=64
        )
        session.submit(request)
    while session.busy:
        session.step()
    session.close()
    assert sorted(served.about["index"] for served in found) == [0, 1]
    for served in found:
        with torch.no_grad():
            logits_TV = tiny_target(served.tokens_T.long()[None]).logits[0]
        log_p_NV = logits_TV[served.prompt : -1].log_softmax(-1)
        want_NJ, ids_NJ = log_p_NV.topk(5)
        assert torch.equal(served.ids_NJ.long(), ids_NJ)
        torch.testing.assert_close(served.log_p_NB[:, :-1].float(), want_NJ, atol=1e-3, rtol=1e-3)
        rest_N = 1 - want_NJ.exp().sum(-1)
        torch.testing.assert_close(served.log_p_NB[:, -1].exp().float(), rest_N, atol=1e-3, rtol=0)
        assert served.norm_NH is not None and served.taps_TU is None and served.version == 3
