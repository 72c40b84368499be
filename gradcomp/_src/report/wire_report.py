"""``wire_report``: the collectives and bytes of a program, from its optimized HLO."""

# A formula of this library could drift from the program; the optimized HLO cannot.

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import hlo
from gradcomp._src.report.groups import Groups

_MOST = 4  # conditionals whose ratios are printed


@dataclasses.dataclass(frozen=True)
class WireReport:
  """The collectives of a program; ``str(report)`` is a table of them.

  Attributes:
    collectives: one :class:`Collective` for each, in the order of the program.
    unseen: the names of instructions that send or receive, and cannot be counted.
    untold: the names of collectives that XLA has left without a scope, and of means
      that no collective completes; empty in programs without an exchange of gradcomp.
    axes: the axes of the mesh, the outermost first; empty if the mesh is unknown.
  """

  collectives: tuple[sent.Collective, ...]
  unseen: tuple[str, ...] = ()
  untold: tuple[str, ...] = ()
  axes: tuple[str, ...] = ()

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends in one run, of a conditional its largest branch."""
    return sent.dearest(self.collectives)

  @property
  def dense_bytes(self) -> int:
    """The bytes if every exchange were a plain f32 mean; ValueError if ``untold``."""
    if self.untold:
      raise ValueError(
        "`dense_bytes` and `ratio` must be read from the names of collectives, got "
        f"none of {', '.join(self.untold)}; take those of gradcomp.explain."
      )
    return sent.dearest(self.collectives, lambda x: x.times * x.dense_bytes)

  @property
  def ratio(self) -> float:
    """The ratio ``bytes_sent / dense_bytes``; 1 for 0 / 0; ValueError if ``untold``."""
    return self._ratio(self.bytes_sent)

  def _ratio(self, size: int) -> float:
    return size / self.dense_bytes if self.dense_bytes else math.inf if size else 1.0

  @property
  def by_axis(self) -> dict[str, "WireReport"]:
    """The report of each ``axis`` by itself, along the outermost axis first."""
    places = {axis: i for i, axis in enumerate(self.axes)}
    order = lambda axis: [places.get(x, len(places)) for x in axis.split(",")]
    along = lambda axis: tuple(x for x in self.collectives if x.axis == axis)
    part = lambda axis: dataclasses.replace(self, collectives=along(axis), unseen=())
    names = dict.fromkeys(x.axis for x in self.collectives)
    return {axis: part(axis) for axis in sorted(names, key=order)}

  @property
  def branch_ratios(self) -> dict[str, tuple[float, ...]]:
    """The ratios of a step, by conditional and branch; ValueError if ``untold``.

    Of other conditionals the branch with the most counts. A conditional is named by its
    computation, and one inside a branch also by those around it.
    """

    def ratio(taken: dict[str, int]) -> float:
      agrees = lambda branch: taken.get(branch[0], branch[1]) == branch[1]
      kept = (x for x in self.collectives if all(map(agrees, x.branches)))
      return self._ratio(sent.dearest(kept))

    found: dict[str, tuple[float, ...]] = {}
    for x in self.collectives:
      around, key = dict[str, int](), ""
      for name, number, count in x.branches:
        if key + name not in found:
          ways = ({**around, name: i} for i in range(count))
          found[key + name] = tuple(map(ratio, ways))
        around[name], key = number, f"{key}{name}[{number}] "
    return found

  def __str__(self) -> str:
    unseen = f"Transfers that are not counted: {', '.join(self.unseen)}."
    if not self.collectives:
      none = "The program has no collectives"
      return f"{none}. {unseen}" if self.unseen else f"{none}: it sends nothing."
    rows = list[Mapping[str, str]]()
    for x in self.collectives:
      counts = collections.Counter(x.shapes).items()
      arrays = [f"{n} x " * (n > 1) + str(list(shape)) for shape, n in counts]
      operands = " ".join(arrays) if len(arrays) <= 3 else f"{len(x.shapes)} arrays"
      dense = f"{x.times * x.dense_bytes:,}"
      rows.append(sent.cells(x, operands, **{"as f32 mean": dense}))
    parts = {axis: part for axis, part in self.by_axis.items() if axis}
    parts = {**parts, "": self} if len(parts) > 1 else {"": self}
    told, plain = list[str](), " the bytes of a plain f32 mean"
    for axis, part in parts.items():
      size = f"{part.bytes_sent:,}"
      dense = "?" if self.untold else f"{part.dense_bytes:,}"
      total = {"collective": "total", "axis": axis, "bytes sent": size}
      rows.append(total | {"as f32 mean": dense})
      where = f" over {axis}" if axis else " in all" * (len(parts) > 1)
      if not self.untold and part.ratio < math.inf:
        told.append(f"{part.ratio:.4g} x{plain}{where}")
        plain = ""
      else:
        told.append(f"{size} bytes{where} where a plain f32 mean sends none")
    lines = [*sent.table(rows), f"Sends {', '.join(told)}."]
    if self.untold:
      names = f"XLA kept no names of {', '.join(self.untold)}"
      lines[-1] = f"{names}: the bytes of a plain f32 mean cannot be told."
    if again := sent.dearest(c for c in self.collectives if c.again):
      what = "a mean of the gradient, which the exchange takes again"
      lines.append(f"{again:,} bytes are {what}: delete the pmean.")
    if self.unseen:
      lines.append(f"{unseen} The sum is a lower bound.")
    if any(c.trips_unknown for c in self.collectives):
      lines.append("loop: its trip count is unknown; counted once, a lower bound.")
    if any(c.in_branch for c in self.collectives):
      most = "the branch with the most counts, an upper bound."
      lines.append(f"branch: of a conditional; {most}")
      if not self.untold and self.dense_bytes:
        said = lambda ratios: " or ".join(f"{ratio:.4g} x" for ratio in ratios)
        found = self.branch_ratios.items()
        each = [f"{name}: {said(ratios)}, by branch." for name, ratios in found]
        if len(each) > _MOST:
          each[_MOST:] = [f"{len(each) - _MOST:,} more: see branch_ratios."]
        lines += each
    return "\n".join(lines)


def wire_report(
  program: Any,  # of stages of JAX and of equinox, and whatever has as_text
  *,
  mesh: Mesh | AbstractMesh | None = None,
) -> WireReport:
  """Returns the collectives of a compiled program and the bytes that each worker sends.

  With operands of ``b`` bytes, one of ``n`` workers sends by

  - all-reduce: ``2 (n-1)/n b``, assuming a ring, which a device need not choose;
  - all-gather: ``(n-1) b``, that is ``(n-1)/n`` of the result;
  - all-to-all, reduce-scatter: ``(n-1)/n b``;
  - collective-permute: ``b``, or 0 if every worker sends to itself;
  - collective-broadcast: ``b``, an upper bound: the last in a chain sends nothing;
  - ragged-all-to-all: ``b`` of the input, a guess: sizes are known only at run time;

  and nothing if ``n = 1``. Types narrower than a byte take one, as XLA:CPU sends them,
  or their bits in layouts of GPUs like ``s4[8]{0:E(4)}``. What XLA:TPU quantizes counts
  as sent.

  Sends between devices are a collective-permute; those between slices of TPUs the
  collective of their type, over all its workers. XLA:TPU's fusions of an all-reduce
  with a slice of its result are a reduce-scatter, and an asynchronous collective in
  several fusions counts once.

  A loop multiplies by its trip count, from the text or from a condition that counts up
  to a constant; else it counts once, a lower bound. Of a conditional the branch with
  the most counts, an upper bound: see ``branch_ratios``. Transfers to or from the host,
  and communicating Pallas kernels for TPUs, are ``unseen``. Other custom calls count 0.

  Exchanges of gradcomp also have ``dense_bytes``: ``2 (n-1)/n 4 e``, for an f32
  all-reduce of their ``e`` gradient elements on a device. Others count their
  ``bytes_sent``, except a mean that an exchange takes again: all-reduces of floats over
  the same workers, with as many elements, whose results it reads, count 0. This is read
  from names; where XLA drops one, it is ``untold``, and ``ratio`` and ``dense_bytes``
  are ValueErrors. Where an exchange completes a mean inside groups of ``c`` workers
  along one axis, and has a stage between them along another, ``2 (c-1)/c 4 e`` of its
  ``dense_bytes`` count along the first axis, and the rest along the second.

  Args:
    program: ``jax.jit(step).lower(...).compile()``, or the same without ``.compile()``,
      which is done here; these of ``equinox.filter_jit(step)``; any other object whose
      ``as_text()`` is the optimized HLO text of one program; or that text.
    mesh: the mesh that names the axis of each collective, by default that of the
      program's arguments and results, which a text does not have.

  Raises:
    TypeError: ``program`` is something else, such as the jitted function.
    ValueError: the text is not optimized HLO, or is cut, or has unknown collectives,
      groups or types; or ``mesh`` has another number of devices than the program.

  Example:
    >>> text = '''HloModule jit_step, replica_count=4
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
  found = read_program(program, mesh)
  collectives = tuple(x for x, *_ in found.collectives)
  return WireReport(collectives, found.unseen, found.untold, found.axes)


def read_program(program: Any, mesh: Mesh | AbstractMesh | None) -> hlo.Program:
  """Reads a program as :func:`wire_report` does, with the axes of a mesh."""
  stage = program
  for name in ("lowered", "compiled"):  # what equinox.filter_jit wraps
    stage = getattr(stage, name, stage)
  if hasattr(stage, "as_text") and hasattr(stage, "compile"):
    stage = stage.compile()
  text = stage.as_text() if hasattr(stage, "as_text") else stage
  if not isinstance(text, str):
    raise TypeError(
      "`program` must be a jax.stages.Compiled, a jax.stages.Lowered, an object whose "
      "as_text() returns optimized HLO, or that text, got "
      f"{type(program).__name__}; pass jax.jit(step).lower(...).compile()."
    )
  found = hlo.parse_program(text)
  count = math.prod(found.devices)
  if mesh is not None and mesh.size != count:
    raise ValueError(
      f"`mesh` must be the one that the program was compiled for, with {count} "
      f"devices, got {mesh.size}; leave it out to take it from the program."
    )
  if mesh is None:
    kinds = "input_shardings", "output_shardings"
    shardings = jax.tree.leaves([getattr(stage, kind, ()) for kind in kinds])
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    mesh = next((x for x in meshes if x.size == count), None)
  indices: dict[str, np.ndarray] = {}  # of the devices along each axis
  if mesh is not None:
    # XLA numbers the devices of a program in the order of its mesh: slice by slice.
    order = np.arange(mesh.size)
    if found.devices[0] > 1 and isinstance(mesh, Mesh):
      order = np.argsort([x.slice_index for x in mesh.devices.flat], kind="stable")
    places = np.unravel_index(order, mesh.axis_sizes)
    indices = dict(zip(mesh.shape, places, strict=True))
  again = _taken_again(found.collectives)
  named = []
  for number, (x, groups, *_) in enumerate(found.collectives):
    members = [list(group) for group in groups]
    spread = lambda at, members=members: any(np.ptp(at[y]) > 0 for y in members)
    axis = ",".join(name for name, at in indices.items() if spread(at))
    named.append(dataclasses.replace(x, axis=axis, again=number in again))
  pairs = zip(sent.by_link(named), found.collectives, strict=True)
  collectives = tuple((x, *at[1:]) for x, at in pairs)
  return found._replace(collectives=collectives, axes=tuple(indices))


def _taken_again(found: Sequence[hlo.Found]) -> set[int]:
  """Returns the numbers of float sums that exchanges read, if they are as large."""
  sums: dict[Groups, list[int]] = {}
  for number, (x, groups, in_front, _) in enumerate(found):
    floats = all(re.fullmatch(r"b?f\d+", dtype) for dtype, _ in x.operands)
    if in_front and floats and x.kind == "all-reduce" and not sent.is_exchange(x.scope):
      sums.setdefault(groups, []).append(number)
  result: set[int] = set()
  for groups, numbers in sums.items():
    wholes, workers = [set(x) for x in groups], max(map(len, groups))
    is_part = lambda x, wholes=wholes: any(set(x) <= y for y in wholes)
    inside = [x for x, own, *_ in found if own and all(map(is_part, own))]
    averaged = lambda x, n=workers: sum(size for size, of in x.means if of == n)
    size = sent.dearest(inside, averaged)
    if size and sum(found[i][0].elements for i in numbers) >= size:
      result.update(numbers)
  return result
