"""One file a kind of drafter; the protocol is in base.py."""
