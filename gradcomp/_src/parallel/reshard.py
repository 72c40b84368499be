"""``reshard``: a compressed ``jax.reshard``."""

import functools
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec

from gradcomp._src.codecs.policy import stateless
from gradcomp._src.codecs.protocol import LeafCodec, require_contraction
from gradcomp._src.mesh.axes import (
  AxisName,
  as_axis_name,
  axis_names,
  bound_size,
  require_size,
)
from gradcomp._src.mesh.specs import names_by_axis, sharded_axes, spec_of
from gradcomp._src.mesh.types import mesh_of, typed_spec
from gradcomp._src.parallel import transfer
from gradcomp._src.parallel.options import checked_floats, checked_key, transposed


@overload
def reshard(
  x: jax.Array,
  spec: PartitionSpec | None = None,
  *,
  axis_name: AxisName | None = None,
  codec: LeafCodec,
  key: jax.Array | None = None,
  residual: None = None,
  source: PartitionSpec | None = None,
) -> jax.Array: ...


@overload
def reshard(
  x: jax.Array,
  spec: PartitionSpec | None = None,
  *,
  axis_name: AxisName | None = None,
  codec: LeafCodec,
  key: jax.Array | None = None,
  residual: jax.Array,
  source: PartitionSpec | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def reshard(  # noqa: PLR0912, PLR0913 - checks and options of users, by keyword
  x: jax.Array,
  spec: PartitionSpec | None = None,
  *,
  axis_name: AxisName | None = None,
  codec: LeafCodec,
  key: jax.Array | None = None,
  residual: jax.Array | None = None,
  source: PartitionSpec | None = None,
) -> Any:
  """Changes the sharding of an array over some axes, compressed.

  ==========  ============================  ====================
  from        to                            by
  ==========  ============================  ====================
  addends     replicated, ``P()``           :func:`psum`
  addends     sharded, ``P("data")``        :func:`psum_scatter`
  sharded     replicated, perhaps reduced   :func:`all_gather`
  ==========  ============================  ====================

  In plain ``jax.jit`` under Explicit axes, ``x`` has its sharding in its type. Inside a
  map, ``x`` is one worker's array, and ``source`` its sharding. A replicated result has
  the same bits on all workers.

  Args:
    x: an array of floats.
    spec: the sharding of the result.
    axis_name: in its place, an axis over which ``x`` is unreduced or sharded, or a
      tuple of axes. The result is replicated over them.
    codec, key: as for :func:`all_gather`.
    residual: the unsent part of earlier calls, ``float32``, zeros at first. It is
      sent with ``x``. Each worker has one in the shape of its own part of ``x``, and of
      at least one axis. For addends under Explicit axes these lie side by side on the
      first axis, ``[N * d0, ...]`` with the spec ``P("data")``.
    source: inside a map, the spec of ``x``; by default ``x`` is an addend over the
      axis, or over the axes of the spec.

  Returns:
    The array; with a residual, ``(array, new residual)``.

  Raises:
    ValueError: as :func:`all_gather`; ``spec`` and ``axis_name`` are both given, or
      neither; or another change than these, of one array axis, would be needed.
    TypeError: as :func:`all_gather`; or ``spec`` is no spec.

  Example:
    >>> codec = gradcomp.codecs.Dense()
    >>> total = lambda x: gradcomp.parallel.reshard(x, axis_name="data", codec=codec)
    >>> x = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    >>> jax.jit(jax.vmap(total, axis_name="data"))(x)
    Array([[31., 42.],
           [31., 42.]], dtype=float32)
  """
  codec = stateless("codec", codec)
  if residual is not None:
    require_contraction("codec", codec, "`residual=None`")
  key = checked_key(key, codec)
  x = checked_floats(x)
  if (spec is None) == (axis_name is None):
    raise ValueError(
      "`spec` or `axis_name` must be given, and not both, got "
      f"spec={spec} and axis_name={axis_name!r}."
    )
  if spec is None:
    assert axis_name is not None
    named = set(axis_names(axis_name))
  elif isinstance(spec, PartitionSpec):
    named = set(sharded_axes(spec))
  else:
    raise TypeError(
      f"`spec` must be a jax.P, got {spec!r}; pass the name of an axis by axis_name=."
    )
  if source is not None:
    named |= {*sharded_axes(source), *source.unreduced}
  outside = not any(bound_size(name) for name in named)
  if outside:
    given = typed_spec(x)
  elif source is not None:
    given = source
  else:
    given = PartitionSpec(unreduced=named)
  target = spec
  if target is None:
    cut = names_by_axis(given, x.ndim)
    target = spec_of([[name for name in names if name not in named] for names in cut])
  move = _move(given, target, x.ndim)
  if outside:
    mesh = mesh_of(x)
    transfer.check_explicit(mesh)
    path = transfer.Path(move, codec, given, target, mesh)
    if residual is None:
      back = lambda cotangent, key: (path.pull(cotangent, key), None)
      return transposed(path.run, back, x, key)
    return transfer.undifferentiated(path.with_residual, x, residual, key)
  require_size(move.axis_name)
  if residual is None:
    return transfer.transfer(x, move, codec, key)
  with_residual = functools.partial(transfer.moved_with_residual, move, codec)
  return transfer.undifferentiated(with_residual, x, residual, key)


def _move(source: PartitionSpec, target: PartitionSpec, ndim: int) -> transfer.Transfer:
  """Returns the collective from one spec to another; ValueError if there is none."""
  before, after = names_by_axis(source, ndim), names_by_axis(target, ndim)
  changed = [i for i in range(len(after)) if before[i : i + 1] != after[i : i + 1]]
  addends = frozenset(source.unreduced)
  if addends and not target.unreduced:
    if not changed:
      return transfer.Transfer("sum", as_axis_name(tuple(sorted(addends))))
    (axis, *more) = changed
    if not more and not before[axis] and set(after[axis]) == addends:
      return transfer.Transfer("scatter", as_axis_name(after[axis]), axis)
  elif len(changed) == 1 and not addends and not after[changed[0]]:
    return transfer.Transfer("gather", as_axis_name(before[changed[0]]), changed[0])
  raise ValueError(
    "`spec` must lead from addends to their sum, replicated or sharded along one "
    "array axis over the same mesh axes, or from shards to the whole of one array "
    f"axis, got {target} for an array of {source}; jax.reshard does what needs neither."
  )
