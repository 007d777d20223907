"""One entry a paradigm, plus the machinery that all entries share."""
