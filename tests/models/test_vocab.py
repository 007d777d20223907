"""Draft vocabularies: which tokens, how they are stored, what they cover."""

import pytest
import torch

from draftsmith.models.vocab import DraftVocab


def test_the_most_frequent_tokens_in_ascending_order() -> None:
    vocab = DraftVocab.most_frequent(torch.tensor([5, 0, 7, 7, 1, 5, 0, 5]), 4)
    assert vocab.ids_D.tolist() == [0, 2, 3, 5]  # of the three fives, the smaller ids
    assert vocab.d2t_D.tolist() == [0, 1, 1, 2]
    assert vocab.t2d_V.tolist() == [True, False, True, True, False, True, False, False]
    assert DraftVocab.from_offsets(vocab.d2t_D, 8).ids_D.tolist() == [0, 2, 3, 5]


def test_coverage_is_the_share_of_what_was_counted() -> None:
    counts = torch.tensor([90, 5, 3, 2])
    assert DraftVocab.most_frequent(counts, 1).coverage(counts) == 0.9
    assert DraftVocab.most_frequent(counts, 2).coverage(counts) == 0.95
    assert DraftVocab(torch.arange(4), 4).coverage(torch.zeros(4, dtype=torch.int64)) == 1.0


@pytest.mark.parametrize("size", [0, 5])
def test_sizes_outside_the_vocabulary_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab: got {size}, expected 1 to the target's 4"):
        DraftVocab.most_frequent(torch.ones(4), size)


def test_maps_that_point_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"entry 2 to token 6 of 6\), expected offsets"):
        DraftVocab.from_offsets(torch.tensor([0, 2, 4]), 6)  # ids in place of offsets
    with pytest.raises(ValueError, match=r"token 1 at entry 0 and 1 after it, expected ascending"):
        DraftVocab.from_offsets(torch.tensor([1, 0, 0]), 6)
    with pytest.raises(ValueError, match=r"token 5 at entry 1 and 3 after it, expected ascending"):
        DraftVocab.from_offsets(torch.tensor([0, 4, 1]), 6)
