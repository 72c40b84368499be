"""Maps around a scan: one over workers in plain ``jax.jit``, and ``jax.vmap``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gradcomp._src.mesh import axes, closures, specs, types
from gradcomp._src.mesh.axes import AxisName


def of_parts(
  scan: Callable[..., tuple[Any, Any]],
  body: Any,
  carry: Any,
  given: Any,
  axis_name: Any,
) -> tuple[Any, Any]:
  """Maps ``scan(body, carry, given)`` over workers; ``ys`` are [L, all rows, ...].

  The arrays of functions among these trees must be leaves, too.
  """
  names = axes.axis_names(axis_name)
  found = map(types.typed_spec, jax.tree.leaves(carry))
  if not frozenset[str]().union(*map(specs.sharded_axes, found)).issuperset(names):
    raise ValueError(
      f"`carry` must have an array that is sharded over {axis_name!r}, or every worker "
      f"would compute the same, got {jax.tree.map(jax.typeof, carry)}; put the batch "
      "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )
  for x in jax.tree.leaves(given.layers):
    spec = types.typed_spec(x)
    if any(specs.entries(spec)) or spec.reduced or spec.unreduced:
      raise ValueError(
        "`layers` must be typed as whole on each device in plain jax.jit, got "
        f"{jax.typeof(x).str_short(True)}; give it layers without "
        "gradcomp.defer_reduction, or call it, for shards over the workers with axis=, "
        "in a jax.shard_map over all axes of the mesh."
      )
  arrays, with_arrays = closures.arrays_of((body, carry, given))
  mesh = types.mesh_of(arrays)
  own_spec = lambda x: specs.restrict_spec(types.typed_spec(x), names)

  def own(*own: jax.Array) -> tuple[Any, Any]:
    body, carry, given = with_arrays(own)
    body = closures.with_note(body, closures.OF_BODY, mesh, names)
    carry, ys = scan(body, carry, given)
    return carry, types.mark_varying(jax.tree.map(_with_rows, ys), axis_name)

  return jax.shard_map(
    own,
    mesh=None if axes.manual_axes() else mesh,
    in_specs=tuple(map(own_spec, arrays)),
    out_specs=(jax.tree.map(own_spec, carry), PartitionSpec(None, axis_name)),
    axis_names=set(names),
  )(*arrays)


def _with_rows(y: jax.Array) -> jax.Array:
  """Returns an output of layers, ``[L, rows, ...]``; ValueError if it has no rows."""
  if jnp.ndim(y) > 1:
    return y
  raise ValueError(
    "`body` must return outputs y with a first axis in plain jax.jit, where those of "
    f"all workers are joined, got {jax.typeof(y[0]).str_short()}; return y[None]."
  )


def not_of_examples(carry: Any, layers: Any, axis_name: AxisName) -> Any:
  """Returns the carry; ValueError under ``jax.vmap`` over it, and not over layers."""
  # The workers may be those of a jax.vmap. Then it numbers them.
  workers = [lax.axis_index(name) for name in axes.axis_names(axis_name)]
  return _checked(carry, layers, workers)


@jax.custom_batching.custom_vmap
def _checked(carry: Any, layers: Any, workers: list[jax.Array]) -> Any:
  return carry


@_checked.def_vmap
def _batched(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
  del size
  of_carry, *others = is_batched
  if any(jax.tree.leaves(of_carry)) and not any(jax.tree.leaves(others)):
    raise ValueError(
      "`scan` must not be inside of jax.vmap over examples, each of which would be "
      "exchanged by itself, and take the residual once more; put jax.vmap inside of "
      "`body`, or map over layers, too, to train several models."
    )
  return _checked(*given), of_carry
