"""A draft LM as a GGUF file: written by llama.cpp's own converter, read back, and compared with the
folder tensor by tensor.

The converter rearranges the rows of q and k of Llama's layers, because its rotary embedding turns
neighbouring numbers where transformers' turns halves of a head; that is undone here.

Shapes: A heads, E head width, H hidden.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.servers.doctor_gguf import llama_cpp
from draftsmith.models.servers.findings import Case

OUTTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TURNED = ("llama",)  # architectures whose q and k are rearranged
PLAIN = ("llama", "qwen2", "qwen3")  # of which nothing else is changed


def to_gguf(folder: Path, target: str, given: dict[str, Any], converter: str, out: Path) -> None:
    """Write the draft LM in `folder` as the file `out`. given: `target` and `tokenizer` of `Case`;
    converter: the user's convert_hf_to_gguf.py. ValueError: one of these is missing, llama.cpp
    would not draft with it for this target, or the file isn't the folder's; then none is left.
    """
    if out.suffix != ".gguf":
        raise ValueError(f"out: got {out}; expected a new file whose name ends in .gguf")
    if not Path(converter).is_file():
        raise ValueError(
            f"converter: got {converter!r}, which is no file; expected convert_hf_to_gguf.py of a "
            "checkout of llama.cpp (github.com/ggml-org/llama.cpp): converter=PATH"
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError("to=gguf: needs pip install 'draftsmith[gguf]' to read back") from None
    checkpoint = Checkpoint(folder)
    raw = read_json(folder / "config.json")
    for found in llama_cpp(Case(folder, "lm", raw, checkpoint, target_path=target, **given)):
        raise ValueError(f"to=gguf: got {found.says}; llama.cpp wouldn't take it; {found.mend}")
    dtypes = {tensor.dtype for tensor in checkpoint.meta.values()}
    outtype = OUTTYPES.get(dtypes.pop(), "f32") if len(dtypes) == 1 else "f32"
    command = [sys.executable, converter, str(folder), "--outtype", outtype, "--outfile", str(out)]
    # It imports modules that lie beside it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    out.parent.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    try:
        if run.returncode or not out.is_file():
            said = " ".join((run.stderr or run.stdout).strip().splitlines()[-1:]) or "nothing said"
            raise ValueError(
                f"converter: {converter} failed ({said}); expected {out}; a module that is missing "
                "is in llama.cpp's requirements; a pre-tokenizer that it doesn't know is a "
                "tokenizer of your own, and llama.cpp knows those of published models alone"
            )
        if wrong := differences(checkpoint, load_config(folder).get_text_config(), out):
            raise ValueError(
                f"converter: got {len(wrong)} tensors in {out.name} that aren't the folder's: "
                f"{', '.join(wrong[:4])}; expected them all, bit for bit; take another version "
                "of llama.cpp"
            )
    except ValueError:
        out.unlink(missing_ok=True)
        raise


def differences(checkpoint: Checkpoint, config: Any, file: Path) -> list[str]:
    """Names of the folder's tensors that a GGUF file lacks, or has with other values. What else it
    has, such as rotary factors, is the converter's own. ValueError for no GGUF file.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        arch = reader.fields["general.architecture"].contents()
    except (KeyError, ValueError) as error:
        raise ValueError(f"converter: got {file}, which isn't GGUF ({error})") from error
    if arch not in PLAIN:
        says = f"{file} isn't compared with the folder: of architecture {arch}, expected one of "
        warnings.warn(f"{says}{', '.join(PLAIN)}, whose values the converter keeps", stacklevel=3)
        return []
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    found = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    wrong = []
    for name in checkpoint.file_of:
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        if called not in found:
            wrong += [] if tied else [name]
            continue
        stored = found[called]
        values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        layer = name.split(".")[-2]
        if arch in TURNED and layer in heads:
            values = halves(values, heads[layer])
        if not torch.equal(values, checkpoint.read([name])[name].float()):
            wrong.append(name)
    return wrong


def halves(turned_XH: Tensor, heads: int) -> Tensor:
    """Rows (X: A heads of E) as transformers has them: the first of each pair, then the second."""
    return turned_XH.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(turned_XH.shape)
