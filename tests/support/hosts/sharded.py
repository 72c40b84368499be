"""Computes what hosts do where a model or its optimizer is sharded over them.

And where their copies of a model differ, and where they become other workers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit
from tests.support import flips, laws, modes
from tests.support.cases import steps
from tests.support.cases.zero import coded


def gradients(hosts, step):
  """A large ragged leaf, a small one and a scalar."""
  return laws.tree({"a": (9, 70), "b": (3,), "c": ()}, hosts, seed=step)


def moved(hosts):
  """Returns what functions of gradcomp.parallel return, forward and backward."""
  options = dict(codec=QSGD(bits=4, bucket_size=32), backward=EightBit(bucket_size=32))
  options |= dict(axis_name="data", axis=1)
  x = np.random.default_rng(5).standard_normal((hosts, 3, 40 * hosts), np.float32)

  def local(x):
    x = x[0]
    gather = lambda x: parallel.all_gather(x, key=jax.random.key(1), **options)
    scatter = lambda x: parallel.psum_scatter(x, key=jax.random.key(2), **options)
    y, pull_y = jax.vjp(gather, x)
    z, pull_z = jax.vjp(scatter, x)
    own = y, pull_y(jnp.sin(y)), z, pull_z(jnp.sin(z))
    total = parallel.psum(x, axis_name="data", codec=EightBit(dtype="linear"))
    return jax.tree.map(lambda x: x[None], own), total

  specs = dict(in_specs=P("data"), out_specs=(P("data"), P()))
  return jax.jit(jax.shard_map(local, mesh=modes.mesh(hosts), **specs))(x)


def optimized(hosts):
  """Parameters and state after three steps of ZeRO, in two messages a direction."""
  mesh, codec = modes.mesh(hosts), QSGD(bits=4, bucket_size=32)
  tx = coded(optax.adam(1e-2), codec, feedback="error", message_bytes=100)
  optimizer = modes.training(tx)
  params = jax.tree.map(lambda leaf: leaf[0], gradients(hosts, 99))
  state = modes.placed(optimizer, params, mesh)[1]
  step = modes.on_mesh(optimizer, mesh, state)
  for number in range(3):
    _, state = step(gradients(hosts, number), state)
  return state


def compared(hosts):
  """Returns the fingerprints of copies of which that of host 1 has a flipped bit."""
  tree = jax.tree.map(lambda leaf: leaf[0], gradients(hosts, 7))
  parts = [dict(tree) for _ in range(hosts)]
  parts[1]["a"] = flips.flip(tree["a"], 1000)
  copies = flips.copies(parts, modes.mesh(hosts))
  found = gradcomp.telemetry.compare_replicas(copies, axis_name="data")
  assert found.differing()["['a']"] == ([0, 1] if hosts == 2 else [1])
  return found


def placed(hosts):
  """Returns what is placed from NumPy, from a host's devices, and from the mesh."""
  mesh = modes.mesh(hosts)
  rng = np.random.default_rng(11)
  tree = {"rows": rng.standard_normal((2 * hosts, 3), np.float32), "count": 7}
  tree["key"] = jax.random.key(5)
  specs = {"rows": P("data"), "count": P(), "key": P()}
  read = gradcomp.checkpoint.put_on_mesh(tree, mesh, specs)
  made = gradcomp.checkpoint.put_on_mesh(jax.tree.map(jnp.asarray, tree), mesh, specs)
  turned = gradcomp.checkpoint.put_on_mesh(made, mesh, P())
  cut_again = gradcomp.checkpoint.put_on_mesh(turned, mesh, specs)
  return jax.tree.map(words, [read, made, turned, cut_again])


def gathered(hosts):
  """Returns the residual with which one worker goes on, of which each had a part."""
  mesh = modes.mesh(hosts)
  tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error", min_leaf_size=0)
  params = np.zeros((2, 3), np.float32)
  with jax.set_mesh(mesh):
    state = tx.init(params)
  rows = np.random.default_rng(13).standard_normal((2 * hosts, 3), np.float32)
  residual = gradcomp.checkpoint.put_on_mesh(rows, mesh, P("data"))
  state = state._replace(residual=residual)
  options = dict(axis_name="data", old_workers=hosts, workers=1)
  alone = gradcomp.reshard_state(tx, params, state, **options)
  return gradcomp.checkpoint.put_on_mesh(alone.residual, mesh, P())


def plain(hosts):
  """Parameters and state after three steps in plain jit under Auto axes."""
  mesh, tx = modes.mesh(hosts), steps.kept4
  params, state = steps.begun(tx, mesh)
  step = jax.jit(steps.step_of(tx))
  for seed in (1, 2, 3):
    params, state, _ = step(params, state, steps.targets_of(mesh, seed))
  return params, state


def with_momentum():
  """Its state has integers of 8 bits, rows of owners, a momentum and a typed key."""
  int8 = gradcomp.ErrorFeedback(residual_dtype="int8")
  return optax.chain(
    laws.compressed(QSGD(bits=4, bucket_size=32), "two_shot", int8, min_leaf_size=0),
    optax.trace(0.9),
    optax.add_noise(0.01, 0.5, jax.random.key(3)),
  )


def words(x):
  """An array, or what a typed key consists of."""
  typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if typed else x


def regrouped(hosts):
  """Output and state after a step of two workers a host, and one of one a host."""
  tx = with_momentum()
  devices = np.array(jax.devices()[: 2 * hosts])
  old, new = Mesh(devices, ("data",)), Mesh(devices[::2], ("data",))
  params = jax.tree.map(lambda leaf: leaf[0], gradients(hosts, 0))
  params, state = modes.placed(tx, params, old)
  _, state = modes.on_mesh(tx, old, state)(gradients(old.size, 1), state)
  options = dict(axis_name="data", old_workers=old.size, workers=new.size)
  placed = gradcomp.reshard_state(tx, params, state, mesh=new, **options)
  on_host = jax.tree.map(words, gradcomp.reshard_state(tx, params, state, **options))
  both = jax.tree.map(words, placed), on_host
  for x, whole in zip(*map(jax.tree.leaves, both), strict=True):
    for part in x.addressable_shards:
      np.testing.assert_array_equal(part.data, np.asarray(whole)[part.index])
  output, state = modes.on_mesh(tx, new, placed)(gradients(new.size, 2), placed)
  return output, jax.tree.map(words, state)


# Of models, optimizers and states that are sharded over the hosts, of copies that
# differ, and of a step in plain jit.
CUT = {"moved": moved, "optimized": optimized, "compared": compared, "placed": placed}
CUT |= {"gathered": gathered, "plain": plain}
