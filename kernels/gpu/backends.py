"""Asks whether JAX has looked for devices, for which it has no public name.

All that is public looks for them: that takes memory of GPUs, and comes too early for
what must be called before, such as ``jax.distributed.initialize``.
"""


def has_devices() -> bool:
  """Returns True if JAX has looked for devices; also if it has moved the answer."""
  try:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
  except (ImportError, AttributeError):
    return True  # kernels are checked, though perhaps too early
