"""``reshard``: a compressed ``jax.reshard``, in a map or on an Explicit mesh."""

from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.codecs import policy, protocol
from gradcomp._src.floats import dtypes
from gradcomp._src.mesh import axes, types
from gradcomp._src.parallel import collectives, wires


class _Given(TypedDict, total=False):
  axis_name: axes.AxisName | None
  codec: Required[protocol.LeafCodec]
  key: wires.Key
  source: P | None


@overload
def reshard(
  x: jax.Array, spec: P | None = None, *, residual: None = None, **given: Unpack[_Given]
) -> jax.Array: ...


@overload
def reshard(
  x: jax.Array, spec: P | None = None, *, residual: jax.Array, **given: Unpack[_Given]
) -> tuple[jax.Array, jax.Array]: ...


def reshard(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  spec: P | None = None,
  *,
  axis_name: axes.AxisName | None = None,
  codec: protocol.LeafCodec,
  key: wires.Key = None,
  residual: jax.Array | None = None,
  source: P | None = None,
) -> Any:
  """Returns an array with another sharding over some axes, sent in few bits.

  ==========  ============================  ====================
  from        to                            by
  ==========  ============================  ====================
  addends     replicated, ``P()``           :func:`psum`
  addends     sharded, ``P("data")``        :func:`psum_scatter`
  sharded     replicated, perhaps reduced   :func:`all_gather`
  ==========  ============================  ====================

  In plain ``jax.jit`` under Explicit axes, ``x`` has its sharding in its type. Inside a
  map, ``x`` is one worker's array, and ``source`` its sharding. A replicated result has
  the same bits on all workers. With a residual it returns ``(array, new residual)``.

  Args:
    x: an array of floats.
    spec: the sharding of the result.
    axis_name: in its place, an axis over which ``x`` is unreduced or sharded, or a
      tuple of axes. The result is replicated over them.
    codec, key: as for :func:`all_gather`.
    residual: the unsent part of earlier calls, ``float32``, zeros at first, sent with
      ``x``: of the shape of a worker's part of ``x``, with at least one axis. Of
      addends under Explicit axes: ``[N * d0, ...]``, with the spec ``P("data")``.
    source: inside a map, the spec of ``x``; by default ``x`` is an addend over the
      axis, or over the axes of the spec.

  Raises:
    ValueError: as :func:`all_gather`; or it would need another change than these.
    TypeError: as :func:`all_gather`; or ``spec`` is no spec.

  Example:
    >>> codec = gradcomp.codecs.Dense()
    >>> total = lambda x: gradcomp.parallel.reshard(x, axis_name="data", codec=codec)
    >>> x = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    >>> jax.jit(jax.vmap(total, axis_name="data"))(x).tolist()
    [[31.0, 42.0], [31.0, 42.0]]
  """
  codec = policy.stateless("codec", codec)
  if residual is not None:
    protocol.require_contraction("codec", codec, "`residual=None`")
  key = wires.checked_key(key, codec)
  x = wires.checked_floats(x)
  if (spec is None) == (axis_name is None):
    raise ValueError(
      "`spec` or `axis_name` must be given, and not both, got "
      f"spec={spec} and axis_name={axis_name!r}."
    )
  if axis_name is not None:
    named = set(axes.axis_names(axis_name))
  elif isinstance(spec, P):
    named = set(axes.axes_in(spec))
  else:
    raise TypeError(
      f"`spec` must be a jax.P, got {spec!r}; pass the name of an axis by axis_name=."
    )
  if source is not None:
    named |= {*axes.axes_in(source), *source.unreduced}
  outside = not any(axes.bound_size(name) for name in named)
  given = P(unreduced=named) if source is None else source
  given = types.typed_spec(x) if outside else given
  mesh = jax.typeof(x).sharding.mesh
  if spec is None:
    cut = axes.names_by_axis(given, x.ndim)
    spec = axes.spec_of([[x for x in names if x not in named] for names in cut])
  move = _move(given, spec, x.ndim, codec)
  if not outside:
    axes.require_size(move.axis_name)
  elif mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
    raise ValueError(
      "`x` must be inside a map that binds the axes, or lie on a mesh whose axes are "
      f"all Explicit, got {mesh.axis_names} of {mesh.axis_types}; call this inside "
      "jax.shard_map."
    )
  else:
    move = move._replace(mesh=mesh)
  if residual is not None:

    def refuse(*_: Any) -> Any:
      raise ValueError(
        "`residual` must be None where the result is differentiated, because it "
        f"corrects later calls, after the gradient, got one of the shape {shape}."
      )

    shape, refused = residual.shape, jax.custom_vjp(move.run)
    refused.defvjp(refuse, refuse)
    return refused(x, key, residual)
  if not outside:
    return move.run(x, key)[0]
  back = lambda key, cotangent: (move.pull(cotangent, key), None)
  return wires.transposed(lambda x, key: (move.run(x, key)[0], key), back, x, key)


class _Move(NamedTuple):
  """A collective over some axes: ``sum`` to all, ``scatter`` sums, or ``gather``."""

  kind: Literal["sum", "scatter", "gather"]
  axis_name: axes.AxisName
  axis: int  # of the array, that is, or will be, sharded
  codec: protocol.Codec
  source: P
  target: P
  mesh: AbstractMesh | None = None  # with Explicit axes; None inside a map

  def run(self, x: jax.Array, key: wires.Key, residual: Any = None) -> Any:
    """Returns the array in the target sharding, and the new residual."""
    if self.mesh is None:
      return self._send(x, key, residual)
    kept, result = (P(*axes.entries(x)) for x in (self.source, self.target))
    if self.kind != "gather":
      kept = axes.stack_spec(self.axis_name, kept)
    # If types are checked, JAX lets only its own sums take addends.
    mapped = jax.shard_map(
      self._send,
      mesh=self.mesh,
      in_specs=(self.source, P(), kept),
      out_specs=(result, kept),
      check_vma=False,
    )
    x, residual = mapped(x, key, residual)
    return self._cast(x, self.target) if self.target.reduced else x, residual

  def pull(self, cotangent: jax.Array, key: wires.Key) -> jax.Array:
    """Returns the cotangent of the argument; of addends it is ``reduced``."""
    names = set(axes.axis_names(self.axis_name))
    reduced = lambda spec: P(*axes.entries(spec), reduced=names)
    if self.kind == "sum":
      return self._cast(cotangent, reduced(self.target))
    if self.kind == "gather" and not self.target.reduced:
      return self._cast(cotangent, self.source)
    if self.kind == "gather":
      source = P(*axes.entries(self.target), unreduced=names)
      back = self._replace(kind="scatter", source=source, target=self.source)
    else:
      target = reduced(self.source)
      back = self._replace(kind="gather", source=self.target, target=target)
    return back.run(cotangent, wires.folded(key, 1))[0]

  def _cast(self, x: jax.Array, spec: P) -> jax.Array:
    assert self.mesh is not None
    return jax.reshard(x, NamedSharding(self.mesh, spec))

  def _send(self, x: jax.Array, key: wires.Key, residual: Any = None) -> Any:
    """Sends a worker's array and residual; returns the result and the new residual."""
    given: Any = {"axis_name": self.axis_name, "codec": self.codec, "key": key}
    if residual is None and self.kind == "sum":
      return collectives.psum(x, **given), None
    given["own"] = "exact" if self.kind == "scatter" else "coded"
    if residual is None and self.kind == "scatter":
      return collectives.psum_scatter(x, axis=self.axis, **given), None
    if residual is None:
      return collectives.all_gather(x, axis=self.axis, to="invarying", **given), None
    if jnp.iscomplexobj(x):
      raise TypeError(f"`x` must be real where `residual` is given, got {x.dtype}.")
    wire, key = wires.wire(**given)
    x, residual = types.mark_varying((x, residual), self.axis_name)
    if self.kind == "scatter":
      old = residual.reshape(x.shape)
      result, new = wires.reduce_parts(x, old, wire, key, self.axis)
      return result, new.reshape(residual.shape)
    old = residual.astype(jnp.float32)
    corrected = x.astype(jnp.float32) + old.reshape(x.shape)
    if self.kind == "sum":
      total, parts, own = collectives.total_by_owners(corrected, wire, key)
      result, rest = dtypes.narrowed(total, x.dtype)
      unsent = wires.loss_of(parts, wire, key)
      again = wires.loss_of(own[None], wire, collectives.owner_key(wire, key))[0]
      # The owner sends the error of its sum in the next step, like its own.
      unsent = unsent + jnp.where(wires.mine(wire, unsent), again, 0.0)
      unsent = unsent.reshape(-1)[: x.size].reshape(x.shape) + rest / wire.size
    else:
      lines = wires.gather_lines(corrected, wire, key)
      shards, rest = dtypes.narrowed(wires.gathered(lines, wire, corrected), x.dtype)
      result = wires.concat(shards, self.axis)
      unsent = wires.loss_of(corrected[None], wire, key)[0]
      unsent = unsent + rest[lax.axis_index(self.axis_name)]
    unsent = unsent.reshape(old.shape)
    return result, jnp.where(jnp.isfinite(unsent), unsent, old).astype(residual.dtype)


def _move(source: P, target: P, ndim: int, codec: protocol.Codec) -> _Move:
  """Returns the collective from one spec to another; ValueError if there is none."""
  before, after = (axes.names_by_axis(spec, ndim) for spec in (source, target))
  changed = [i for i in range(len(after)) if before[i : i + 1] != after[i : i + 1]]
  addends, of = frozenset(source.unreduced), (codec, source, target)
  if addends and not target.unreduced:
    if not changed:
      return _Move("sum", axes.as_axis_name(tuple(sorted(addends))), 0, *of)
    (axis, *more) = changed
    if not more and not before[axis] and set(after[axis]) == addends:
      return _Move("scatter", axes.as_axis_name(after[axis]), axis, *of)
  elif len(changed) == 1 and not addends and not after[changed[0]]:
    return _Move("gather", axes.as_axis_name(before[changed[0]]), changed[0], *of)
  raise ValueError(
    "`spec` must lead from addends to their sum, replicated or sharded along one "
    "array axis over the same mesh axes, or from shards to the whole of one array "
    f"axis, got {target} for an array of {source}; use jax.reshard for other changes."
  )
