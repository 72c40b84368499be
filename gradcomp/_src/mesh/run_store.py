"""The key-value store of a run of many processes, for which JAX has no public name.

Processes compare what they trace before the first collective. What is public, like
``jax.experimental.multihost_utils``, is made of collectives, which need equal programs
on all processes already.
"""

import warnings
from typing import Any

import jax


def run_store() -> Any:
  """Returns the client of the run's store; None in a run of one process.

  RuntimeWarning and None if JAX has moved it, so that nothing is compared.
  """
  if not jax.distributed.is_initialized():
    return None
  try:
    from jax._src import distributed

    return distributed.global_state.client
  except (ImportError, AttributeError):
    warnings.warn(
      f"JAX {jax.__version__} has moved its key-value store, so that gradcomp does not "
      "compare the transformations of the processes.",
      RuntimeWarning,
      stacklevel=2,
    )
    return None
