"""Layers in shards of workers, on one axis or on two, and residuals of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from tests.support.cases.scan import WIDTH, whole


def layers_of(length, dtype=np.float32):
  """Whole layers, ``[L, ...]``; eight bits hold them as they are."""
  thin = (np.arange(WIDTH) % 4 == 0)[:, None] * whole(length, WIDTH, WIDTH, seed=1)
  return {"b": whole(length, WIDTH, seed=2).astype(dtype), "w": thin.astype(dtype)}


def cut(layers, workers):
  """Each worker's shards of layers, ``[N, L, ...]``."""
  parts = lambda x: np.stack(np.split(x, workers, axis=1))
  return jax.tree.map(parts, layers)


def old_of(shards, axis_name="data"):
  """Residuals that are not zero, of numbers that sums do not round."""
  own = lax.axis_index(axis_name)
  zeros = lambda w: parallel.gather_residual(w, axis_name=axis_name, axis=1)
  wave = lambda x: (jnp.arange(x.size) * (3 + own) % 17 - 8).reshape(x.shape) / 64
  return jax.tree.map(lambda w: zeros(w) + wave(zeros(w)).astype(jnp.float32), shards)


def mesh_of(axes):
  """A mesh of the first devices; ``axes`` are names and sizes."""
  sizes = tuple(axes.values())
  return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(axes))


def mapped_over(axes, function, *, check_vma=True):
  """The function of one worker's arrays, of all workers' ``[N, ...]``, compiled."""

  def local(*arrays):
    result = function(*jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], result)

  every = P(tuple(axes))
  specs = dict(in_specs=every, out_specs=every, check_vma=check_vma)
  return jax.jit(jax.shard_map(local, mesh=mesh_of(axes), **specs))
