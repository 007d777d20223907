"""What each table of docs/results is made by, steps in their order (`reproduce.py` runs them)."""

from itertools import product
from typing import NamedTuple


class Step(NamedTuple):
    """A command; its minutes on two cores of an AMD EPYC, as its rows or recipe tell, or with ~ as
    guessed from those of others; and what it leaves, by default the table of its own name.
    """

    command: str  # {target}, {data}, {out}: `filled`
    minutes: str
    makes: str = ""


def first(*kinds: str) -> str:
    """The one-pass table's first run of these kinds."""
    return f"bench/evidence/one_pass.py kinds={','.join(kinds)} seeds=1 {LONGER} out=runs/one-pass"


PAIR = "target=runs/quickstart/target/model drafter=runs/quickstart/distill/drafter"
TREES = {"chain": "chain", "eagle-25": "eagle-25", "calibrated": "runs/trees/t{T}.json"}
TREES |= {"dynamic": "dynamic:4,4,17,2.4"}
DRAFTS = "runs/gsm8k/draft/drafter,runs/gsm8k/distill/drafter,ngram"
EAGLE = "runs/one-pass/eagle3-0/drafter"
LONGER = "'options=batch_size=2 steps=400 warmup=20 eval_every=200 save_every=200'"
# Beside a store; of these on the costly twin too, and what they are called there.
BLOCK = "runs/one-pass/ours-0/drafter"
MINUTE = "runs/compare/gsm8k-0/runs"  # what `compare` trained for a minute
BESIDE = {"draft": "runs/gsm8k/distill/drafter", "block": BLOCK}
BESIDE |= {kind: f"{MINUTE}/{kind}/drafter" for kind in ("eagle3", "medusa")}
ON_TWIN = {"draft": "distill", "block": "ours-0", "eagle3": "eagle3"}
# On the target itself, and on its costly twin. Not Falcon, which drafts four tokens, nor DFlash-2,
# whose convolutions can't be widened.
EACH = ("ours", "eagle3", "mixture", "peagle", "dflash", "jetspec", "dspark", "domino", "clover2")
WIDE = ";".join(
    ",".join(f"{kind}=runs/one-pass/{at.format(f'{kind}-0')}" for kind in EACH)
    for at in ("{}/drafter", "twin/{}")
)
# Of what `compare` trains: not Falcon and Hydra++.
WIDENED = ("draft", "medusa", "hydra", "clover2", "eagle1", "eagle3", "block", "dspark", "dflash")
TWINS = {f"seed {seed}": f"runs/compare/twin-{seed}" for seed in range(3)}
ON_TWINS = ";".join(
    ",".join(("ngram,suffix,recycling", *(f"{kind}={twin}/{kind}" for kind in WIDENED)))
    for twin in TWINS.values()
)
SCALING = "steps=120 eval_every=15 warmup=10 heldout.limit=24 heldout.max_new_tokens=64"
TRAIN, TUNE = (f"draftsmith train {entry} recipe=" for entry in ("pretrain", "tune"))
KANGAROO, LONGSPEC, TOKENSWIFT = (
    f"runs/{name}/gsm8k/drafter" for name in ("kangaroo", "longspec", "tokenswift")
)
LONG = (
    "bench/evidence/long_context.py target=runs/long/target/model prompts=runs/long/prompts.jsonl "
    "batch_size=8 max_new_tokens=48 window=32000"
)
OWN = "exit:2,exit:6,skip:3a+4m,swift:0.3,jacobi:4,streaming:64,snapkv:64"
OWN += f",kangaroo={KANGAROO},kangaroo exits={KANGAROO}@confidence:0.6"
OWN += f",tokenswift=tokenswift:128+{TOKENSWIFT},longspec={LONGSPEC}"
OWN += ";exit:2,exit:4,exit:6,DEL=exits:2+4+6@exits"
OF_SEEDS = {
    f"{kind}-{seed}": f"{kind}/gsm8k" for kind in ("kangaroo", "medusa") for seed in range(3)
}
SEEDS = ",".join(f"{run}=runs/own-layers/{run}/drafter" for run in OF_SEEDS)
STEPS = {
    # What several tables begin from.
    "target": Step(f"{TRAIN}gsm8k/target", "50", "{target}"),
    "answers": Step("draftsmith prepare recipe=gsm8k/prepare", "11", "runs/gsm8k/answers"),
    "draft": Step(f"{TRAIN}gsm8k/draft", "~4", "runs/gsm8k/draft/drafter"),
    "distill": Step(
        "draftsmith train distill recipe=gsm8k/distill", "~4", "runs/gsm8k/distill/drafter"
    ),
    "quickstart-runs": Step("draftsmith quickstart", "12", "runs/quickstart/results.json"),
    "judge-target": Step(f"{TRAIN}judge/target", "6", "runs/judge/target/model"),
    "judge-draft": Step(f"{TRAIN}judge/draft", "2", "runs/judge/draft/drafter"),
    # Benches, which write rows and page.
    "cost": Step("bench/speed/cost.py out={out}", "~3"),
    "preview": Step("bench/speed/preview.py out={out}", "~2"),
    "decode": Step("bench/speed/decode.py out={out}", "~10"),
    "losses": Step("bench/speed/losses.py losses=fkl out={out}", "2"),
    "ranks": Step("bench/speed/ranks.py steps=23 out={out}", "~9"),
    "gkd": Step("bench/speed/gkd.py out={out}", "4"),  # beside TRL
    "peers": Step("bench/speed/peers.py out={out}", "~40"),  # after make peers
    "heads": Step("bench/evidence/heads.py out={out}", "~130"),
    "load": Step("bench/speed/load.py out={out}", "~40"),
    "served": Step("bench/speed/served.py out={out}", "7"),
    "one-pass": Step(f"bench/evidence/one_pass.py {LONGER} out={{out}}", "~240"),
    "ours-alone": Step(first("ours"), "~7", BLOCK),
    "one-pass-each": Step(first(*EACH), "~90", f"runs/one-pass/{EACH[-1]}-0/drafter"),
    "one-pass-widened": Step(
        "bench/speed/twin.py target={target} out=runs/one-pass/twin "
        f"drafter={','.join(f'runs/one-pass/{kind}-0/drafter' for kind in EACH)}",
        "1",
        "runs/one-pass/twin/target",
    ),
    "one-pass-twin": Step(
        "bench/evidence/evaluated.py name=one-pass-twin 'title=One-pass drafters, measured' "
        "K=2,3,5 'trees=chain;dynamic:5,6,17' prompts=8 max_new_tokens=48 identity=false "
        "targets=target={target},twin=runs/one-pass/twin/target "
        f"'drafters={WIDE}' out={{out}}",
        "~30",
    ),
    "calibration": Step("bench/evidence/calibration.py out={out}", "~5"),
    "kangaroo": Step("draftsmith train heads recipe=kangaroo/gsm8k", "~8", KANGAROO),
    "longspec": Step("draftsmith train heads recipe=longspec/gsm8k", "~8", LONGSPEC),
    "longer": Step("bench/evidence/longer.py", "1", "runs/long/train.jsonl"),
    "long-target": Step(
        "draftsmith train pretrain recipe=long/target", "~14", "runs/long/target/model"
    ),
    **{
        f"long-{name}": Step(
            "draftsmith train heads recipe=longspec/gsm8k target=runs/long/target/model "
            "data=runs/long/train.jsonl text.max_length=128 batch_size=16 steps=150 eval_every=75 "
            f"save_every=75 offset={offset} out=runs/long/{name}",
            "~4",
            f"runs/long/{name}/drafter",
        )
        for name, offset in (("moved", 30000), ("unmoved", 0))
    },
    "long-context-heads": Step(
        f"{LONG} repeats=3 K=2 lengths=[1024,4096,8192,16384] 'drafters=[LongSpec=runs/long/moved/"
        "drafter,LongSpec unmoved=runs/long/unmoved/drafter]' out={out}",
        "~5",
        "{out}/long-context.json",
    ),
    "long-context-far": Step(
        f"{LONG} lengths=[32000] 'drafters=[streaming:256,snapkv:256]' out={{out}}",
        "~12",
        "{out}/long-context.json",
    ),
    "long-context": Step(
        f"{LONG} repeats=3 lengths=[1024,4096,8192,16384] "
        "'drafters=[streaming:256,snapkv:256,rapid:512]' out={out}",
        "~7",
    ),
    "tokenswift": Step("draftsmith train heads recipe=tokenswift/gsm8k", "~6", TOKENSWIFT),
    "layerskip": Step(f"{TUNE}layerskip/gsm8k", "~15", "runs/layerskip/gsm8k/target"),
    "twin": Step("bench/speed/twin.py target={target} out=runs/twin", "1", "runs/twin/target"),
    "greedy": Step(
        "draftsmith prepare recipe=consistency/prepare", "1", "runs/consistency/answers"
    ),
    "consistency": Step(f"{TUNE}consistency/gsm8k", "42", "runs/consistency/gsm8k/target"),
    "units": Step(f"{TUNE}units/gsm8k", "21", "runs/units/gsm8k/target"),
    "own-layers-tuned": Step(
        "bench/evidence/evaluated.py K=3,8 prompts=12 max_new_tokens=48 identity=false "
        "targets=untuned={target},consistency=runs/consistency/gsm8k/target,"
        "units=runs/units/gsm8k/target 'drafters=jacobi:8;jacobi:8;pads:8' out={out}",
        "~5",
        "{out}/own-layers.json",
    ),
    "own-layers-twin": Step(
        "bench/evidence/evaluated.py K=1,3 prompts=8 max_new_tokens=32 identity=false "
        "targets=twin=runs/twin/target "
        "drafters=exit:4,exit:12,skip:6a+8m,jacobi:4,streaming:64,snapkv:64 out={out}",
        "~25",
        "{out}/own-layers.json",
    ),
    "own-layers": Step(
        "bench/evidence/evaluated.py K=1,3 prompts=12 max_new_tokens=48 identity=false "
        f"targets=target={{target}},layerskip=runs/layerskip/gsm8k/target 'drafters={OWN}' "
        "out={out}",
        "~30",
    ),
    **{
        run: Step(
            f"draftsmith train heads recipe={recipe} seed={run[-1]} out=runs/own-layers/{run}",
            "~2",
            f"runs/own-layers/{run}/drafter",
        )
        for run, recipe in OF_SEEDS.items()
    },
    "own-layers-seeds": Step(
        "bench/evidence/evaluated.py K=1 prompts=24 max_new_tokens=64 identity=false "
        f"targets=seeds={{target}} drafters=exit:2,{SEEDS} out={{out}}",
        "~5",
        "{out}/own-layers.json",
    ),
    "swift": Step("bench/evidence/swift.py out={out}", "~10"),
    "training-free-widened": Step(
        "bench/speed/twin.py target={target} out=runs/training-free "
        f"drafter={','.join(BESIDE[kind] for kind in ON_TWIN)}",
        "1",
        "runs/training-free/target",
    ),
    **{
        f"training-free{where}": Step(
            f"bench/evidence/training_free.py {how} drafters={','.join(drafters)} out={{out}}",
            f"~{minutes}",
            "{out}/training-free.json",
        )
        for where, how, drafters, minutes in (
            (
                "-twin",
                "on=twin target=runs/training-free/target prompts=8 longest=400 max_new_tokens=48",
                [f"{kind}=runs/training-free/{at}" for kind, at in ON_TWIN.items()],
                60,
            ),
            ("", "prompts=16", [f"{kind}={at}" for kind, at in BESIDE.items()], 15),
        )
    },
    "eagle3": Step(
        "bench/evidence/heads.py kinds=eagle3 out=runs/heads", "~35", "runs/heads/eagle3-2/drafter"
    ),
    "eagle3-alone": Step(first("eagle3"), "~20", EAGLE),
    "medusa": Step(
        "bench/evidence/heads.py kinds=medusa seeds=1 out=runs/heads",
        "~5",
        "runs/heads/medusa-0/drafter",
    ),
    "advice": Step("bench/evidence/advised.py out={out}", "~20"),
    "distillation-gsm8k": Step(
        "bench/evidence/distillation.py out={out}", "~240", "runs/evidence/gsm8k/rows"
    ),
    "distillation": Step(
        "bench/evidence/distillation.py pair=quickstart arms=fkl,jsd,tv,lk,rkl,two-stage,ce "
        "out={out}",
        "~90",
    ),
    "scaling": Step(
        "bench/evidence/scaling.py sizes=1x64,1x128,2x128,2x256,4x256 "
        f"'options={SCALING} cache.path=runs/scaling/states' out={{out}}",
        "~45",
    ),
    "scaling-block": Step(
        "bench/evidence/scaling.py family=block trained=runs/scaling-block name=scaling-block "
        "out={out}",
        "~60",
    ),
    "specdecpp": Step("bench/evidence/specdecpp.py timed_each=8 out={out}", "~240"),
    "judge": Step("bench/evidence/judge.py out={out}", "~15"),
    "online": Step("bench/evidence/online.py out={out}", "~65"),
    "omni": Step("bench/evidence/omni.py out={out}", "~40"),
    "online-choices": Step("bench/evidence/online_choices.py out={out}", "108"),
    # Evaluations, and the one page of several.
    "compare-runs": Step(
        "draftsmith compare target=runs/quickstart/target/model budget=45 limit=16 "
        "max_new_tokens=48 threads=1 out=runs/compare",
        "17",
        "runs/compare/results.json",
    ),
    "compare": Step(
        "bench/joined.py name=compare 'title=Every kind, the quickstart target' "
        "reports=[runs/compare] out={out}",
        "0",
    ),
    **{
        f"compare-gsm8k-{seed}": Step(
            "draftsmith compare target={target} prompts={data} data=runs/gsm8k/answers budget=60 "
            f"limit=24 threads=1 seed={seed} out=runs/compare/gsm8k-{seed}",
            "90" if seed else "40",
            f"runs/compare/gsm8k-{seed}/results.json",
        )
        for seed in range(3)
    },
    **{
        name: Step(
            f"bench/joined.py name={name} 'title=Every kind, {which}' seeds=true "
            "reports=[runs/compare/gsm8k-0,runs/compare/gsm8k-1,runs/compare/gsm8k-2] out={out}",
            "0",
        )
        for name, which in (
            ("compare-gsm8k", "the GSM8K target"),
            ("compare-avx2", "without AVX-512"),
        )
    },
    **{
        f"compare-widened-{seed}": Step(
            f"bench/speed/twin.py target={{target}} out=runs/compare/twin-{seed} drafter="
            + ",".join(f"runs/compare/gsm8k-{seed}/runs/{kind}/drafter" for kind in WIDENED),
            "2",
            f"runs/compare/twin-{seed}/target",
        )
        for seed in range(3)
    },
    "compare-twin": Step(
        "bench/evidence/evaluated.py name=compare-twin 'title=Every kind, on a costly twin' "
        "K=3 trees=chain prompts=8 max_new_tokens=32 identity=false threads=1 temperatures=0,1 "
        f"'targets={','.join(f'{name}={twin}/target' for name, twin in TWINS.items())}' "
        f"'drafters={ON_TWINS}' out={{out}}",
        "~30",
    ),
    "quickstart": Step(
        "bench/joined.py name=quickstart title=Quickstart reports=runs/quickstart out={out}", "0"
    ),
    **{
        f"gsm8k-{T}": Step(
            f"draftsmith evaluate target={{target}} drafter={DRAFTS} prompts={{data}} limit=24 "
            f"max_new_tokens=80 threads=1 advice=false policy=fixed temperature={T} "
            f"out=runs/gsm8k/t{T}",
            "2",
            f"runs/gsm8k/t{T}/results.json",
        )
        for T in (0, 1)
    },
    "gsm8k": Step(
        "bench/joined.py name=gsm8k 'title=GSM8K, a 15M target' names=[before,after,ngram] "
        "reports=[runs/gsm8k/t0,runs/gsm8k/t1] out={out}",
        "0",
    ),
    **{
        f"tree-{T}": Step(
            f"draftsmith calibrate {PAIR} temperature={T} out=runs/trees/t{T}.json",
            "~2",
            f"runs/trees/t{T}.json",
        )
        for T in (0, 1)
    },
    **{
        f"trees-{T}-{name}": Step(
            f"draftsmith evaluate {PAIR} K=4 tree={tree.replace('{T}', str(T))} limit=16 "
            f"max_new_tokens=128 threads=1 advice=false temperature={T} out=runs/trees/{T}-{name}",
            "0.5",
            f"runs/trees/{T}-{name}/results.json",
        )
        for T, (name, tree) in product((0, 1), TREES.items())
    },
    "trees": Step(
        'bench/joined.py name=trees "title=Trees, the quickstart\'s pair, 4 draft calls" '
        f'\'names=[chain,eagle-25,"calibrated, 16 nodes","{TREES["dynamic"]}"]\' '
        f"reports=[{','.join(f'runs/trees/{T}-{name}' for T in (0, 1) for name in TREES)}] "
        "out={out}",
        "0",
    ),
}
GIVEN = ("target", "answers")
SEEDED = tuple(f"compare-gsm8k-{seed}" for seed in range(3))
TABLES: dict[str, tuple[str, ...]] = {  # the last step is the table's own
    "advice": (*GIVEN, "quickstart-runs", "draft", "distill", "medusa", "eagle3-alone", "advice"),
    "calibration": (*GIVEN, "ours-alone", "calibration"),
    "compare": ("quickstart-runs", "compare-runs", "compare"),
    "compare-avx2": (*GIVEN, *SEEDED, "compare-avx2"),
    "compare-gsm8k": (*GIVEN, *SEEDED, "compare-gsm8k"),
    "compare-twin": (
        *(*GIVEN, *SEEDED, *(f"compare-widened-{seed}" for seed in range(3))),
        "compare-twin",
    ),
    "cost": ("quickstart-runs", "cost"),
    "decode": ("quickstart-runs", "decode"),
    "distillation": (*GIVEN, "quickstart-runs", "distillation-gsm8k", "distillation"),
    "gkd": ("gkd",),
    "gsm8k": (*GIVEN, "draft", "distill", "gsm8k-0", "gsm8k-1", "gsm8k"),
    "heads": (*GIVEN, "heads"),
    "judge": ("judge-target", "judge-draft", "judge"),
    "load": (*GIVEN, "ours-alone", "load"),
    "preview": ("preview",),
    "served": (*GIVEN, "ours-alone", "served"),
    "long-context": (
        *("target", "longer", "long-target", "long-moved", "long-unmoved"),
        *("long-context-heads", "long-context-far", "long-context"),
    ),
    "losses": ("losses",),
    "one-pass": (*GIVEN, "one-pass"),
    "one-pass-twin": (*GIVEN, "one-pass-each", "one-pass-widened", "one-pass-twin"),
    "omni": ("target", "omni"),
    "online": (*GIVEN, "draft", "online"),
    "online-choices": (*GIVEN, "draft", "online", "eagle3", "online-choices"),
    "own-layers": (
        *(*GIVEN, "kangaroo", "longspec", "tokenswift", "layerskip", "twin"),
        *("greedy", "consistency", "units", *OF_SEEDS, "own-layers-seeds"),
        *("own-layers-tuned", "own-layers-twin", "own-layers"),
    ),
    "peers": ("quickstart-runs", "peers"),
    "quickstart": ("quickstart-runs", "quickstart"),
    "ranks": ("ranks",),
    "scaling": (*GIVEN, "scaling"),
    "scaling-block": (*GIVEN, "scaling-block"),
    "specdecpp": ("target", "specdecpp"),
    "swift": ("target", "swift"),
    "training-free": (
        *(*GIVEN, "draft", "distill", "ours-alone", "compare-gsm8k-0"),
        *("training-free-widened", "training-free-twin", "training-free"),
    ),
    "trees": ("quickstart-runs", *(name for name in STEPS if name.startswith("tree"))),
}
