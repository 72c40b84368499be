"""Plugins of pytest: selection and costs."""
