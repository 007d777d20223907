"""What is trained or run: modules, loading, the drafter folder. No losses, no loops."""
