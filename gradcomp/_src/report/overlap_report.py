"""``overlap_report``: the work beside the collectives of a program."""

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import hlo, hlo_text, wire_report
from gradcomp._src.report.hlo_text import Computation, Instruction, integers

_SUMMED = re.compile(r'"lhs_contracting_dimensions":(\[[^]]*\])')  # of cuBLAS
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# These name, hold or order values, or move them beside what computes.
_IDLE = frozenset(
  "add-dependency after-all bitcast constant domain get-tuple-element infeed "
  "opt-barrier outfeed parameter partition-id recv replica-id send tuple".split()
)
# So do these custom calls, on TPUs.
_IDLE_CALLS = frozenset(
  "AllocateBuffer AsyncCollectiveDone AsyncCollectiveStart ConcatBitcast "
  "PrepareAsyncCallDone PrepareAsyncCallStart Sharding SliceId".split()
)
_PARTS = frozenset({"dynamic-slice", "gather", "slice"})  # they read what they return

_Counts = tuple[int, ...]  # flops, cycles and bytes
_Held = dict[str, tuple[int, ...]]  # where in nested tuples a value is, by its holders
_Run = tuple[Computation, Instruction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """An instruction that computes, with all that it calls.

  Attributes:
    name: the name of the instruction in the program.
    opcode: the HLO opcode, such as ``"fusion"``, ``"dot"`` or ``"while"``.
    flops: the floating-point operations of matrix products and convolutions, two for
      each product that is added; 0 for other work.
    cycles: the compiler's estimate, which is in programs for TPUs; else 0.
    bytes: the bytes of all arrays that it reads and writes.
  """

  name: str
  opcode: str
  flops: int
  cycles: int
  bytes: int


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
    rows = []
    for x in self.collectives:
      products = sum(work.flops > 0 for work in x.beside)
      pairs = ("product", products), ("other", len(x.beside) - products)
      counts = [f"{n} {name}{'s' * (n > 1)}" for name, n in pairs if n]
      seen = "synchronous" if x.synchronous else "exposed" if x.exposed else ""
      work = {"beside it": seen or ", ".join(counts), "Gflop": f"{x.flops / 1e9:.4g}"}
      cycles = f"{x.cycles / 1e3:.4g}" if timed else ""
      rows.append(sent.cells(x.collective, **work, kcycles=cycles))
    told = (
      f"Exposed: {sum(x.exposed for x in self.collectives)} of {len(rows)} "
      f"collectives, {self.exposed_share:.3g} of {self.bytes_sent:,} bytes."
    )
    return "\n".join([*sent.table(rows), told, *unseen, *self.hints])


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
  overlaps, flags = list[Overlap](), dict[str, str]()
  known: Any = {}
  for collective, _, _, path in found.collectives:
    between = _beside(path)
    works = (work_of(*place, known) for place in between or ())
    beside = tuple(filter(None, works))
    given: Any = {"collective": collective, "beside": beside}
    one = Overlap(**given, synchronous=between is None)
    overlaps.append(one)
    (body, number), kind = path[-1], collective.kind
    x = body[number]
    on_tpu = ":T(" in x.type  # its tiles
    on_gpu = '"collective_backend_config"' in x.backend_config
    if kind == "all-to-all" and one.synchronous and on_tpu:
      flags[kind] = "'xla_tpu_enable_async_all_to_all': True"
    if kind == "all-gather" and one.exposed and len(collective.operands) > 1 and on_gpu:
      flags[kind] = "'xla_gpu_all_gather_combine_threshold_bytes': 1"
  hints = (
    f"compile(compiler_options={{{flags[kind]}}}) lets the compiler start each {kind} "
    "early."
    for kind in sorted(flags, reverse=True)
  )
  return OverlapReport(tuple(overlaps), found.unseen, tuple(hints))


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
      # The end of a send is in its receive, if there is one.
      received = (y for y in body if y.opcode == "recv" and y.meeting == x.meeting)
      end = next(received, x) if x.opcode == "send" else x
      rest = (*path[: depth - 1], (body, number + 1))
      done, found = _until_done(rest, {end.name: ()}, set())
      if not done:
        raise hlo_text.unreadable("a -done for each -start", x.name)
      return found
    if chain := _chain(body, x):  # from the first fusion of the chain to its last
      links = [i for i, y in enumerate(body) if _chain(body, y) == chain]
      return [(body, y) for y in body[links[0] + 1 : links[-1]]]
  return None


def _chain(body: Computation, x: Instruction) -> list[str]:
  """Returns the number of a collective that several fusions of a TPU advance."""
  inner = itertools.chain(*body.called(x))
  return next((y.chains for y in inner if y.opcode in sent.SHARE_SENT and y.chains), [])


def _until_done(
  path: hlo.Path, held: _Held, trips: set[Any]
) -> tuple[bool, list[_Run]]:
  """Returns whether the end of a start comes, and all that runs from here to there."""
  # `held` has the places of the start's value in others, and gets new ones. Behind the
  # end of a computation its callers go on, a loop with the next of its `trips`.
  *callers, (body, first) = path
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
      done, more = _until_done(((callee, 0),), inside, trips)
      if done:
        return True, found + more
      if callee.root.name in inside:
        held[x.name] = inside[callee.root.name]
    else:
      held[x.name] = value
    found.append((body, x))
  if not callers or body.root.name not in held:
    return False, found
  value, (around, number) = held[body.root.name], callers[-1]
  rest, held = (*callers[:-1], (around, number + 1)), {around[number].name: value}
  if around[number].opcode == "while" and (body.name, value) not in trips:
    trips.add((body.name, value))
    rest, held = (*callers, (body, 0)), {_parameter(body, 0): value}
  done, more = _until_done(rest, held, trips)
  return done, found + more


def _parameter(body: Computation, number: int) -> str:
  given = (x for x in body if x.opcode == "parameter")
  return next(x.name for x in given if x.arguments[0] == str(number))


# XLA's own analysis, which compiled.cost_analysis() shows, has sums of a whole program,
# and none of a text. These are its rules for one instruction; a test compares both.


def work_of(
  body: Computation, x: Instruction, known: dict[str, _Counts]
) -> Work | None:
  """Returns the work of an instruction, None if it has none; ``known`` gets sums."""
  flops, cycles, size = _counts(body, x, known)
  work = Work(name=x.name, opcode=x.opcode, flops=flops, cycles=cycles, bytes=size)
  return work if size else None


def _counts(body: Computation, x: Instruction, known: dict[str, _Counts]) -> _Counts:
  """Returns the counts of an instruction, and of all that it calls."""
  added = lambda counts: tuple(map(sum, zip(*counts, strict=True)))

  def inside(called: Computation) -> _Counts:
    if called.name not in known:  # each is counted once
      known[called.name] = added(_counts(called, y, known) for y in called)
    return known[called.name]

  if x.opcode == "while":
    trips, (loop,) = hlo.trip_count(x, body), x.calls["body"]
    return tuple(n * (1 if trips is None else trips) for n in inside(body.others[loop]))
  if x.opcode == "conditional":  # it runs one; the dearest is an upper bound
    return max(map(inside, body.called(x)))
  if x.opcode in ("call", "async-start", "call-start"):
    return added(map(inside, body.called(x)))
  if _is_idle(x) or x.opcode.endswith(("-start", "-update", "-done")):
    return 0, 0, 0
  cycles = int(match[1]) if (match := _CYCLES.search(x.backend_config)) else 0
  if x.opcode == "fusion":
    fused = body.called(x)
    return sum(inside(y)[0] for y in fused), cycles, _fused_bytes(fused[0])
  types = [body.named[y].type if y in body.named else "" for y in x.operands]
  read = [x.type] if x.opcode in _PARTS else types
  return _flops(x, types), cycles, sum(map(_bytes, [*read, x.type]))


def _fused_bytes(body: Computation) -> int:
  """Returns the bytes that a fusion reads and writes."""
  # Operands and results have more: a fusion reads a slice of an array, writes a part of
  # one in place, and hands on the buffers of a collective that is on its way.
  size, root = 0, body.root
  counts = lambda x: x.opcode == "bitcast" or not _is_idle(x)
  for x in body:
    if x.opcode == "parameter":
      readers = filter(counts, (body[i] for i in body.readers[x.name]))
      parts = (_bytes(y.type if y.opcode in _PARTS else x.type) for y in readers)
      size += min(_bytes(x.type), sum(parts))
  for x in [body.named[y] for y in root.operands] if root.opcode == "tuple" else [root]:
    if x.opcode == "dynamic-update-slice":
      size += _bytes(body.named[x.operands[1]].type)
    elif counts(x):
      size += _bytes(x.type)
  return size


def _is_idle(x: Instruction) -> bool:
  target = x.attributes.get("custom_call_target", "").strip('"')
  return x.opcode in _IDLE or x.opcode in sent.SHARE_SENT or target in _IDLE_CALLS


def _bytes(type_: str) -> int:
  """Returns the bytes of all arrays in the text of a type."""
  found = hlo_text.ARRAY.findall(type_)
  return sum(-(-sent.BITS.get(x, 0) // 8) * math.prod(integers(y)) for x, y, _ in found)


def _flops(x: Instruction, types: list[str]) -> int:
  """Returns two for each product that a dot, a convolution or a library's adds."""
  first = lambda text: next(iter(hlo_text.ARRAY.findall(text)), ("", ""))[1]
  shape, *operands = (integers(first(text)) for text in (x.type, *types))
  if x.opcode != "convolution":
    summed = x.attributes.get("lhs_contracting_dims", "")
    match = _SUMMED.search(x.backend_config)
    if x.opcode != "dot" and not match:
      return 0
    axes = integers(match[1] if match else summed)
    return 2 * math.prod(shape) * math.prod(operands[0][axis] for axis in axes)
  # XLA writes matrix products for TPUs as convolutions. A batch has a window over its
  # axis with padding in all places except one. Products with padding do not count.
  labels, kernel, result = re.split(r"_|->", x.attributes["dim_labels"])
  at = lambda shape, names, name: shape[names.index(name)]
  left, right = operands
  products = at(right, kernel, "i") * at(shape, result, "b") * at(shape, result, "f")
  window = dict(re.findall(r"(\w+)=([\w\-]+)", x.attributes.get("window", "")))
  for axis in filter(str.isdigit, labels):
    own = {name: text.split("x")[int(axis)] for name, text in window.items()}
    stride, dilation = int(own.get("stride", 1)), int(own.get("rhs_dilate", 1))
    padding, spread = own.get("pad", "0").partition("_")[0], own.get("lhs_dilate", 1)
    kernels = np.arange(at(right, kernel, axis)) * dilation - int(padding)
    places = np.arange(at(shape, result, axis))[:, None] * stride + kernels
    last = (at(left, labels, axis) - 1) * int(spread)
    inside = (places >= 0) & (places <= last) & (places % int(spread) == 0)
    products *= int(np.sum(inside))
  return 2 * products
