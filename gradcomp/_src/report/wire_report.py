"""``wire_report``: the collectives and bytes of a program, from its optimized HLO.

A formula of this library could drift from the program; the optimized HLO cannot. Bytes
are dtype times shape of the operands in it, and nothing else.
"""

import collections
import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gradcomp._src.report import hlo
from gradcomp._src.report.collectives import Collective
from gradcomp._src.report.table import aligned


@dataclasses.dataclass(frozen=True)
class WireReport:
  """The collectives of a program; ``str(report)`` is a table of them.

  Attributes:
    collectives: one :class:`Collective` for each, in the order of the program.

  Example:
    >>> report = WireReport(())
    >>> report.bytes_sent, report.dense_bytes, report.ratio, report.by_axis
    (0, 0, 1.0, {})
  """

  collectives: tuple[Collective, ...]

  @property
  def bytes_sent(self) -> int:
    """The bytes that each worker sends in one execution of the program."""
    return sum(c.times * c.bytes_sent for c in self.collectives)

  @property
  def dense_bytes(self) -> int:
    """The bytes that each worker would send if every exchange were a plain f32 mean."""
    return sum(c.times * c.dense_bytes for c in self.collectives)

  @property
  def ratio(self) -> float:
    """The ratio ``bytes_sent / dense_bytes``.

    It is 1 if both are 0, and infinite if only ``dense_bytes`` is.
    """
    if self.dense_bytes:
      return self.bytes_sent / self.dense_bytes
    return math.inf if self.bytes_sent else 1.0

  @property
  def by_axis(self) -> dict[str, "WireReport"]:
    """The report of each ``axis`` by itself, in the order of the program."""
    parts: dict[str, list[Collective]] = {}
    for collective in self.collectives:
      parts.setdefault(collective.axis, []).append(collective)
    return {axis: WireReport(tuple(part)) for axis, part in parts.items()}

  def __str__(self) -> str:
    if not self.collectives:
      return "The program has no collectives: it sends nothing."
    header = "collective,dtype,operands,axis,workers,times,bytes sent,as f32 mean,scope"
    rows = [header.split(","), *map(_row, self.collectives)]
    named = {axis: part for axis, part in self.by_axis.items() if axis}
    several = named if len(named) > 1 else {}
    for axis, part in [*several.items(), ("", self)]:
      sums = [f"{part.bytes_sent:,}", f"{part.dense_bytes:,}"]
      rows.append(["total", "", "", axis, "", "", *sums, ""])
    if not named:
      rows = [row[:3] + row[4:] for row in rows]
    last = len(rows[0]) - 1
    lines = aligned(rows, right=range(last - 4, last))
    shares = [f", {part.ratio:.4g} x over {axis}" for axis, part in several.items()]
    lines.append(
      f"Sends {self.ratio:.4g} x the bytes of a plain f32 mean{''.join(shares)}."
    )
    if any(c.in_loop for c in self.collectives):
      lines.append("loop: its trip count is unknown; counted once, a lower bound.")
    if any(c.in_branch for c in self.collectives):
      lines.append("branch: of a conditional; every branch counts, an upper bound.")
    return "\n".join(lines)


def _row(x: Collective) -> list[str]:
  """Returns the line of a collective in the table of a report."""
  counts = collections.Counter(x.shapes).items()
  arrays = [f"{n} x " * (n > 1) + str(list(shape)) for shape, n in counts]
  return [
    x.kind,
    x.dtype,
    " ".join(arrays) if len(arrays) <= 3 else f"{len(x.shapes)} arrays",
    x.axis,
    f"{x.workers:,}",
    "loop " * x.in_loop + "branch " * x.in_branch + f"{x.times:,}",
    f"{x.times * x.bytes_sent:,}",
    f"{x.times * x.dense_bytes:,}",
    "/".join(x.scope.split("/")[-2:]),
  ]


def wire_report(
  program: jax.stages.Compiled | jax.stages.Lowered | str,
  *,
  mesh: Mesh | AbstractMesh | None = None,
) -> WireReport:
  """Lists the collectives of a compiled program and the bytes that each worker sends.

  With operands of ``b`` bytes, one of ``n`` workers sends by

  - all-reduce: ``2 (n-1)/n b``, assuming a ring, which a device need not choose;
  - all-gather: ``(n-1) b``, that is ``(n-1)/n`` of the result;
  - all-to-all, reduce-scatter: ``(n-1)/n b``;
  - collective-permute: ``b``, or 0 if every worker sends to itself;
  - collective-broadcast, ragged-all-to-all: ``b``, an upper bound: the last in a chain
    sends nothing, and ragged sizes are known only at run time (``b`` is of the input);

  and nothing if ``n = 1``. Types narrower than a byte take one, as XLA:CPU sends them.
  A loop multiplies by its trip count. Without one in the text it counts once, which is
  a lower bound. Every branch of a conditional counts, which is an upper bound. Sends,
  receives, host transfers and custom calls are not seen.

  The exchanges of gradcomp also have ``dense_bytes``: ``2 (n-1)/n 4 e``, for an f32
  all-reduce of their ``e`` gradient elements. Where leaves are sharded over other axes,
  these are the elements of one device's shard. For others, these are ``bytes_sent``.

  Args:
    program: ``jax.jit(step).lower(...).compile()``, or the same without ``.compile()``,
      which is done here; or the optimized HLO text of one program.
    mesh: the mesh that the program was compiled for, which names the axis of each
      collective. By default it is that of the program's arguments and results, which a
      text does not have.

  Returns:
    A :class:`gradcomp.wire.WireReport`; ``print`` shows a table of its collectives, and
    ``report.by_axis["host"]`` is the report of the collectives over one axis.

  Raises:
    TypeError: ``program`` is something else, such as the jitted function.
    ValueError: the text is not optimized HLO, or some of its bytes would be missed; or
      ``mesh`` has not as many devices as the program.

  Example:
    >>> text = '''HloModule jit_step, num_partitions=4
    ... ENTRY main {
    ... x = u32[8] parameter(0)
    ... y = u32[32] all-gather(x), metadata={op_name="gradcomp_mean_64_over_4"}
    ... }'''
    >>> print(wire_report(text))  # doctest: +ELLIPSIS
    collective  dtype  operands  workers  times  bytes sent  as f32 mean  scope
    all-gather  u32    [8]             4      1          96          384  gradcomp_...
    total                                                96          384
    Sends 0.25 x the bytes of a plain f32 mean.
  """
  if isinstance(program, jax.stages.Lowered):
    program = program.compile()
  text = program.as_text() if isinstance(program, jax.stages.Compiled) else program
  if not isinstance(text, str):
    raise TypeError(
      "`program` must be a jax.stages.Compiled, a jax.stages.Lowered or optimized HLO "
      f"text, got {type(program).__name__}; pass jax.jit(step).lower(...).compile()."
    )
  found = hlo.parse_program(text)
  if mesh is not None and mesh.size != found.devices:
    raise ValueError(
      f"`mesh` must be the one that the program was compiled for, with "
      f"{found.devices} devices, got {mesh.size}; leave it out to take it from the "
      "program."
    )
  if mesh is None and isinstance(program, jax.stages.Compiled):
    mesh = _mesh_of(program, found.devices)
  shape = {} if mesh is None else dict(mesh.shape)
  return WireReport(
    tuple(
      dataclasses.replace(x, axis=",".join(_axes_of(groups, shape)))
      for x, groups in found.collectives
    )
  )


def _mesh_of(program: jax.stages.Compiled, devices: int) -> Mesh | AbstractMesh | None:
  """Returns the mesh on which arguments or results of a program lie, or None."""
  for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
    if isinstance(sharding, NamedSharding) and sharding.mesh.size == devices:
      return sharding.mesh
  return None


def _axes_of(groups: hlo.Groups, shape: dict[str, int]) -> tuple[str, ...]:
  """Returns the axes along which the members of a group differ.

  XLA numbers the devices of a program in the order of its mesh.
  """
  if groups.members is None or not shape:
    return ()
  found: set[str] = set()
  for members in groups.members:
    places = np.unravel_index(members, tuple(shape.values()))
    found |= {
      axis for axis, place in zip(shape, places, strict=True) if np.ptp(place) > 0
    }
  return tuple(axis for axis in shape if axis in found)
