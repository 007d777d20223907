"""Facts of servers and formats, by the source of the versions named here; nowhere else is a version
of theirs written down.
"""

from typing import NamedTuple


class Stack(NamedTuple):
    """name: with the version whose loaders were read; serve: the command for target, folder (and
    the same as Python's literal), the method's name there, K tokens a round, options as JSON;
    first: what makes `made` of the folder, called like it with `makes` at the end; layout: what
    heads are exported as for it; synthetic: `serve` with answers made up at measured rates.
    """

    name: str
    serve: str = ""
    first: str = ""
    makes: str = ""
    layout: str = ""
    synthetic: str = ""


STACKS = {
    "vllm": Stack(
        "vLLM 0.33", "vllm serve {target} --speculative-config {options}", synthetic="{serve}"
    ),
    "sglang": Stack(
        "SGLang 0.5.23",
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
        "--speculative-draft-model-path {folder} --speculative-num-steps {K} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {nodes}",
        # Its other method rounds a normal draw, whose mean is another.
        synthetic="SGLANG_SIMULATE_ACC_METHOD=match-expected SGLANG_SIMULATE_ACC_LEN={tau:.3f} "
        "{serve}",
    ),
    "speculators": Stack("speculators 0.9", "vllm serve {folder}"),
    "tgi": Stack("TGI", "text-generation-launcher --model-id {folder}"),  # of its last release
    "transformers": Stack(
        "transformers",
        "target.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("
        "{literal}))  # transformers",
    ),
    "gguf": Stack(
        "llama.cpp",  # of llama-cpp-python 0.3.36; older ones call the options otherwise
        "llama-server -m TARGET.gguf -md {made} --spec-type {method} --spec-draft-n-max {K} "
        "--spec-draft-ngl all",
        "python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outtype bf16 "
        "--outfile {made}",
        ".gguf",
        "sglang",
        "{serve} --spec-synth-rates {rates}",
    ),
    "tensorrt": Stack(
        "TensorRT-LLM",  # by its documentation alone
        "trtllm-serve {target} --config {made}",
        "echo {yaml} > {made}",
        "-trtllm.yaml",
        "sglang",
    ),
    "mlx": Stack(
        "mlx-lm",
        "mlx_lm.server --model {target} --draft-model {made} --num-draft-tokens {K}",
        "mlx_lm.convert --hf-path {folder} --mlx-path {made}",
        "-mlx",
    ),
    "lmstudio": Stack(
        "LM Studio", "lms import {made}  # as the draft of a target in its side panel", "", ".gguf"
    ),
    "draftsmith": Stack("draftsmith"),
}
# By the method's name where it is served otherwise: SGLang takes a block's size from the folder.
SERVES = dict.fromkeys(
    ("DFLASH", "DSPARK"),
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
    "--speculative-draft-model-path {folder}",
)
# A draft LM's vocabulary is checked first.
FIRST = {
    "draft-simple": "python -m draftsmith export drafter={folder} target={target} to=gguf "
    "converter=convert_hf_to_gguf.py out={made}"
}
# Methods that TensorRT-LLM runs without its overlap scheduler alone.
NO_OVERLAP = ("DraftTarget",)
# What llama.cpp asks of two vocabularies: sizes within, equal texts from this id on.
GGUF_SIZES, GGUF_TEXTS = 128, 5
GGUF_EAGLE3 = "draft_vocab_size"  # a one-layer Llama with it in its config is taken for EAGLE-3
SPECULATORS_VERSION = "0.9.0"  # that its folders name
# Layers of n that servers tap where a folder of EAGLE-3 names none.
USUAL_TAPS = "2, n // 2, n - 3"
SGLANG_POSITIONS = 2048  # where a folder names none
EAGLE1_OF_SGLANG = "LlamaForCausalLMEagle"  # the architecture that it knows EAGLE-1 by
