"""Suffix decoding: no answer changes, whatever the store holds; the law is what a scan finds."""
