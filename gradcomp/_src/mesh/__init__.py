"""Axes, specs, types and maps of the mesh of the workers, and studies of a trace."""
