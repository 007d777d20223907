"""C2T: a head that reads numbers alone, learned from traced trees, orders dynamic ones."""

from pathlib import Path

import pytest
import torch
from made_up_traces import chain_columns
from saved_drafts import save_draft
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from truths import PROMPTS, truths

from draftsmith.command import guarded
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.store import TraceWriter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import load_acceptance, weights_mark
from draftsmith.train import scorers

SHORT = SamplingParams(temperature=1.0, max_new_tokens=12)
READ = "path,rank,entropy,depth"


def tree_columns(prompt: int) -> dict[str, Tensor]:
    """Log-odds of being kept: 3 + path - 2 * rank, of which log q alone says little."""
    columns = chain_columns(prompt)
    count, generator = len(columns["kept"]), torch.Generator().manual_seed(1000 + prompt)
    path_n = -3 * torch.rand(count, generator=generator)
    rank_n = torch.randint(0, 4, (count,), generator=generator)
    odds_n = 3 + path_n - 2 * rank_n
    kept_n = torch.rand(count, generator=generator) < odds_n.sigmoid()
    columns |= {"path": path_n, "rank": rank_n.short(), "entropy": torch.rand(count)}
    return columns | {"kept": kept_n, "on_path": torch.ones(count, dtype=torch.bool)}


@pytest.fixture
def drafter(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    mark = fingerprint(tiny_target, tiny_tokenizer)
    save_draft(tmp_path / "draft", tiny_draft, tiny_target, tiny_tokenizer)
    about = {"kind": "decoder", "target": mark, "settings": {"tree": "eagle-25"}}
    about["drafter"] = {"path": "", "kind": "lm", "mark": weights_mark(tmp_path / "draft")}
    writer = TraceWriter(tmp_path / "trace", about, max_bytes=1 << 30)
    for prompt in range(60):
        writer.add(prompt, tree_columns(prompt))
    writer.close()
    return tmp_path / "draft"


def argv(tmp_path: Path, drafter: Path, *more: str) -> list[str]:
    said = f"reading.kind=acceptance reading.drafter={drafter} reading.traces=[{tmp_path}/trace]"
    said += f" reading.state=none reading.scalars=[{READ}] out={tmp_path}/run target=unread"
    how = "blocks=1 width=8 reject_weight=1 batch_size=256 steps=60 lr=0.02 eval_every=30"
    return [*said.split(), *how.split(), *more]


def test_a_head_of_numbers_learns_and_orders_trees(
    tmp_path: Path,
    drafter: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    scorers.main(argv(tmp_path, drafter))
    made = tmp_path / "run/drafter"
    head = load_acceptance(made)
    assert head is not None and head.scorer.config.hidden == 0 and head.about["calibrated"]
    asked = tree_columns(500)
    read_n4 = torch.stack(
        [asked[name].float() for name in ("path", "rank", "entropy")]
        + [asked["depth"].float() - 1],
        1,
    )
    none_n0 = torch.empty(len(read_n4), 0)
    foretold_n = head.scorer.calibrated(head.scorer(none_n0, read_n4)).sigmoid()
    true_n = (3 + asked["path"] - 2 * asked["rank"]).sigmoid()
    assert (foretold_n - true_n).abs().mean() < 0.05
    loaded = load_drafter(str(made), tiny_target, tiny_tokenizer)
    how = {"policy": "acceptance:0.99", "tree": "dynamic:3,4,6"}
    decoder = Decoder(tiny_target, tiny_tokenizer, loaded, **how)
    assert decoder.policy.orders
    done = decoder.generate(PROMPTS, SHORT)
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, SHORT)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("width=0", "got state='none' with hidden=0, scalars=("),
        ("reading.scalars=[]", "scalars=(), width=8, expected hidden=0, numbers to read"),
        ("reading.kind=judge", "expected state='token'"),
    ],
)
def test_a_head_of_nothing_is_refused(
    tmp_path: Path, drafter: Path, wrong: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(scorers.main, argv(tmp_path, drafter, wrong)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
