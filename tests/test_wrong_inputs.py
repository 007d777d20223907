"""Wrong inputs, over every command and entry: exit code 2 and one line, which says what was got and
what to do. In one process; a few are launched as a user would.
"""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from wrong_folders import make_folders
from wrong_predictions import PREDICTING

from draftsmith.__main__ import COMMANDS, LAUNCHED, command
from draftsmith.command import guarded
from draftsmith.manual import of_module

PAIR = "target=target drafter=draft"
BRIEF = "max_new_tokens=8 limit=2 advice=false identity=false"
EVALUATE = f"evaluate {PAIR} prompts=text.jsonl prompt_tokens=8 {BRIEF}"
SERVE = f"serve {PAIR} port=0"
TRAIN = "target=target data=text.jsonl steps=1 dtype=float32"
FEW = "heldout.limit=2 heldout.prompt_tokens=8 heldout.max_new_tokens=4 text.max_length=40"
EAGLE = f"train eagle {TRAIN} {FEW}"
BLOCKS = f"train blocks {TRAIN} {FEW}"
HEADS = f"train heads {TRAIN} {FEW} head.kind=medusa"
TUNE = f"train tune {TRAIN} {FEW}"
DISTILL = f"train distill {TRAIN} {FEW}"
PRETRAIN = f"train pretrain data=text.jsonl steps=1 dtype=float32 tokenizer=target {FEW}"
SCORERS = "train scorers target=target steps=1 reading.kind=acceptance reading.drafter=draft"
ONLINE = "train online target=target drafter=draft steps=1 idle_priority=false dtype=float32"
PREPARE = "prepare target=target prompts=text.jsonl prompt_tokens=8 max_new_tokens=4 limit=2"
TRACE = f"trace {PAIR} prompts=text.jsonl split=train prompt_tokens=8 max_new_tokens=4 limit=2"
SKIP_LAYERS = "skip-layers target=target prompts=text.jsonl"
REMEMBER = "remember target=target data=text.jsonl"
CALIBRATE = f"calibrate {PAIR} prompts=text.jsonl prompt_tokens=8 max_new_tokens=8"
TRIM = f"trim {PAIR} data=text.jsonl sizes=300 prompt_tokens=8 max_new_tokens=8 limit=2"
SIZE = "size target=target gpu=cpu"
PLAN = "plan recipe=quickstart/distill gpu=cpu"
SHOW = "data show data=text.jsonl tokenizer=target"

# A command line, and words of its answer: what was got, and what to do. `out=new` is added.
CASES = [
    # ---- keys --------------------------------------------------------------------------------
    ("evaluate", "missing: target=... drafter=..."),
    (f"{EVALUATE} temprature=1", "unknown key 'temprature': did you mean temperature?"),
    (f"{EVALUATE} temperature=warm", "temperature: got 'warm', expected float"),
    (f"{EVALUATE} identity=maybe", "identity: got 'maybe', expected true or false"),
    (
        "train eagle target=target",
        "no value for steps: give steps=..., or choose a recipe: eagle1/",
    ),
    (f"{EAGLE} heldout.promts=x", "unknown key 'heldout.promts': did you mean heldout.prompts?"),
    (f"{EAGLE} recipe=eagle3/quikstart", "unknown recipe 'eagle3/quikstart': did you mean eagle3/"),
    (f"{EAGLE} recipe=quickstart/distill", "is for train/distill.py, this is eagle.py"),
    (f"{EAGLE} steps=many", "steps: got 'many', expected int"),
    ("trian eagle", "unknown command 'trian': did you mean"),
    # ---- the target --------------------------------------------------------------------------
    (f"{EVALUATE} target=absent", "got absent, which is neither a", "correct the path"),
    (f"{EVALUATE} target=some/model", "got some/model", "fetch the model first"),
    (f"{EVALUATE} target=a_file", "got a_file", "expected a folder"),
    (f"{EVALUATE} target=nothing", "got nothing", "expected a folder with config.json"),
    (f"{EVALUATE} target=torn", "got torn", "whole safetensors weights"),
    (f"{EVALUATE} target=t5", "got t5, which cannot be read as a causal LM", "check it"),
    (f"{EVALUATE} target=no_tokens", "got no_tokens without a tokenizer; expected tokenizer.json"),
    (f"{EVALUATE} adapter=nothing", "target.adapter: got nothing, expected a folder with adapter_"),
    (f"{EVALUATE} device=cuda", "device: got 'cuda', expected one that this machine has: cpu"),
    (f"{EVALUATE} device=gpu", "device: got 'gpu', expected one that this machine has: cpu"),
    (f"{EVALUATE} dtype=bf16", "got dtype 'bf16'; expected one of auto, float32, bfloat16"),
    (f"{EAGLE} target.dtype=half", "got dtype 'half'; expected one of auto, float32, bfloat16"),
    # ---- stores ------------------------------------------------------------------------------
    (f"{REMEMBER} drafter=sufix", "unknown drafter 'sufix': did you mean suffix?"),
    (f"{REMEMBER} limit=0", "limit: got 0, expected at least 1"),
    (
        f"{EVALUATE} drafter=suffix:absent",
        "absent: got a shard that is missing",
        "remember drafter",
    ),
    (f"{EVALUATE} drafter=stand:a_file", "cut or foreign", "draftsmith remember drafter=stand"),
    (f"{EVALUATE} drafter=suffix+exit:1", "a drafter of kind exit", "draft LM or a head, as EAG"),
    (f"{EVALUATE} drafter=suffix+stand+draft", "a drafter of kind stand+lm", "draft LM or a head"),
    # ---- the drafter -------------------------------------------------------------------------
    (f"{EVALUATE} drafter=absent", "got absent", "expected a drafter folder"),
    (f"{EVALUATE} drafter=a_file", "got a_file", "expected a drafter folder"),
    (f"{EVALUATE} drafter=nothing", "got nothing without config.json and model.safetensors"),
    (f"{EVALUATE} drafter=no_weights", "got no_weights without model.safetensors", "restore"),
    (
        f"{EVALUATE} drafter=other_draft",
        "got a target that other_draft was not made for",
        "give that",
    ),
    (f"{EVALUATE} drafter=foreign", "got", "tokenizer"),
    (f"{EVALUATE} drafter=draft,draft", "got 'draft,draft', expected names, each of them once"),
    (f"{EVALUATE} drafter=medusa K=4", "drafts 3 tokens ahead; give K=3 or less"),
    # ---- how to decode -----------------------------------------------------------------------
    (f"{EVALUATE} K=0", "K: got 0, expected 1 to 64"),
    (f"{EVALUATE} rule=couplde", "rule: got 'couplde', expected one of"),
    (f"{EVALUATE} tree=chian", "tree: got 'chian', expected chain, medusa-63"),
    (f"{EVALUATE} tree=tree.json", "without [1], expected", "add it"),
    (f"{EVALUATE} tree=dynamic:4,4", "tree: got 'dynamic:4,4'", "expected dynamic:levels,width"),
    (f"{EVALUATE} policy=confidense", "policy: got 'confidense', expected"),
    (f"{EVALUATE} policy=confidence:2", "policy confidence: got 2", "expected"),
    (f"{EVALUATE} policy=table:1-4=2", "policy table: got '1-4=2', expected ranges of rows"),
    (f"{EVALUATE} policy=acceptance", "policy acceptance: got", "train/scorers.py"),
    (f"{EVALUATE} temperature=-1", "temperature: got -1.0, expected 0 (greedy) or"),
    (f"{EVALUATE} top_p=0 temperature=1", "top_p: got 0.0, expected a share in (0, 1]"),
    (f"{EVALUATE} lossy=typical", "lossy: got 'typical'", "say allow_lossy=true"),
    (f"{EVALUATE} attention=flash", "attention: got 'flash', expected"),
    (f"{EVALUATE} batch_size=0", "got 0, expected at least 1"),
    (f"{EVALUATE} max_new_tokens=0", "max_new_tokens: got 0, expected at least 2"),
    (f"{EVALUATE} max_new_tokens=9999", "max_new_tokens=9999 exceeds the context of", "lower"),
    (f"{EVALUATE} limit=0", "limit: got 0, expected at least 1"),
    (f"{EVALUATE} turns=0", "turns: got 0, expected at least 1"),
    (f"{EVALUATE} task=sums", "task: got 'sums', expected gsm8k"),
    (f"{EVALUATE} seed=-1", "seed: got -1, expected at least 0"),
    (f"{EVALUATE} target=odd", "got odd, which cannot be read", "expected a folder with config"),
    (f"{EVALUATE} target=no_words", "got no_words, from which no tokenizer can be read", "check"),
    (f"{EVALUATE} threads=-1", "threads: got -1, expected"),
    (f"{EVALUATE} prompt_tokens=0", "prompt_tokens: got 0, expected at least 1"),
    (f"{EVALUATE} parallel=0", "parallel: got 0, expected at least 1 process"),
    (f"{EVALUATE} parallel=5", "parallel: got 5 for a target with", "that divides them"),
    # ---- rows --------------------------------------------------------------------------------
    (
        f"{EVALUATE} prompts=absent.jsonl",
        "got 'absent.jsonl', which does not exist; expected a file",
    ),
    (f"{EVALUATE} prompts=nothing", "'nothing' holds no rows; expected a file"),
    (f"{EVALUATE} prompts=empty.jsonl", "'empty.jsonl' holds no rows; expected a file"),
    (f"{EVALUATE} prompts=some/rows", "can't be loaded", "Expected a network, files"),
    (f"{EVALUATE} prompts=torn.jsonl", "torn.jsonl:2: not JSON", "expected one object a line"),
    (f"{EVALUATE} prompts=fields.jsonl", "fields.jsonl:2: got the fields ['txet'], expected"),
    (f"{EVALUATE} prompts=number.jsonl", "number.jsonl:2: 'prompt' is 7, expected a text"),
    (f"{EVALUATE} prompts=roles.jsonl", "roles.jsonl:2: message 0", "expected"),
    (f"{EVALUATE} prompts=one.jsonl", "the report part of 1 held-out rows is empty; expected more"),
    (
        f"{EVALUATE} prompts=short.jsonl split=all prompt_tokens=99",
        "expected longer texts or smaller",
    ),
    (f"{EVALUATE} split=test", "split: got 'test', expected one of report, tune, train, all"),
    (f"{EVALUATE} target=plain drafter=ngram prompts=chats.jsonl", "has no chat template; set its"),
    (f"{EVALUATE} thinking=true prompts=chats.jsonl", "thinking: got true, but the chat template"),
    (f"{EAGLE} data=unanswered.jsonl", "unanswered.jsonl:", "train/prepare.py"),
    (f"{EAGLE} data=a_file", "a_file:1: not JSON", "expected one object a line"),
    (f"{PREPARE} temperature=-1", "temperature: got -1.0, expected 0"),
    (f"{PREPARE} limit=-1", "limit: got -1, expected"),
    (f"{PREPARE} samples=0", "samples: got 0, expected"),
    (f"{PREPARE} batch_size=0", "batch_size: got 0, expected at least 1"),
    (f"{PREPARE} device=cuda", "device: got 'cuda', expected"),
    (f"{PREPARE} reverse.draft=draft reverse.least=2", "reverse.least: got 2.0, expected a number"),
    (f"{PREPARE} reverse.draft=medusa", "reverse.draft: got medusa, a drafter of kind", "draft LM"),
    (f"{PREPARE} endpoint.url=localhost", "endpoint: got 'localhost', expected http"),
    # ---- training ----------------------------------------------------------------------------
    (f"{EAGLE} steps=0", "steps: got 0, expected at least 1"),
    (f"{EAGLE} batch_size=-8", "batch_size: got -8, expected at least 1"),
    (f"{EAGLE} lr=-1", "lr: got -1.0, expected more than 0"),
    (f"{EAGLE} optimizer=adam", "optimizer: got 'adam', expected one of adamw, sgd, muon"),
    (f"{EAGLE} track=wandbb", "track: got 'wandbb', expected one of none, "),
    (f"{EAGLE} eval_every=-1", "eval_every: got -1, expected at least 0"),
    (f"{EAGLE} save_every=-1", "save_every: got -1, expected at least 0"),
    (f"{EAGLE} warmup=-1", "warmup: got -1, expected at least 0"),
    (f"{EAGLE} beta1=1.5", "got beta1=1.5, expected"),
    (f"{EAGLE} best_metric=taus", "expected a finite taus in it (best_metric)"),
    (f"{EAGLE} K=0", "K: got 0, expected 1 to 64"),
    (f"{EAGLE} tree=chian", "tree: got 'chian', expected chain"),
    (f"{EAGLE} loss=fkll", "loss: got 'fkll', expected"),
    (f"{EAGLE} temperature=-1", "temperature: got -1.0, expected 0"),
    (f"{EAGLE} head.version=2", "version 2", "expected version 1 or 3"),
    (f"{EAGLE} head.taps=[1,9]", "taps", "expected"),
    (f"{EAGLE} head.draft_vocab=9999", "got draft_vocab=9999, expected 1 to the target's"),
    (f"{EAGLE} head.layers=0", "layers: got 0, expected at least 1"),
    (f"{EAGLE} head.heads=3", "head: got sizes that don't fit (", "not a multiple"),
    (f"{EAGLE} head.path=draft", "head.path: got draft of kind lm, expected eagle3"),
    (f"{EAGLE} unroll.steps=0", "unroll.steps: got 0, expected"),
    (f"{EAGLE} text.max_length=1", "max_length: got 1, expected at least 2"),
    (f"{EAGLE} heldout.limit=0", "limit: got 0, expected"),
    (f"{EAGLE} out=a_file", "a_file", "expected"),
    (f"{EAGLE} out=a_file/run", "got a_file/run", "expected a path that can be read or written"),
    (f"{EAGLE} out=draft", "out: got draft, which holds a model; expected", "choose another"),
    (f"{DISTILL} out=eagle", "out: got eagle, which holds a model; expected", "choose another"),
    (f"{EAGLE} unroll.noise=-0.1", "noise: got -0.1, expected at least 0"),
    (f"{EAGLE} unroll.token_weight=-1", "token_weight: got -1.0, expected at least 0"),
    (f"{EAGLE} out=ran", "ran holds a run with another recipe (", "choose another folder"),
    (f"{EAGLE} data=answered", "answered: got 0 of 3 answers; run the same train/prepare.py"),
    (f"{PREPARE} out=answered", "answered was begun with other settings (", "another folder"),
    (f"{PREPARE} out=a_file", "got a_file", "expected a path that can be read or written"),
    (f"{EVALUATE} out=a_file/report", "a_file", "expected a path that can be read or written"),
    (f"{BLOCKS} head.kind=dflesh", "head.kind: got 'dflesh'", "expected one of block, dflash, "),
    (f"{BLOCKS} anchors.count=0", "anchors: got count=0", "expected at least 1"),
    (f"{HEADS} head.kind=medusas", "got head.kind='medusas', expected chimera or "),
    (f"{HEADS} decay=-0.5", "decay: got -0.5, expected at least 0"),
    (f"{HEADS} head.kind=hydra noise=-1", "noise: got -1.0, expected at least 0"),
    (f"{HEADS} head.heads=0", "heads=0", "expected each to be at least 1"),
    (f"{HEADS} loss=nothing", "got 'nothing', expected one of fkl"),
    (f"{TUNE} method=exists", "method: got 'exists', expected one of exits, consistency, units"),
    (f"{TUNE} method=exits exits.every=0", "exits: got", "every=0", "expected"),
    (f"{DISTILL} draft.heads=5", "heads", "expected"),
    (f"{DISTILL} draft=eagle", "a head of kind eagle3, expected a draft LM"),
    (f"{DISTILL} draft=foreign", "got", "tokenizer"),
    (f"{DISTILL} on_policy.share=2", "on_policy.share: got 2.0, expected a share in [0, 1]"),
    (f"{DISTILL} tokens.select=best", "tokens.select: got 'best', expected"),
    (f"{DISTILL} lora.rank=-1", "lora", "expected"),
    (f"{PRETRAIN} tokenizer=train tokenizer_size=9", "tokenizer_size: got 9, expected at least"),
    (f"{PRETRAIN} heldout_sequences=0", "heldout_sequences: got 0, expected at least 1"),
    (f"{PRETRAIN} model=absent", "got absent", "check the path"),
    (f"{PRETRAIN} model.layers=0", "layers", "expected"),
    (f"{SCORERS} reading.traces=[absent]", "absent: got no", "expected a folder that"),
    (f"{SCORERS} reading.kind=acceptence", "got kind='acceptence'", "expected one of"),
    (f"{ONLINE} kind=eagle2", "kind lm and kind=eagle2, expected the same"),
    (f"{ONLINE} drafter=absent replay=topics.jsonl", "got absent", "expected a drafter"),
    (f"{ONLINE} replay=sums.jsonl", "sums.jsonl:1: got", "expected {"),
    (f"{ONLINE} replay=absent.jsonl", "absent.jsonl", "expected"),
    (f"{ONLINE} mix.recent=2", "mix.recent, reservoir, disagreement: got (2.0, ", "from 0 to 1"),
    (f"{ONLINE} duty=2", "duty: got 2.0, expected"),
    # ---- the other commands ------------------------------------------------------------------
    (f"{SERVE} drafter=absent", "got absent", "expected a drafter folder"),
    (f"{SERVE} drafters=code", "drafters: got 'code', expected TAG=FOLDER"),
    (f"{SERVE} port=99999", "port: got 99999, expected 0 to 65535"),
    (f"{SERVE} port=TAKEN", "port=TAKEN (Address already in use), expected a free port"),
    (f"{SERVE} host=no.such.host", "got host=no.such.host port=0", "expected"),
    (f"{SERVE} K=0", "K: got 0, expected at least 1"),
    (f"{TRIM} limit=0", "limit: got 0, expected at least 1"),
    (f"{SERVE} batch_size=0", "batch_size: got 0, expected at least 1"),
    (f"{SERVE} drafter=ngram online=new", "online: got new and no draft that can learn, expected"),
    ("export drafter=draft target=target to=vlm", "to: got 'vlm', expected one of sglang"),
    (
        "export drafter=draft target=target to=vllm out=text.jsonl",
        "out: got",
        "expected a new folder",
    ),
    (
        "export drafter=medusa target=target to=vllm",
        "to=vllm: got a drafter of kind medusa",
    ),
    (
        "push drafter=absent",
        "got absent, which has no draftsmith.json",
        "expected a drafter folder",
    ),
    ("push drafter=target", "got target, which has no draftsmith.json", "uploaded by hf upload"),
    ("push drafter=draft", "repo: got '', expected user/name or organisation/name"),
    ("push drafter=draft repo=draft", "repo: got 'draft', expected user/name or organisation/name"),
    ("push drafter=no_weights repo=me/x", "got no_weights without model.safetensors", "restore"),
    ("push drafter=draft repo=me/x report=absent.json", "got absent.json, which cannot be read"),
    ("push drafter=draft repo=me/x report=grid.json", "report: got grid.json (", "report.json"),
    ("doctor", "missing: drafter=..."),
    ("doctor absent", "got absent", "expected"),
    (f"{TRIM} sizes=some", "sizes: got 'some', expected whole numbers from 1 up"),
    (f"{TRIM} sizes=9999", "9999", "expected"),
    (f"{TRIM} drafter=ngram", "ngram", "expected"),
    (f"{CALIBRATE} drafter=ngram", "ngram", "expected"),
    (f"{CALIBRATE} nodes=0", "nodes: got 0, expected"),
    (f"{CALIBRATE} levels=0", "levels: got 0, expected"),
    (f"{SKIP_LAYERS} share=1", "share: got 1, expected a number above 0 and below 1"),
    (f"{SKIP_LAYERS} K=0", "K: got 0, expected"),
    (f"{SKIP_LAYERS} finalists=0", "finalists: got 0, expected at least 1"),
    (f"{TRACE} source=drafter", "source: got 'drafter', expected one of decoder, mixed"),
    (f"{TRACE} split=tuen", "split: got 'tuen', expected one of"),
    (f"{TRACE} drafter=ngram", "drafter=ngram, policy=fixed, expected a drafter with a q"),
    (f"{TRACE} source=mixed mixing=2", "mixing: got 2.0, expected"),
    ("stopping tune=absent c=0.1", "absent: got no", "expected a folder that"),
    ("stopping tune=absent target=target drafter=draft", "absent: got no", "expected a folder"),
    ("stopping tune=absent costs=old", "costs: got 'old', expected one of kept, new"),
    ("judge-labels target=target", "data", "expected"),
    ("judge-labels target=target drafter=draft data=text.jsonl limit=2", "text.jsonl", "expected"),
    (
        "judge-labels target=target drafter=ngram data=sums.jsonl",
        "got one of kind ngram",
        "expected",
    ),
    (f"{PLAN} gpu=h1000", "gpu: got 'h1000', expected one of h100"),
    (f"{PLAN} gpus=0", "got gpus=0", "expected 1 or more"),
    ("plan gpu=cpu", "plan: got ''", "expected recipe=..."),
    (f"{SIZE} target=absent", "got absent, which is neither a folder here nor"),
    (f"{SIZE} target=t5", "got t5, which cannot be read as a causal LM (transformers has none of "),
    ("doctor draft target=t5", "got t5, which cannot be read as a causal LM", "check it"),
    (f"{SIZE} gpu=gpu", "gpu: got 'gpu', expected one of"),
    (f"{SIZE} budget=10", "got budget=10 and min_layers=2", "raise the budget"),
    (f"{SIZE} results=absent.json", "results: got absent.json, expected a JSON list of rows"),
    (
        "scaling results=laws.json",
        "got row 1 of laws.json without parameters",
        "expected each to have",
    ),
    ("scaling results=empty.json", "results: got", "expected"),
    (f"{SHOW} index=999", "index: got 999, expected 0.."),
    (
        f"{SHOW} tokenizer=absent",
        "got absent, from which no tokenizer can be read",
        "check the path",
    ),
    ("quickstart K=0", "K: got 0, expected 1 to 64"),
    ("quickstart steps=-1", "steps: got -1, expected at least 0"),
    ("quickstart limit=0", "limit: got 0, expected at least 1"),
    *PREDICTING,
]


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    make_folders(made, tiny_target, tiny_draft, tiny_tokenizer)
    return made


def takes_out(name: str) -> bool:
    """Whether a command has the key `out`."""
    place, schema, _ = COMMANDS.get(name, ("", "", ""))
    return bool(name) and "out" in [
        key.name for key in of_module(f"draftsmith.{place}").keys(schema)
    ]


def told(line: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line is answered on stderr; checks that it is one line, and the exit code."""
    words = line.split()
    name = next(name for name in (*COMMANDS, "") if words[: len(name.split())] == name.split())
    rest = words[len(name.split()) :]
    if name.startswith(LAUNCHED):
        rest.append("processes=1")
    if "out=" not in line and takes_out(name):
        rest.append(f"out={out}")
    capsys.readouterr()
    code = guarded(partial(command, name), rest)
    said = capsys.readouterr().err
    assert (code, said.count("\n"), said[:7]) == (2, 1, "error: "), said
    assert len(said) < 1200, said
    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][:60])
def test_one_line_says_what_was_got_and_what_to_do(
    case: tuple[str, ...],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root)
    line, *words = case
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line, *words = (text.replace("TAKEN", port) for text in (line, *words))
        said = told(line, tmp_path / "run", capsys)
    for part in words:
        assert part in said


def test_every_command_is_among_them() -> None:
    lines = [f"{case[0]} " for case in CASES]
    without = [name for name in COMMANDS if not any(line.startswith(f"{name} ") for line in lines)]
    assert without == [] and len(CASES) >= 40


LAUNCHED_WRONGLY = {
    "evaluate target=absent drafter=ngram": "got absent, which is neither",
    "train eagle target=target data=empty.jsonl out=new steps=1 config=cpu_ddp2": "holds no rows",
}


@pytest.mark.slow
def test_launched_commands_say_no_more(root: Path) -> None:
    """As a user calls them, side by side, one of them in two processes: all that is on stderr."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    launched = [
        subprocess.Popen(
            [sys.executable, "-m", "draftsmith", *line.split()],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in LAUNCHED_WRONGLY
    ]
    for process, says in zip(launched, LAUNCHED_WRONGLY.values(), strict=True):
        out, said = process.communicate(timeout=120)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert process.returncode == 2 and "Traceback" not in out + said
        assert len(errors) == 1 and says in errors[0]
