"""``overlap_report``: the work beside the collectives of a program."""

# Links and processors work side by side only where the compiler's schedule lets them. A
# program that runs in its order, from a start to its end, can be read without a device.

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.report.collectives import (
  Collective,
  aligned,
  counted,
  dearest,
  end_of_scope,
)
from gradcomp._src.report.hlo_text import Instruction
from gradcomp._src.report.timeline import beside
from gradcomp._src.report.wire_report import read_program
from gradcomp._src.report.work import Work, Works


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """A collective, and the work between its start and its end.

  Attributes:
    collective: the record that :func:`wire_report` has, too.
    synchronous: whether the program does nothing else until it is done.
    beside: the work in between, in the order of the program; with ``times`` runs of the
      collective, that of one.
  """

  collective: Collective
  synchronous: bool
  beside: tuple[Work, ...]

  @property
  def flops(self) -> int:
    """The floating-point operations of the matrix products beside it."""
    return sum(work.flops for work in self.beside)

  @property
  def cycles(self) -> int:
    """The cycles of the work beside it, by the compiler's estimate; else 0."""
    return sum(work.cycles for work in self.beside)

  @property
  def bytes(self) -> int:
    """The bytes that the work beside it reads and writes."""
    return sum(work.bytes for work in self.beside)

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends by it in one execution of the program."""
    return self.collective.times * self.collective.bytes_sent

  @property
  def exposed(self) -> bool:
    """True if nothing computes beside it.

    Work of fewer bytes than it sends is nothing: no link is faster than memory.
    """
    return self.bytes < self.collective.bytes_sent


@dataclasses.dataclass(frozen=True)
class OverlapReport:
  """The collectives of a program, with the work beside each; ``str`` is a table.

  Attributes:
    collectives: one :class:`Overlap` for each, in the order of the program.
    unseen: as in a :class:`WireReport`.
    hints: sentences on flags of the compiler that let more of them overlap.
  """

  collectives: tuple[Overlap, ...]
  unseen: tuple[str, ...] = ()
  hints: tuple[str, ...] = ()

  @property
  def bytes_sent(self) -> int:
    """The bytes that each worker sends in one execution, as in a WireReport."""
    return _sent(self.collectives)

  @property
  def exposed_bytes(self) -> int:
    """The bytes of the collectives that nothing computes beside, counted likewise."""
    return _sent(x for x in self.collectives if x.exposed)

  @property
  def exposed_share(self) -> float:
    """The ratio ``exposed_bytes / bytes_sent``, from 0 to 1; 0 if nothing is sent."""
    return self.exposed_bytes / self.bytes_sent if self.bytes_sent else 0.0

  def __str__(self) -> str:
    unseen = [f"Not counted: {', '.join(self.unseen)}."] if self.unseen else []
    if not self.collectives:
      return "\n".join(["The program has no collectives.", *unseen])
    header = "collective,dtype,axis,workers,times,bytes sent,beside it,Gflop,kcycles"
    timed = any(x.cycles for x in self.collectives)  # by a TPU's compiler
    rows = [_row(x, timed) for x in self.collectives]
    lines = aligned([[*header.split(","), "scope"], *rows], right=(3, 4, 5, 7, 8))
    count = sum(x.exposed for x in self.collectives)
    lines.append(
      f"Exposed: {count} of {len(self.collectives)} collectives, "
      f"{self.exposed_share:.3g} of {self.bytes_sent:,} bytes."
    )
    return "\n".join([*lines, *unseen, *self.hints])


def _sent(overlaps: Iterable[Overlap]) -> int:
  """Returns the bytes of collectives, with one branch of each conditional."""
  return dearest((x.collective for x in overlaps), lambda x: x.times * x.bytes_sent)


def _row(x: Overlap, timed: bool) -> list[str]:
  one = x.collective
  products = sum(work.flops > 0 for work in x.beside)
  others = len(x.beside) - products
  counts = [f"{products} product{'s' * (products > 1)}"] if products else []
  counts += [f"{others} other{'s' * (others > 1)}"] if others else []
  return [
    one.kind,
    one.dtype,
    one.axis,
    f"{one.workers:,}",
    counted(one),
    f"{x.bytes_sent:,}",
    "synchronous" if x.synchronous else "exposed" if x.exposed else ", ".join(counts),
    f"{x.flops / 1e9:.4g}",
    f"{x.cycles / 1e3:.4g}" * timed,
    end_of_scope(one),
  ]


def overlap_report(
  program: Any,  # of stages of JAX and of equinox, and whatever has as_text
  *,
  mesh: Mesh | AbstractMesh | None = None,
) -> OverlapReport:
  """Lists the collectives of a compiled program, and the work beside each.

  A compiled program runs in the order of its text. An asynchronous collective begins
  with a start and is over with its end, which other instructions may lie between, also
  those of the next trip of a loop; one that has neither is synchronous. What lies
  between is its overlap, if it computes: it reads or writes arrays, and is no
  collective itself. A collective is *exposed* where that work together reads and writes
  fewer bytes than the collective sends. Nothing runs: an overlap is what the schedule
  allows, and not how long it takes.

  Asynchronous are pairs of ``-start`` and ``-done``, unless XLA marks them as
  synchronous; on TPUs also chains of fusions that advance a collective beside their own
  work, calls of a SparseCore, and sends to other slices, until the receive that they
  meet is done. On CPUs all are synchronous.

  Args:
    program: see :func:`wire_report`.
    mesh: see :func:`wire_report`.

  Returns:
    A :class:`gradcomp.wire.OverlapReport`; ``print`` shows a table of its collectives.

  Raises:
    TypeError: as :func:`wire_report`.
    ValueError: as :func:`wire_report`; or the program is not scheduled, so that its
      text has no order.

  Example:
    >>> text = '''HloModule jit_step, is_scheduled=true, num_partitions=4
    ... ENTRY main {
    ... x = u32[64] parameter(0)
    ... y = f32[64,64] parameter(1)
    ... a = (u32[64], u32[256]) all-gather-start(x), channel_id=1
    ... z = f32[64,64] dot(y, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... b = u32[256] all-gather-done(a)
    ... }'''
    >>> print(overlap_report(text))
    collective  dtype  workers  times  bytes sent  beside it      Gflop
    all-gather  u32          4      1         768  1 product  0.0005243
    Exposed: 0 of 1 collectives, 0 of 768 bytes.
  """
  found = read_program(program, mesh)
  if found.module.attributes.get("is_scheduled") != "true":
    raise ValueError(
      "`program` must be scheduled, with is_scheduled=true in the first line of its "
      "text, got one without; pass jax.jit(step).lower(...).compile(), or what its "
      "as_text() returns."
    )
  works, overlaps = Works(), []
  for collective, _, _, path in found.collectives:
    between = beside(path)
    overlap = Overlap(
      collective=collective,
      synchronous=between is None,
      beside=tuple(filter(None, itertools.starmap(works.of, between or ()))),
    )
    body, number = path[-1]
    overlaps.append((overlap, body[number]))
  collectives = tuple(overlap for overlap, _ in overlaps)
  return OverlapReport(collectives, found.unseen, tuple(_hints(overlaps)))


def _hints(found: Sequence[tuple[Overlap, Instruction]]) -> Iterator[str]:
  """Yields sentences on flags of the compiler that made a program."""
  if any(
    overlap.synchronous and overlap.collective.kind == "all-to-all" and ":T(" in x.type
    for overlap, x in found  # with tiles, as only TPUs have
  ):
    yield _flag("all-to-all", "xla_tpu_enable_async_all_to_all", True)
  if any(
    overlap.exposed
    and overlap.collective.kind == "all-gather"
    and len(overlap.collective.operands) > 1
    and '"collective_backend_config"' in x.backend_config  # of GPUs
    for overlap, x in found
  ):
    yield _flag("all-gather", "xla_gpu_all_gather_combine_threshold_bytes", 1)


def _flag(kind: str, flag: str, value: bool | int) -> str:
  options = f"compile(compiler_options={{{flag!r}: {value}}})"
  return f"{options} lets the compiler start each {kind} early."
