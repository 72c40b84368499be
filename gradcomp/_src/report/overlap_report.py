"""``overlap_report``: the work beside the collectives of a program."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import hlo, wire_report
from gradcomp._src.report.hlo_text import Computation, Instruction, unreadable
from gradcomp._src.report.work import Work, Works

_Held = dict[str, tuple[int, ...]]  # where in nested tuples a value is, by its holders
_Run = tuple[Computation, Instruction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """A collective, and the work between its start and its end.

  Attributes:
    collective: the record that :func:`wire_report` has, too.
    synchronous: whether the program does nothing else until it is done.
    beside: the work in between, in the order of the program, for one of its ``times``.
  """

  collective: sent.Collective
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
    """True if the work beside it has fewer bytes than it sends; memory beats links."""
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
    return sent.dearest(x.collective for x in self.collectives)

  @property
  def exposed_bytes(self) -> int:
    """The bytes of the collectives that nothing computes beside, counted likewise."""
    return sent.dearest(x.collective for x in self.collectives if x.exposed)

  @property
  def exposed_share(self) -> float:
    """The ratio ``exposed_bytes / bytes_sent``, from 0 to 1; 0 if nothing is sent."""
    return self.exposed_bytes / self.bytes_sent if self.bytes_sent else 0.0

  def __str__(self) -> str:
    unseen = [f"Not counted: {', '.join(self.unseen)}."] if self.unseen else []
    if not self.collectives:
      return "\n".join(["The program has no collectives.", *unseen])
    timed = any(x.cycles for x in self.collectives)  # by a TPU's compiler
    lines = sent.table([_row(x, timed) for x in self.collectives])
    count = sum(x.exposed for x in self.collectives)
    lines.append(
      f"Exposed: {count} of {len(self.collectives)} collectives, "
      f"{self.exposed_share:.3g} of {self.bytes_sent:,} bytes."
    )
    return "\n".join([*lines, *unseen, *self.hints])


def _row(x: Overlap, timed: bool) -> dict[str, str]:
  products = sum(work.flops > 0 for work in x.beside)
  pairs = ("product", products), ("other", len(x.beside) - products)
  counts = [f"{n} {name}{'s' * (n > 1)}" for name, n in pairs if n]
  seen = "synchronous" if x.synchronous else "exposed" if x.exposed else ""
  work = {"beside it": seen or ", ".join(counts), "Gflop": f"{x.flops / 1e9:.4g}"}
  cycles = f"{x.cycles / 1e3:.4g}" if timed else ""
  return sent.cells(x.collective, **work, kcycles=cycles)


def overlap_report(
  program: Any,  # of stages of JAX and of equinox, and whatever has as_text
  *,
  mesh: Mesh | AbstractMesh | None = None,
) -> OverlapReport:
  """Returns the collectives of a compiled program, with the work beside each.

  A compiled program runs in the order of its text. The overlap of an asynchronous
  collective is the work between its start and its end, also in the next trip of a loop:
  instructions that read or write arrays, and are no collectives. It is *exposed* where
  that work reads and writes fewer bytes than the collective sends. Nothing runs: links
  and processors work side by side only where the schedule lets them.

  Asynchronous are pairs of ``-start`` and ``-done``, unless XLA marks them as
  synchronous; on TPUs also chains of fusions that advance a collective, calls of a
  SparseCore, and sends to other slices, until their receive is done. On CPUs all are
  synchronous.

  Args:
    program, mesh: as for :func:`wire_report`.

  Raises:
    TypeError: as :func:`wire_report`.
    ValueError: as :func:`wire_report`; or the program is not scheduled.

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
  found = wire_report.read_program(program, mesh)
  if found.module.attributes.get("is_scheduled") != "true":
    raise ValueError(
      "`program` must be scheduled, with is_scheduled=true in the first line of its "
      "text, got one without; pass jax.jit(step).lower(...).compile(), or its text."
    )
  works, overlaps = Works(), list[Overlap]()
  for collective, _, _, path in found.collectives:
    between = _beside(path)
    beside = tuple(filter(None, itertools.starmap(works.of, between or ())))
    given: Any = {"collective": collective, "synchronous": between is None}
    overlaps.append(Overlap(**given, beside=beside))
  hints = _hints(overlaps, [path[-1] for *_, path in found.collectives])
  return OverlapReport(tuple(overlaps), found.unseen, tuple(hints))


def _hints(found: Sequence[Overlap], places: Sequence[hlo.Step]) -> Iterator[str]:
  """Yields sentences on flags of the compiler that made a program."""
  told: dict[str, str] = {}
  for overlap, (body, number) in zip(found, places, strict=True):
    x, one, kind = body[number], overlap.collective, overlap.collective.kind
    on_tpu = ":T(" in x.type  # its tiles
    on_gpu = '"collective_backend_config"' in x.backend_config
    if kind == "all-to-all" and overlap.synchronous and on_tpu:
      told[kind] = "'xla_tpu_enable_async_all_to_all': True"
    if kind == "all-gather" and overlap.exposed and len(one.operands) > 1 and on_gpu:
      told[kind] = "'xla_gpu_all_gather_combine_threshold_bytes': 1"
  for kind in sorted(told, reverse=True):
    options = f"compile(compiler_options={{{told[kind]}}})"
    yield f"{options} lets the compiler start each {kind} early."


def _beside(path: hlo.Path) -> list[_Run] | None:
  """Returns all between a collective's start and end; None for a synchronous one."""
  # The start may be the collective itself, or an instruction around it.
  for depth in range(len(path), 0, -1):
    body, number = path[depth - 1]
    x = body[number]
    if '"is_sync":true' in x.backend_config:
      return None
    around = path[depth - 2][0][path[depth - 2][1]].opcode if depth > 1 else ""
    ends_itself = x.opcode == "send" and not around.endswith("-start")
    if x.opcode.endswith("-start") or ends_itself:
      return list(_until_done(path[:depth]))
    if chain := _chain(body, x):  # from the first fusion of the chain to its last
      links = [i for i, y in enumerate(body) if _chain(body, y) == chain]
      return [(body, y) for y in body[links[0] + 1 : links[-1]]]
  return None


def _chain(body: Computation, x: Instruction) -> list[str]:
  """Returns the number of a collective that several fusions of a TPU advance."""
  inner = itertools.chain(*body.called(x))
  return next((y.chains for y in inner if y.opcode in sent.SHARE_SENT and y.chains), [])


def _until_done(path: hlo.Path) -> Iterator[_Run]:
  """Yields all that runs from a start on, also in the next trips of a loop."""
  *callers, (body, number) = path
  start, trips = body[number], set[tuple[str, tuple[int, ...]]]()
  # The end of a send is in its receive, if there is one.
  received = (x for x in body if x.opcode == "recv" and x.meeting == start.meeting)
  end = next(received, start) if start.opcode == "send" else start
  held: _Held = {end.name: ()}
  first = number + 1
  while True:
    done, found = _run(body, first, held)
    yield from found
    if done:
      return
    if body.root.name not in held or not callers:
      raise unreadable("a -done for each -start", start.name)
    value, (around, number) = held[body.root.name], callers[-1]
    if around[number].opcode == "while" and (body.name, value) not in trips:
      trips.add((body.name, value))
      held, first = {_parameter(body, 0): value}, 0
    else:
      callers.pop()
      body, held, first = around, {around[number].name: value}, number + 1


def _run(body: Computation, first: int, held: _Held) -> tuple[bool, list[_Run]]:
  """Returns whether the end is in a computation, and all before it."""
  # `held` has the places of the start's value in others, and gets new ones.
  found: list[_Run] = []
  for x in body[first:]:
    number = next((i for i, y in enumerate(x.operands) if y in held), -1)
    value = held[x.operands[number]] if number >= 0 else ()
    if number >= 0 and x.opcode.endswith("-done") and not value:
      return True, found
    if number < 0:
      pass
    elif x.opcode == "get-tuple-element":
      if value and value[0] == int(x.attributes["index"]):
        held[x.name] = value[1:]
    elif x.opcode == "tuple":
      held[x.name] = (number, *value)
    elif x.opcode in ("while", "call"):
      callee = body.others[x.calls["body" if x.opcode == "while" else "to_apply"][0]]
      inside = {_parameter(callee, number): value}
      done, around = _run(callee, 0, inside)
      if done:
        return True, found + around
      if callee.root.name in inside:
        held[x.name] = inside[callee.root.name]
    else:
      held[x.name] = value
    found.append((body, x))
  return False, found


def _parameter(body: Computation, number: int) -> str:
  given = (x for x in body if x.opcode == "parameter")
  return next(x.name for x in given if x.arguments[0] == str(number))
