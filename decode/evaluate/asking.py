"""What commands that decode ask of a target: which prompts, and how it answers them."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.prompts.chat import set_template
from draftsmith.decode.prompts.prompts import Prompt, load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.progress import watched


@dataclass(kw_only=True)
class Asking:
    """A target and its prompts; a command adds keys of its own, and may have other defaults."""

    target: str
    prompts: str = "stdlib"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    limit: int | None = 64  # prompts; none: all
    prompt_tokens: int = 64
    thinking: bool | None = None
    template_kwargs: str = ""
    batch_size: int = 8
    seed: int = 0
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "bfloat16"

    def asked(self, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Prompt]:
        """The prompts of one split, as the settings have the chat template show them."""
        set_template(tokenizer, self.thinking, self.template_kwargs)
        how: Any = {"limit": self.limit, "prompt_tokens": self.prompt_tokens, "split": split}
        return load_prompts(self.prompts, tokenizer, **how)

    def answers(self, decoder: Decoder, params: SamplingParams) -> list[Completion]:
        """The target's answers to prompts of the tune part, in their order: what a choice is made
        on. They are plain decoding's, whatever drafts: so they may be drafted.
        """
        prompts = self.asked(decoder.tokenizer, "tune")
        events = decoder.stream([prompt.tokens for prompt in prompts], params)
        done = (event.completion for event in events if event.completion is not None)
        return sorted(watched(done, "decoding", len(prompts)), key=lambda made: made.index)
