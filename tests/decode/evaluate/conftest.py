"""What the tests of evaluations share."""

from pathlib import Path

import pytest
from evaluated import save_pair
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    root = tmp_path_factory.mktemp("pair")
    save_pair(root, tiny_target, tiny_draft, tiny_tokenizer)
    return root
