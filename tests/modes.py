"""N workers in every place where a transformation runs: the same call, four maps."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp

MODES = ("shard_map", "shard_map_unchecked", "pmap", "vmap")


def mesh(workers):
  devices = jax.devices()[:workers]
  return jax.make_mesh((workers,), ("data",), (AxisType.Auto,), devices=devices)


def run(mode, transformation, gradients):
  """Feeds ``gradients`` to ``update``, step by step.

  Args:
    mode: one of ``MODES``.
    transformation: over the axis "data".
    gradients: a list of trees with leaves ``[N, ...]``, one tree a step.

  Returns:
    The list of outputs, leaves ``[N, ...]``, and the residuals, leaves ``[N, ...]`` or
    None: what each worker holds.
  """
  workers = jax.tree.leaves(gradients[0])[0].shape[0]
  params = jax.tree.map(lambda leaf: leaf[0], gradients[0])
  mapped = _MAPS[mode](transformation, workers)
  state, outputs = None, []
  for gradient in gradients:
    output, state = mapped(gradient, state, params)
    outputs.append(output)
  return outputs, _residual(mode, state, params, workers)


def _residual(mode, state, params, workers):
  if state.residual is None or mode in ("pmap", "vmap"):
    return state.residual
  return jax.tree.map(
    lambda leaf, like: leaf.reshape(workers, *(like.shape or (1,))),
    state.residual,
    params,
  )


def _replicated_map(transform, transformation, workers):
  @functools.partial(transform, axis_name="data")
  def update(gradient, state):
    return transformation.update(gradient, state)

  def mapped(gradient, state, params):
    if state is None:
      state = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * workers), transformation.init(params)
      )
    return update(gradient, state)

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
  "shard_map": functools.partial(_sharded_map, True),
  "shard_map_unchecked": functools.partial(_sharded_map, False),
  "pmap": functools.partial(_replicated_map, jax.pmap),
  "vmap": functools.partial(
    _replicated_map, lambda f, axis_name: jax.jit(jax.vmap(f, axis_name=axis_name))
  ),
}
