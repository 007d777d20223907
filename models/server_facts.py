"""Facts of servers and formats, by the source of the versions named here; nowhere else is a version
of theirs written down.
"""

from typing import NamedTuple


class Stack(NamedTuple):
    """name: with the version whose loaders were read; serve: the command for target, folder (and
    the same as Python's literal), the method's name there, K tokens a round, options for vLLM.
    """

    name: str
    serve: str = ""


STACKS = {
    "vllm": Stack("vLLM 0.33", "vllm serve {target} --speculative-config {options}"),
    "sglang": Stack(
        "SGLang 0.5.14",
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
        "--speculative-draft-model-path {folder} --speculative-num-steps {K} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {nodes}",
    ),
    "speculators": Stack("speculators 0.9", "vllm serve {folder}"),
    "tgi": Stack("TGI", "text-generation-launcher --model-id {folder}"),  # of its last release
    "transformers": Stack(
        "transformers",
        "target.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("
        "{literal}))  # transformers",
    ),
    "draftsmith": Stack("draftsmith"),
}
# By the method's name where it is served otherwise: SGLang takes a block's size from the folder.
SERVES = dict.fromkeys(
    ("DFLASH", "DSPARK"),
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
    "--speculative-draft-model-path {folder}",
)
SPECULATORS_VERSION = "0.9.0"  # that its folders name
# Layers of n that servers tap where a folder of EAGLE-3 names none.
USUAL_TAPS = "2, n // 2, n - 3"
SGLANG_POSITIONS = 2048  # where a folder names none
EAGLE1_OF_SGLANG = "LlamaForCausalLMEagle"  # the architecture that it knows EAGLE-1 by
