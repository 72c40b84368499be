"""Computes what hosts do that go on with another number of workers."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD
from tests.support.hosts.sharded import gradients


def optimizer():
  """Its state has integers of 8 bits, rows of owners, a momentum and a typed key."""
  return optax.chain(
    gradcomp.compress(
      QSGD(bits=4, bucket_size=32),
      axis_name="data",
      exchange="two_shot",
      feedback=gradcomp.ErrorFeedback(residual_dtype="int8"),
      min_leaf_size=0,
    ),
    optax.trace(0.9),
    optax.add_noise(0.01, 0.5, jax.random.key(3)),
  )


def step(tx, mesh, state, seed):
  """One step of all workers of a mesh: the output and the state."""
  specs = gradcomp.state_specs(state, axis_name="data")

  def update(gradient, state):
    return tx.update(jax.tree.map(lambda leaf: leaf[0], gradient), state)

  mapped = jax.shard_map(
    update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
  )
  return jax.jit(mapped)(gradients(mesh.size, seed), state)


def words(x):
  """An array, or what a typed key consists of."""
  typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if typed else x


def moved(hosts):
  """Output and state after a step of two workers a host, and one of one a host."""
  tx = optimizer()
  devices = np.array(jax.devices()[: 2 * hosts])
  old, new = Mesh(devices, ("data",)), Mesh(devices[::2], ("data",))
  params = jax.tree.map(lambda leaf: leaf[0], gradients(hosts, 0))
  with jax.set_mesh(old):
    params = jax.device_put(params, NamedSharding(old, P()))
    state = tx.init(params)
  _, state = step(tx, old, state, 1)
  options = dict(axis_name="data", old_workers=old.size, workers=new.size)
  placed = gradcomp.reshard_state(tx, params, state, mesh=new, **options)
  on_host = jax.tree.map(words, gradcomp.reshard_state(tx, params, state, **options))
  for x, whole in zip(
    jax.tree.leaves(jax.tree.map(words, placed)), jax.tree.leaves(on_host), strict=True
  ):
    for part in x.addressable_shards:
      np.testing.assert_array_equal(part.data, np.asarray(whole)[part.index])
  output, state = step(tx, new, placed, 2)
  return output, jax.tree.map(words, state)
