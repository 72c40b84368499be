"""The law of states: a step returns the state structure that the next one takes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp._src.checkpoint.shapes import state_shapes
from gradcomp._src.checkpoint.specs import state_specs
from gradcomp._src.testing.broken import BrokenLaw, described
from gradcomp._src.testing.leaves import Gradients, zipped


def state_is_stable(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  *,
  axis_name: str = "data",
) -> None:
  """A step returns a state like its own, with which ``lax.scan`` runs all steps.

  Structure, shapes and dtypes are compared first. Then the steps are traced in a scan
  inside a checked ``jax.shard_map``, which types arrays as varying, and run in a scan
  inside ``jax.vmap``.

  Args:
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, one tree a step.
    axis_name: the name of the axis.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.onebit_sgd(axis_name="data")
    >>> laws.state_is_stable(tx, [{"w": jnp.ones((2, 600))}])
  """

  def step(gradient: Any) -> tuple[Any, Any]:
    state = transformation.init(gradient)
    return state, transformation.update(gradient, state, gradient)[1]

  mapped = jax.vmap(step, axis_name=axis_name)
  before, after = jax.eval_shape(mapped, gradients[0])
  told = None
  structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
  if structures[0] != structures[1]:
    told = f"{structures[0]} becomes {structures[1]}"
  else:
    for path, old, new in zipped(before, after):
      if (old.shape, old.dtype, old.weak_type) != (new.shape, new.dtype, new.weak_type):
        weak = " (weak)" if old.weak_type != new.weak_type else ""
        told = f"{path}, [worker, ...], {described(old)} becomes {described(new)}{weak}"
        break
  if told:
    raise _unstable(told)
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
  _scan_types(transformation, stacked, axis_name)
  _scan(transformation, stacked, axis_name)


def _unstable(told: str) -> BrokenLaw:
  return BrokenLaw(
    "state_is_stable",
    "the transformation",
    "return a state of the structure and the types that it was given",
    told,
    "what `update` puts into the state",
  )


def _scanned(
  transformation: optax.GradientTransformation,
  state: Any,
  gradients: Any,
  params: Any,
) -> Any:
  """Returns the state after all steps of one worker, ``[steps, ...]``."""

  def step(state: Any, gradient: Any) -> tuple[Any, None]:
    return transformation.update(gradient, state, params)[1], None

  return lax.scan(step, state, gradients)[0]


def _scan_types(
  transformation: optax.GradientTransformation, stacked: Any, axis_name: str
) -> None:
  """Traces a scan inside a checked map, over an abstract mesh."""
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), stacked)
  workers = jax.tree.leaves(stacked)[0].shape[1]
  mesh = AbstractMesh((workers,), (axis_name,), (AxisType.Auto,))
  state = state_shapes(transformation, params, workers=workers, axis_name=axis_name)
  specs = state_specs(state, axis_name=axis_name)

  def local(state: Any, gradients: Any, params: Any) -> Any:
    own = jax.tree.map(lambda x: x[:, 0], gradients)
    return _scanned(transformation, state, own, params)

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs, P(None, axis_name), P()),
    out_specs=specs,
    check_vma=True,
  )
  try:
    jax.eval_shape(mapped, state, stacked, params)
  except TypeError as error:  # of lax.scan, for the update itself has been traced
    told = " ".join(str(error).split()).partition(". ")[0]
    raise _unstable(told) from error


def _scan(
  transformation: optax.GradientTransformation, stacked: Any, axis_name: str
) -> None:
  """Runs a scan over emulated workers."""

  def local(gradients: Any) -> Any:
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), gradients)
    return _scanned(transformation, transformation.init(params), gradients, params)

  mapped = jax.vmap(local, in_axes=1, axis_name=axis_name)
  jax.block_until_ready(jax.jit(mapped)(stacked))
