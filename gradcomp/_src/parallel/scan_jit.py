"""``scan`` in plain ``jax.jit`` under Explicit axes: a map over the workers' parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size, manual_axes
from gradcomp._src.mesh.closures import OF_BODY, arrays_of, with_note
from gradcomp._src.mesh.specs import entries, restrict_spec, sharded_axes
from gradcomp._src.mesh.types import is_explicit, mark_varying, mesh_of, typed_spec
from gradcomp._src.parallel.scan_backward import Given


def in_plain_jit(given: Any, axis_name: AxisName) -> bool:
  """Returns True for Explicit axes of the mesh of arrays that no map has bound."""
  return bound_size(axis_name) is None and is_explicit(mesh_of(given), axis_name)


def on_parts(
  function: Callable[..., Any], given: Any, axis_name: AxisName, out_specs: Any
) -> Any:
  """Calls ``function(*given)`` on each worker's parts, which types say.

  ``given`` are trees of arrays and of others; the arrays of functions among them must
  be leaves, too.
  """
  arrays, with_arrays = arrays_of(given)
  names = axis_names(axis_name)
  specs = tuple(restrict_spec(typed_spec(x), names) for x in arrays)
  return jax.shard_map(
    lambda *own: function(*with_arrays(own)),
    mesh=None if manual_axes() else mesh_of(arrays),
    in_specs=specs,
    out_specs=out_specs,
    axis_names=set(names),
  )(*arrays)


def scan_parts(
  scan: Callable[..., tuple[Any, Any]],
  body: Callable[..., Any],
  carry: Any,
  given: Given,
  axis_name: AxisName,
) -> tuple[Any, Any]:
  """Calls ``scan(body, carry, given)`` on each worker's part of the carry.

  Returns the carry, and the outputs of all workers, joined on their second axes.
  """
  _check_parts(carry, axis_name)
  check_whole(given.layers)
  names = axis_names(axis_name)
  mesh = mesh_of((carry, given))

  def own(body: Callable[..., Any], carry: Any, given: Given) -> tuple[Any, Any]:
    carry, ys = scan(with_note(body, OF_BODY, mesh, names), carry, given)
    return carry, mark_varying(jax.tree.map(_with_rows, ys), axis_name)

  specs = jax.tree.map(lambda x: restrict_spec(typed_spec(x), names), carry)
  out = specs, PartitionSpec(None, axis_name)
  return on_parts(own, (body, carry, given), axis_name, out)


def check_whole(layers: Any) -> None:
  """Raises ValueError unless each device has all layers, and no addends of them."""
  for x in jax.tree.leaves(layers):
    spec = typed_spec(x)
    if any(entries(spec)) or spec.reduced or spec.unreduced:
      raise ValueError(
        "`layers` must be typed as whole on each device in plain jax.jit, got "
        f"{jax.typeof(x).str_short(True)}; give it layers without "
        "gradcomp.defer_reduction, or call it, or scan_shards for shards over the "
        "workers, in a jax.shard_map over all axes of the mesh."
      )


def _check_parts(carry: Any, axis_name: AxisName) -> None:
  """Raises ValueError if all workers would compute the same."""
  specs = map(typed_spec, jax.tree.leaves(carry))
  found = frozenset[str]().union(*map(sharded_axes, specs))
  if not found.issuperset(axis_names(axis_name)):
    raise ValueError(
      f"`carry` must have an array that is sharded over {axis_name!r}, or every worker "
      f"would compute the same, got {jax.tree.map(jax.typeof, carry)}; put the batch "
      "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )


def _with_rows(y: jax.Array) -> jax.Array:
  """Returns an output of layers, ``[L, rows, ...]``; ValueError if it has no rows."""
  if jnp.ndim(y) > 1:
    return y
  raise ValueError(
    "`body` must return outputs y with a first axis in plain jax.jit, where those of "
    f"all workers are joined, got {jax.typeof(y[0]).str_short()}; return y[None]."
  )
