"""Trains by parallel.zero in every mode, and gives the cases of its tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero
from tests.support import modes

N = 4
FOUR_BITS = QSGD(bits=4, bucket_size=64)
TILE = 8 * 64  # elements of a row
LEAVES = {"w": (3, 700), "v": (2 * TILE,), "b": (7,), "one": (), "odd": (N + 1,)}


def tree(seed, shapes, *stack):
  rng = np.random.default_rng(seed)
  draw = lambda shape: jnp.asarray(np.float32(rng.standard_normal((*stack, *shape))))
  return {name: draw(shape) for name, shape in shapes.items()}


def gradients(steps, shapes):
  return [tree(100 + i, shapes, N) for i in range(steps)]


def coded(inner, codec=FOUR_BITS, params=None, **options):
  return zero(inner, grads=codec, params=params or codec, axis_name="data", **options)


def stepper(tx):
  """What a worker does with its gradient."""

  def step(gradient, state, params):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return step


def train(mode, tx, params, given):
  """Yields what the workers hold after each step: parameters and state, ``[N, ...]``.

  Where types prove that parameters are equal, there is one copy of them.
  """
  for held in _MODES[mode](tx, params, given):
    yield jax.tree.map(np.asarray, held)


def last(*args):
  return list(train(*args))[-1]


def _copies(transform, tx, params, given):
  step = transform(stepper(tx), axis_name="data")
  params = jax.tree.map(lambda x: np.stack([x] * N), params)
  state = transform(tx.init, axis_name="data")(params)
  for gradient in given:
    params, state = step(gradient, state, params)
    yield params, state


def _mapped(check_vma, tx, params, given):
  mesh = modes.mesh(N)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = jax.jit(tx.init)(params)
  specs = gradcomp.state_specs(state, axis_name="data")
  # Unchecked, each worker's own copy comes back.
  out = P() if check_vma else P("data")

  def local(gradient, state, params):
    drop = lambda tree: jax.tree.map(lambda x: x[0], tree)
    own = params if check_vma else drop(params)
    params, state = stepper(tx)(drop(gradient), state, own)
    return params if check_vma else jax.tree.map(lambda x: x[None], params), state

  step = jax.jit(
    jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P("data"), specs, out),
      out_specs=(out, specs),
      check_vma=check_vma,
    )
  )
  if not check_vma:
    params = jax.tree.map(lambda x: np.stack([x] * N), params)
  for gradient in given:
    params, state = step(gradient, state, params)
    copies = params
    if check_vma:
      copies = jax.tree.map(lambda x: np.stack([x] * N), params)
    yield copies, _unstacked(state, specs)


def _on_mesh(kind, tx, params, given):
  mesh = modes.mesh(N, kind)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = jax.jit(tx.init)(params)
  specs = gradcomp.state_specs(state, axis_name="data")

  @jax.jit
  def step(gradient, state, params):
    if kind == AxisType.Auto:
      return stepper(tx)(gradcomp.PerWorker(gradient, "data"), state, params)
    addends = jax.tree.map(lambda x: x * (1 / N), gradient)
    return stepper(tx)(unreduce(addends, "data"), state, params)

  for gradient in given:
    gradient = jax.device_put(gradient, NamedSharding(mesh, P("data")))
    params, state = step(gradient, state, params)
    copies = jax.tree.map(lambda x: np.stack([x] * N), params)
    yield copies, _unstacked(state, specs)


def _unstacked(state, specs):
  """Each worker's part of a global state, ``[N, ...]``."""

  def part(x, spec):
    x = np.asarray(x)
    if spec == P():
      return np.stack([x] * N)
    return x.reshape(N, x.shape[0] // N, *x.shape[1:])

  return jax.tree.map(part, state, specs)


_MODES = {
  "shard_map": functools.partial(_mapped, True),
  "shard_map_unchecked": functools.partial(_mapped, False),
  "pmap": functools.partial(_copies, jax.pmap),
  "vmap": functools.partial(
    _copies, lambda f, axis_name: jax.jit(jax.vmap(f, axis_name=axis_name))
  ),
  "auto": functools.partial(_on_mesh, AxisType.Auto),
  "explicit": functools.partial(_on_mesh, AxisType.Explicit),
}


def masters(held, state):
  """What owners know of the leaf "w", which fills its rows, in one vector."""
  ((own,),) = state.unsent.arrays.values()
  return held["w"][0] + own.reshape(-1)


def plain(inner, params, given):
  """Data-parallel training without this library: one optimizer for the mean."""

  @jax.jit
  def train(params, given):
    state, step = inner.init(params), stepper(inner)
    for gradient in given:
      mean = jax.tree.map(lambda x: x.mean(axis=0), gradient)
      params, state = step(mean, state, params)
    return params

  return train(params, given)


def sharded(tx, params, kind=AxisType.Auto):
  mesh = modes.mesh(N, kind)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    return params, jax.jit(tx.init)(params), mesh


def loss_fn(params, batch):
  return sum(jnp.mean((x * batch.mean()) ** 2) for x in jax.tree.leaves(params))


def wired(tx, params):
  """A train step of all workers, which is not yet compiled."""
  params, state, mesh = sharded(tx, params)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  return step.lower(params, state, np.ones(N, np.float32))
