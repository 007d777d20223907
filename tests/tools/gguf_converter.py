"""A stand-in for llama.cpp's converter: the same arguments, Llama's and Qwen3's layers, weights in
float32, and q and k of Llama's rearranged as its rotary embedding wants them.

    python gguf_converter.py FOLDER --outtype bf16 --outfile FILE
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors import deserialize


def read(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of a file in bfloat16, without torch, which takes seconds to import."""
    for name, tensor in deserialize(path.read_bytes()):
        assert tensor["dtype"] == "BF16", (name, tensor["dtype"])
        high = np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16
        yield name, high.view("<f4").reshape(tensor["shape"])


def rearranged(weight: np.ndarray, heads: int) -> np.ndarray:
    """Number i of the first half of a head beside number i of the second."""
    width = len(weight) // heads
    order = [half * width // 2 + i for i in range(width // 2) for half in (0, 1)]
    return np.concatenate([weight[head * width :][order] for head in range(heads)])


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    asked.add_argument("--outtype", choices=["f32", "f16", "bf16"], required=True)
    asked.add_argument("--outfile", type=Path, required=True)
    given = asked.parse_args()
    config = json.loads((given.folder / "config.json").read_text())
    kind = config["model_type"]
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[kind]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(given.outfile, kind)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, values in read(given.folder / "model.safetensors"):
        layer = name.split(".")[-2]
        if kind == "llama" and layer in heads:
            values = rearranged(values, config[heads[layer]])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
