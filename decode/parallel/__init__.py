"""A target in several processes."""
