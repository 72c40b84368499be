"""Plugins of pytest: selection, costs and budgets."""
