"""Resharding of arrays on an Explicit mesh, outside a map."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.mesh.axes import axis_names
from gradcomp._src.mesh.specs import entries, reduced_spec, stack_spec
from gradcomp._src.parallel.options import folded
from gradcomp._src.parallel.reshard_inside import (
  Transfer,
  moved_with_residual,
  transfer,
)


@dataclasses.dataclass(frozen=True)
class Path:
  """A change from one sharding to another, on a mesh with Explicit axes."""

  move: Transfer
  codec: Codec
  source: PartitionSpec
  target: PartitionSpec
  mesh: AbstractMesh

  def run(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the array in the target sharding."""
    result = self._mapped(
      lambda x, key: transfer(x, self.move, self.codec, key),
      (self.source, PartitionSpec()),
      reduced_spec(self.target),
    )(x, key)
    return self._typed(result)

  def with_residual(
    self, x: jax.Array, residual: jax.Array, key: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the array in the target sharding, and the new residual."""
    kept = reduced_spec(self.source)
    if self.move.kind != "gather":
      kept = stack_spec(self.move.axis_name, kept)
    result, residual = self._mapped(
      functools.partial(moved_with_residual, self.move, self.codec),
      (self.source, kept, PartitionSpec()),
      (reduced_spec(self.target), kept),
    )(x, residual, key)
    return self._typed(result), residual

  def pull(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the cotangent of the argument from the cotangent of the result.

    An unreduced array has a ``reduced`` cotangent, and a ``reduced`` one an unreduced
    cotangent.
    """
    names = axis_names(self.move.axis_name)
    if self.move.kind == "sum":
      return self._cast(cotangent, _reduced(self.target, names))
    if self.move.kind == "gather" and not self.target.reduced:
      return self._cast(cotangent, self.source)
    if self.move.kind == "gather":
      back = self.move._replace(kind="scatter")
      addends = PartitionSpec(*entries(self.target), unreduced=set(names))
      path = dataclasses.replace(self, move=back, source=addends, target=self.source)
    else:
      back = self.move._replace(kind="gather")
      whole = _reduced(self.source, names)
      path = dataclasses.replace(self, move=back, source=self.target, target=whole)
    return path.run(cotangent, folded(key, 1))

  def _mapped(self, function: Callable[..., Any], given: Any, result: Any) -> Any:
    # If types are checked, JAX lets only its own sums take addends.
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False
    )

  def _typed(self, x: jax.Array) -> jax.Array:
    return self._cast(x, self.target) if self.target.reduced else x

  def _cast(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.reshard(x, NamedSharding(self.mesh, spec))


def _reduced(spec: PartitionSpec, names: tuple[str, ...]) -> PartitionSpec:
  return PartitionSpec(*entries(spec), reduced=set(names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def along(path: Path, x: jax.Array, key: jax.Array | None) -> jax.Array:
  """Returns the array in the target sharding; its gradient goes the way back."""
  return path.run(x, key)


def _along_forward(
  path: Path, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return path.run(x, key), key


def _along_backward(
  path: Path, key: jax.Array | None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
  return path.pull(cotangent, key), None


along.defvjp(_along_forward, _along_backward)


def check_explicit(mesh: AbstractMesh) -> None:
  """Raises ValueError unless there is a mesh, with Explicit axes only."""
  if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
    raise ValueError(
      "`x` must be inside a map that binds the axes, or lie on a mesh whose axes are "
      f"all Explicit, got {mesh.axis_names} of {mesh.axis_types}; call this inside "
      "jax.shard_map."
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def undifferentiated(
  function: Callable[..., Any], x: jax.Array, residual: jax.Array, key: Any
) -> Any:
  """Calls ``function(x, residual, key)``; ValueError if it is differentiated."""
  return function(x, residual, key)


def _refuse(function: Any, x: jax.Array, residual: jax.Array, key: Any) -> Any:
  raise ValueError(
    "`residual` must be None where the result is differentiated, because a residual "
    f"corrects what is sent after the gradient, got one of the shape {residual.shape}."
  )


undifferentiated.defvjp(_refuse, lambda *args: args)
