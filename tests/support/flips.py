"""Flips bits, and makes arrays that a type calls equal on all devices and are not."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def bits(x):
  """How many bits of an array may flip: one of each bool, and all of all else."""
  x = np.asarray(x)
  return x.size if x.dtype == bool else 8 * x.nbytes


def flip(x, bit):
  """Returns a copy of an array with one bit flipped."""
  x = np.array(x)
  octets = x.reshape(-1).view(np.uint8)
  if x.dtype == bool:
    octets[bit] ^= 1
  else:
    octets[bit // 8] ^= 1 << bit % 8
  return x


def copies(trees, mesh):
  """Arrays typed as replicated, of which device i of the mesh holds ``trees[i]``."""
  sharding = NamedSharding(mesh, P())
  devices = list(enumerate(mesh.devices.reshape(-1)))
  here = [(i, d) for i, d in devices if d.process_index == jax.process_index()]

  def copied(*leaves):
    parts = [jax.device_put(leaves[i], device) for i, device in here]
    shape = leaves[0].shape
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

  return jax.tree.map(copied, *trees)
