"""Recipes: YAML only. `recipe=quickstart/distill` names quickstart/distill.yaml in this folder."""
