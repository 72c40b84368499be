"""The registries of trees that make a class a node of ``jax.jit`` only."""

from typing import Any

# They are private in JAX 0.10 to 0.12. Where they have gone, there are none, and what
# would be a leaf of jax.tree becomes a node of it, too.
try:
  from jax._src.tree_util import dispatch_registry, tracing_registry

  IN_JIT: tuple[Any, ...] = (dispatch_registry, tracing_registry)
except ImportError:
  IN_JIT = ()
