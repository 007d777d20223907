"""llama.cpp's own converter, for tokenizers of one's own: as `export to=gguf converter=` takes it.

    python bench/speed/peers_gguf.py FOLDER --outtype bf16 --outfile FILE.gguf

The converter knows the pre-tokenizers of published models by the hash of a text, and stops at any
other. Those that are trained here split text as GPT-2's does, so that is what an unknown one is
called; everything else is llama.cpp's code, of the copy that `make peers` built.
"""

import runpy
import sys
from pathlib import Path

LLAMA = Path(__file__).resolve().parents[2] / ".peers/llama.cpp/vendor/llama.cpp"


def main() -> None:
    sys.path[:0] = [str(LLAMA), str(LLAMA / "gguf-py")]
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def named(model: object, tokenizer: object) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    def absent(model: object) -> None:
        """It would import sentencepiece before it looks for its file, of which there is none."""
        raise FileNotFoundError("tokenizer.model")

    TextModel.get_vocab_base_pre, TextModel._set_vocab_sentencepiece = named, absent
    runpy.run_path(str(LLAMA / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
