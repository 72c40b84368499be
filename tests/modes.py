"""Runs N workers in every place where a transformation runs, by the same call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.workers import unreduce

# Maps, in which the mean of the workers' gradients is taken.
MODES = ("shard_map", "shard_map_unchecked", "pmap", "vmap")


def grouped(exchange, group_size=2):
  """The exchange by its short form; of groups of one axis, if it needs some."""
  if exchange == "hierarchical":
    return gradcomp.exchange.Hierarchical(group_size=group_size)
  return exchange


# Plain jit, in which the sum of addends is taken: gradients over N, which is exact for
# N a power of two.
EXPLICIT = "explicit"


def modes_for(workers):
  return (*MODES, EXPLICIT) if workers & (workers - 1) == 0 else MODES


def mesh(workers, kind=AxisType.Auto):
  devices = jax.devices()[:workers]
  return jax.make_mesh((workers,), ("data",), (kind,), devices=devices)


def run(mode, transformation, gradients):
  """Feeds ``gradients`` to ``update``, step by step.

  Args:
    mode: one of ``modes_for(workers)``.
    transformation: over the axis "data".
    gradients: a list of trees with leaves ``[N, ...]``, one tree a step.

  Returns:
    The list of outputs, leaves ``[N, ...]``, and the residuals, leaves ``[N, ...]`` or
    None: what each worker holds.
  """
  outputs, residual, _ = run_all(mode, transformation, gradients)
  return outputs, residual


def run_all(mode, transformation, gradients):
  """Like :func:`run`, and the residuals of the second stage ``[N, share, tile]``."""
  workers = jax.tree.leaves(gradients[0])[0].shape[0]
  params = jax.tree.map(lambda leaf: leaf[0], gradients[0])
  update = mapped(mode, transformation, workers)
  state, outputs = None, []
  for gradient in gradients:
    output, state = update(gradient, state, params)
    outputs.append(output)
  residual, owned = state.residual, state.server_residual
  if mode not in ("pmap", "vmap"):
    residual, owned = (
      jax.tree.map(lambda x: _unstack(np.asarray(x), workers), tree)
      for tree in (residual, owned)
    )
  if mode == EXPLICIT:  # in the units of addends
    scale = lambda tree: jax.tree.map(lambda x: x * workers, tree)
    residual = scale(residual)
  return outputs, residual, owned


@functools.lru_cache(maxsize=8)
def mapped(mode, transformation, workers):
  """``update(gradients, state or None, params)`` of all workers, as for :func:`run`.

  Kept, with what it has compiled, for the next call with the same transformation.
  """
  return _MAPS[mode](transformation, workers)


def _unstack(x, workers):
  return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])


def _replicated_map(transform, transformation, workers):
  update = transform(transformation.update, axis_name="data")
  init = transform(transformation.init, axis_name="data")

  def mapped(gradient, state, params):
    if state is None:  # inside the map, for the second stage counts the workers
      state = init(jax.tree.map(lambda leaf: jnp.stack([leaf] * workers), params))
    return update(gradient, state)

  return mapped


def _explicit(transformation, workers):
  devices = mesh(workers, AxisType.Explicit)

  @jax.jit
  def update(gradient, state):
    addends = jax.tree.map(lambda leaf: leaf * (1 / workers), gradient)
    return transformation.update(unreduce(addends, "data"), state)

  def mapped(gradient, state, params):
    with jax.set_mesh(devices):
      state = transformation.init(params) if state is None else state
    gradient = jax.device_put(gradient, NamedSharding(devices, P("data")))
    output, state = update(gradient, state)
    return jax.tree.map(lambda leaf: np.stack([leaf] * workers), output), state

  return mapped


def _sharded_map(check_vma, transformation, workers):
  devices = mesh(workers)

  @jax.jit
  def update(gradient, state):
    specs = gradcomp.state_specs(state, "data")

    def local(gradient, state):
      gradient = jax.tree.map(lambda leaf: leaf[0], gradient)
      output, state = transformation.update(gradient, state)
      return jax.tree.map(lambda leaf: leaf[None], output), state

    # Unchecked, the outputs are cut like the gradients, so that each worker's own copy
    # comes back; checked, P() is accepted only because they are proved equal.
    out = P() if check_vma else P("data")
    return jax.shard_map(
      local,
      mesh=devices,
      in_specs=(P("data"), specs),
      out_specs=(out, specs),
      check_vma=check_vma,
    )(gradient, state)

  def mapped(gradient, state, params):
    with jax.set_mesh(devices):
      state = transformation.init(params) if state is None else state
    gradient = jax.device_put(gradient, NamedSharding(devices, P("data")))
    output, state = update(gradient, state)
    if check_vma:
      output = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * workers), output)
    return output, state

  return mapped


_MAPS = {
  EXPLICIT: _explicit,
  "shard_map": functools.partial(_sharded_map, True),
  "shard_map_unchecked": functools.partial(_sharded_map, False),
  "pmap": functools.partial(_replicated_map, jax.pmap),
  "vmap": functools.partial(
    _replicated_map, lambda f, axis_name: jax.jit(jax.vmap(f, axis_name=axis_name))
  ),
}
