"""Axes, specs, types and maps of the mesh that the workers are on."""
