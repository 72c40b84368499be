"""``trace_wire``: the bytes of a function's collectives, before it runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.checks import static_integer
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.report import reader
from gradcomp._src.report.collectives import by_link
from gradcomp._src.report.wire_report import WireReport

_AXES_RULE = "the axes of the workers with their sizes, like {'model': 4}"
_SIZE_RULE = "sizes of axes, 1 or more"


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
  with shapes, as a ``jax.shard_map`` over the axes would trace them. Bytes are counted
  as :func:`gradcomp.wire_report` counts them in a compiled program. Trips of loops
  count, but for those of ``while``. For an optimizer, see :func:`gradcomp.explain`.

  Args:
    function: a function of the arrays that one worker has: a call of one collective, a
      layer, or a whole loss.
    *args: these arrays, or their ``jax.ShapeDtypeStruct``, or trees of them.
    workers: the axes that the function uses, with the number of workers along each.

  Returns:
    A :class:`Directions`, with a :class:`gradcomp.wire.WireReport` for each pass.

  Raises:
    ValueError: ``workers`` is empty, or has a size below 1.
    TypeError: ``workers`` is no mapping.

  Example:
    >>> options = {"codec": gradcomp.codecs.EightBit(), "backward": None, "axis": 1}
    >>> gather = lambda x: gradcomp.parallel.all_gather(x, axis_name="model", **options)
    >>> x = jax.ShapeDtypeStruct((128, 2304), jnp.float32)
    >>> found = trace_wire(gather, x, workers={"model": 4})
    >>> found.forward.bytes_sent, found.backward.bytes_sent  # 8 and 32 bits
    (887808, 3538944)
    >>> [x.kind for x in found.forward.collectives + found.backward.collectives]
    ['all-gather', 'all-to-all']
  """
  if not isinstance(workers, Mapping):
    raise TypeError(f"`workers` must be {_AXES_RULE}, got {workers!r}.")
  sizes = [static_integer("workers", _SIZE_RULE, x) for x in workers.values()]
  if not sizes or min(sizes) < 1:
    raise ValueError(f"`workers` must be {_AXES_RULE}, got {dict(workers)}.")
  names, bound = tuple(workers), dict(zip(workers, sizes, strict=True))

  def forward(*args: Any) -> list[jax.Array]:
    # The floats of the result, which have cotangents.
    leaves = jax.tree.leaves(function(*args))
    return [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

  def backward(*args: Any) -> Any:
    result, pull = jax.vjp(forward, *args)
    return pull(result)  # a cotangent of the right types

  def traced(function: Callable[..., Any]) -> tuple[Any, ...]:
    def local(*args: Any) -> jax.Array:
      function(*mark_varying(args, names))
      return jnp.zeros([])

    found = reader.events(reader.traced(local, bound, *args))
    return tuple(reader.collective_of(x, bound) for x in found)

  there, both = traced(forward), traced(backward)
  report = lambda found: WireReport(by_link(found), axes=names)
  # JAX computes a function before its gradient, which may send some of it once more.
  return Directions(report(there), report(both[len(there) :]))
