"""``trace_wire``: the bytes of a function's collectives, before it runs."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

from gradcomp._src.checks import static_integer
from gradcomp._src.mesh.axes import abstract_mesh
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.report.wire_report import Collective, WireReport

_AXES_RULE = "the axes of the workers with their sizes, like {'model': 4}"
_SIZE_RULE = "sizes of axes, 1 or more"

# The HLO opcodes of JAX's primitives, whose names in typed maps end in _invariant.
_KINDS = {
  "all_gather": "all-gather",
  "all_to_all": "all-to-all",
  "pmax": "all-reduce",
  "pmin": "all-reduce",
  "ppermute": "collective-permute",
  "psum": "all-reduce",
  "psum_scatter": "reduce-scatter",
  "reduce_scatter": "reduce-scatter",
}


@dataclasses.dataclass(frozen=True)
class Directions:
  """The result of :func:`trace_wire`; ``str(directions)`` is a table for each pass.

  Attributes:
    forward: the collectives of the function.
    backward: the further collectives of the gradients of all arguments; empty if the
      function has none.
  """

  forward: WireReport
  backward: WireReport

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends in both passes."""
    return self.forward.bytes_sent + self.backward.bytes_sent

  def __str__(self) -> str:
    return f"Forward:\n{self.forward}\nBackward:\n{self.backward}"


def trace_wire(
  function: Callable[..., Any], *args: Any, workers: Mapping[str, int]
) -> Directions:
  """Traces a function of one worker's arrays, and counts its bytes, in both passes.

  Nothing is computed, and no device is needed: the function and its gradient are traced
  with shapes, as a ``jax.shard_map`` over the axes would trace them, and their
  collectives are read, both this library's and JAX's own. Bytes are counted as
  :func:`gradcomp.wire_report` counts them in a compiled program. Trips of loops count,
  but for those of ``while``; every branch of a conditional counts. For an optimizer,
  also :func:`gradcomp.parallel.zero`, see :func:`gradcomp.explain`.

  Args:
    function: a function of the arrays that one worker has, which may differ between
      workers. It can be a call of one collective, a layer, or a whole loss.
    *args: these arrays, or their ``jax.ShapeDtypeStruct``, or trees of them.
    workers: the axes that the function uses, with the number of workers along each.

  Returns:
    A :class:`Directions`, with a :class:`gradcomp.wire.WireReport` for each pass.

  Raises:
    ValueError: ``workers`` is empty, or has a size below 1.
    TypeError: ``workers`` is no mapping.

  Example:
    >>> codec = gradcomp.codecs.EightBit()
    >>> gather = lambda x: gradcomp.parallel.all_gather(
    ...   x, axis_name="model", codec=codec, backward=None, axis=1)
    >>> x = jax.ShapeDtypeStruct((128, 2304), jnp.float32)
    >>> found = trace_wire(gather, x, workers={"model": 4})
    >>> found.forward.bytes_sent, found.backward.bytes_sent  # 8 and 32 bits
    (886464, 3538944)
    >>> [x.kind for x in found.forward.collectives + found.backward.collectives]
    ['all-gather', 'all-to-all']
  """
  mesh = abstract_mesh(_checked(workers), argument="workers")
  names = tuple(workers)

  def forward(*args: Any) -> list[jax.Array]:
    """Returns the floats of the result, which have cotangents."""
    leaves = jax.tree.leaves(function(*args))
    return [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

  def backward(*args: Any) -> Any:
    result, pull = jax.vjp(forward, *args)
    return pull(result)  # a cotangent of the right types

  def traced(function: Callable[..., Any]) -> tuple[Collective, ...]:
    def local(*args: Any) -> jax.Array:
      function(*mark_varying(args, names))
      return jnp.zeros([])

    spec = PartitionSpec()
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
      mapped = jax.shard_map(local, in_specs=spec, out_specs=spec)
      trace = jax.make_jaxpr(mapped)(*args)
    return tuple(_collectives(trace.jaxpr, workers, "", 1))

  there = traced(forward)
  both = traced(backward)
  # JAX computes a function before its gradient, which may send some of it once more.
  return Directions(WireReport(there), WireReport(both[len(there) :]))


def _checked(workers: Any) -> dict[str, int]:
  """Returns the sizes of the axes by name."""
  if not isinstance(workers, Mapping):
    raise TypeError(f"`workers` must be {_AXES_RULE}, got {workers!r}.")
  sizes = tuple(
    static_integer("workers", _SIZE_RULE, size) for size in workers.values()
  )
  if not sizes or min(sizes) < 1:
    raise ValueError(f"`workers` must be {_AXES_RULE}, got {dict(workers)}.")
  return dict(zip(workers, sizes, strict=True))


def _collectives(
  jaxpr: Jaxpr, axes: Mapping[str, int], scope: str, times: int, **inside: bool
) -> Iterator[Collective]:
  """Yields the collectives of a function, and of those that it calls, in their order.

  ``scope`` are the names of the scopes around it, and ``times`` the number of its runs.
  ``inside`` are ``in_loop``, for an unknown number of trips, and ``in_branch``.
  """
  for equation in jaxpr.eqns:
    name = equation.primitive.name.removesuffix("_invariant")
    own = f"{scope}/{equation.source_info.name_stack}".strip("/")
    if name in _KINDS:
      yield _collective(equation, _KINDS[name], axes, own, times, inside)
      continue
    there = inside | {x: True for x in _where(name)}
    again = times * equation.params.get("length", 1) if name == "scan" else times
    for part in jax.tree.leaves(tuple(equation.params.values())):
      part = part.jaxpr if isinstance(part, ClosedJaxpr) else part
      if isinstance(part, Jaxpr):
        yield from _collectives(part, axes, own, again, **there)


def _where(name: str) -> tuple[str, ...]:
  """Returns the flags of the functions inside a primitive."""
  return {"while": ("in_loop",), "cond": ("in_branch",)}.get(name, ())


def _collective(
  equation: JaxprEqn,
  kind: str,
  axes: Mapping[str, int],
  scope: str,
  times: int,
  inside: Mapping[str, bool],
) -> Collective:
  params = equation.params
  names = params.get("axis_name", params.get("axes"))
  names = names if isinstance(names, tuple) else (names,)
  groups = params.get("axis_index_groups")
  workers = len(groups[0]) if groups else math.prod(axes[x] for x in names)
  if all(a == b for a, b in params.get("perm", ((0, 1),))):
    workers = 1  # each sends to itself
  return Collective(
    kind=kind,
    operands=tuple(_operand(x.aval) for x in equation.invars),
    workers=workers,
    times=times,
    in_loop=inside.get("in_loop", False),
    in_branch=inside.get("in_branch", False),
    scope=scope,
    axis=",".join(names) if workers > 1 else "",
  )


def _operand(x: Any) -> tuple[str, tuple[int, ...]]:
  return _spelled(x.dtype), x.shape


def _spelled(dtype: Any) -> str:
  """Returns a dtype in HLO's spelling.

  Example:
    >>> [_spelled(jnp.dtype(x)) for x in ("uint32", "bfloat16", "bool", "int8")]
    ['u32', 'bf16', 'pred', 's8']
  """
  name = "pred" if dtype == jnp.bool_ else dtype.name
  for long, short in {"uint": "u", "int": "s", "float": "f", "complex": "c"}.items():
    name = name.replace(long, short)
  return name.replace("_", "")
