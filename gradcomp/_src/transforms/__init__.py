"""Recipes, one a paper, and wrappers that stand in an ``optax.chain``."""
