"""A target that is split over processes decodes as the whole one does."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import split_job
import torch
from saved_drafts import save_draft
from transformers import GPTNeoXConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.forward.kv import KVPool
from draftsmith.models.draft_lm import draft_from_config
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.split import check_split_over
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import stand_in_tokenizer

JOB = str(Path(split_job.__file__))
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 51,  # which two processes have as 26 and 25
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}


def llama(layers: int) -> PreTrainedModel:
    """With biases on all maps."""
    torch.manual_seed(layers)
    biases: Any = {"attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **biases, num_hidden_layers=layers)).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, tokenizer, target = tmp_path_factory.mktemp("split"), stand_in_tokenizer(320), llama(3)
    target.save_pretrained(made / "target")
    tokenizer.save_pretrained(made / "target")
    save_draft(made / "lm", llama(1), target, tokenizer)
    layer = LlamaConfig(**SIZES, num_hidden_layers=1)
    head = Eagle(EagleConfig(layer, version=3, taps=(1, 2), draft_vocab=320)).bind(target)
    mark: Any = {"tokenizer": tokenizer, "target_fingerprint": fingerprint(target, tokenizer)}
    about: Any = {"provenance": {}, "defaults": {"K": 3}}
    save_drafter(made / "eagle", kind="eagle3", model=head, **mark, **about)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    return split_job.decoded(folder, 1)


def told(folder: Path, *words: str) -> dict[str, Any]:
    done = forked.run([JOB, str(folder), *words])
    assert done.returncode == 0, done.told
    return json.loads((folder / "told").read_text())


def test_two_processes_decode_as_one(folder: Path, whole: dict[str, Any]) -> None:
    """Every token; each holds half of the heads, of keys and values, and of what is inside."""
    split = told(folder, "2")
    assert split["answers"] == whole["answers"]
    assert torch.allclose(torch.tensor(split["logits"]), torch.tensor(whole["logits"]), atol=1e-5)
    assert split["kv"] * 2 == whole["kv"]
    assert split["layers"] < whole["layers"] * 0.6
    assert split["body"] == whole["body"] == "LeanBody"
    assert split["unheld"] < 10, "pools that nobody holds are closed as others are opened"


def test_followers_whose_trees_stay_as_drafted_fail(folder: Path, whole: dict[str, Any]) -> None:
    split = told(folder, "2", "commit")["answers"]
    assert any(split[way] != whole["answers"][way] for way in split)


def test_what_is_evaluated_is_proven(folder: Path) -> None:
    """By the command: both dtypes in turn, each with followers of its own."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": f"the cat number {i} sat"}) for i in range(40))
    )
    how = f"target={folder}/target drafter={folder}/lm prompts={prompts} parallel=2 limit=3 K=2"
    how += f" max_new_tokens=12 advice=false ignore_eos=true out={folder}/report device=cpu"
    done = forked.run(["-m", "draftsmith", "evaluate", *how.split()])
    assert done.returncode == 0, done.told
    report = json.loads((folder / "report/results.json").read_text())[0]
    assert {report["identical"][key] for key in ("same", "total")} == {3}
    assert report["identical"]["dtype"] == "float32"


def test_a_follower_ends_with_a_leader_that_is_killed(folder: Path) -> None:
    job = forked.Forked([JOB, str(folder), "2", "stay"])
    while "ready" not in job.out:
        assert job.poll() is None, job.told
        time.sleep(0.1)
    leader = job.process.pid
    [follower] = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    job.send_signal(signal.SIGKILL)
    for _ in range(300):
        if not Path(f"/proc/{follower}/exe").exists():
            return
        time.sleep(0.1)
    pytest.fail("it is still there")


class Alone:
    """A leader without followers."""

    def opened(self, pool: KVPool) -> None: ...

    def passing(self, *given: Any, **how: Any) -> None: ...


def test_drafters_made_of_the_target_are_refused(folder: Path) -> None:
    target, tokenizer = load_decoded(TargetSpec(str(folder / "target"), dtype="float32"), "cpu")
    target.leader = Alone()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="parallel: got a drafter of layers of the target"):
        load_drafter("exit:2", target, tokenizer)


def test_what_cannot_be_split_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"got 3 for a target with 2 key-value heads, 4 query"):
        check_split_over(llama(1), 3)
    small = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "intermediate": 48, "seed": 0}
    neox = draft_from_config(GPTNeoXConfig(), vocab_size=64, **small)
    with pytest.raises(ValueError, match="a target of type gpt_neox"):
        check_split_over(neox, 2)
    path = str(folder / "target")
    with pytest.raises(ValueError, match="quantised, adapted or shrunk"):
        load_decoded(TargetSpec(path, shrink=True, parallel=2), "cpu")
    with pytest.raises(ValueError, match="where a target isn't decoded with"):
        load_target(TargetSpec(path, parallel=2), "cpu")
    with pytest.raises(ValueError, match="parallel: got 0"):
        TargetSpec(path, parallel=0)
