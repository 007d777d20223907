"""Wrong inputs of commands that foretell and compare, for tests/test_wrong_inputs.py."""

SIMULATE = "simulate costs=grid.json survival=0.7,0.5 batch_size=2"
PREDICT = "predict target=target gpu=cpu"
COMPARE = "compare target=target prompts=text.jsonl data=text.jsonl budget=1"

PREDICTING = [
    (f"{SIMULATE} costs=absent.json", "got absent.json, which cannot be read", "expected a JSON"),
    (f"{SIMULATE} costs=grid.json survival=0.5,0.6", "survival: got 0.5,0.6, expected falling"),
    (f"{SIMULATE} traces=absent", "got traces='absent' and survival='0.7,0.5', expected one of"),
    ("simulate costs=grid.json traces=absent", "absent: got no", "expected a folder that"),
    (f"{SIMULATE} costs=sums.jsonl", "sums.jsonl", "expected"),
    (f"{SIMULATE} costs=tree.json", "tree.json", "expected"),
    (
        f"{SIMULATE} costs=grid_torn.json",
        "costs: got grid_torn.json, expected rows and nodes from 1",
        "have",
    ),
    (
        f"{SIMULATE} policies=plain,acceptance",
        "got 'acceptance', expected some of plain",
        "are for",
    ),
    (f"{SIMULATE} policies=fixed:3", "policies: got 'fixed:3', expected fixed:1 to fixed:2"),
    (f"{SIMULATE} policies=table:1-=3", "policy table: got '1-=3', expected ranges of rows"),
    (f"{SIMULATE} K=3", "K: got 3, expected at most 2"),
    (f"{SIMULATE} batch_size=64", "costs: got 2 rows and 3 tokens a row", "expected 64 and 3"),
    (f"{SIMULATE} arrivals=poison", "arrivals: got 'poison', expected clients, poisson, burst"),
    (f"{SIMULATE} arrivals=poisson rate=0", "rate: got '0', expected numbers from 1e-09 up"),
    (f"{SIMULATE} clients=some", "clients: got 'some', expected whole numbers from 1 up"),
    (f"{SIMULATE} target=target", "got target='target' and drafter='', expected both"),
    (f"{SIMULATE} requests=0", "requests: got 0, expected at least 1"),
    (f"{PREDICT} gpu=gpu", "gpu: got 'gpu', expected one of"),
    (
        f"{PREDICT} batch_size=1,many",
        "batch_size: got '1,many', expected whole numbers from 1 up",
    ),
    (
        f"{PREDICT} acceptance=1.5",
        "acceptance: got '1.5', expected shares in (0, 1): 0.7, or eagle",
    ),
    (f"{PREDICT} acceptance=eagle:0.5", "unknown kind 'eagle': did you mean eagle3?"),
    (f"{PREDICT} report=grid.json", "report: got grid.json with tree=None, expected a report.json"),
    (f"{PREDICT} trace=absent", "absent: got no trace.json, expected a folder that draftsmith tra"),
    (f"{PREDICT} context=0", "context: got 0, expected at least 1"),
    # ---- comparing ---------------------------------------------------------------------------
    (f"{COMPARE} target=absent", "got absent, which is neither a folder here nor"),
    (f"{COMPARE} kinds=eagel3", "unknown kind 'eagel3': did you mean eagle3?"),
    (f"{COMPARE} kinds=suffix+medusa", "kinds: got suffix+medusa without medusa, expected medusa,"),
    (f"{COMPARE} budget=0", "budget: got 0, expected seconds above 0"),
    (f"{COMPARE} temperatures=0,warm", "temperatures: got '0,warm', expected numbers from 0 up"),
    (f"{COMPARE} data=absent.jsonl", "got 'absent.jsonl', which does not exist"),
    (f"{COMPARE} more={{eagle:lr=1}}", "unknown kind 'eagle': did you mean"),
    (f"{COMPARE} limit=1", "limit: got 1, expected at least 2"),
]
