"""Reads what a program sends from the text that XLA compiled it to.

A formula of this library could drift from what runs; the optimized HLO cannot. Bytes
are dtype times shape of the operands in it, and nothing else.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

import jax

from gradcomp._table import aligned

# The bytes that one of n workers sends for each byte of its operands.
_SHARE_SENT: dict[str, Callable[[int], Fraction]] = {
  "all-reduce": lambda n: Fraction(2 * (n - 1), n),
  "reduce-scatter": lambda n: Fraction(n - 1, n),
  "all-to-all": lambda n: Fraction(n - 1, n),
  "all-gather": lambda n: Fraction(n - 1),
  "ragged-all-to-all": lambda n: Fraction(n > 1),
  "collective-permute": lambda n: Fraction(n > 1),
  "collective-broadcast": lambda n: Fraction(n > 1),
}

_DTYPES = {
  1: "pred s1 u1 s2 u2 s4 u4 s8 u8 f4e2m1fn f8e3m4 f8e4m3 f8e4m3fn f8e4m3b11fnuz "
  "f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
  2: "s16 u16 f16 bf16",
  4: "s32 u32 f32",
  8: "s64 u64 f64 c64",
  16: "c128",
}
_SIZES = {dtype: size for size, names in _DTYPES.items() for dtype in names.split()}

# The scopes that gradcomp.exchange puts around the collective that completes a mean,
# and around the stages before it.
_MEAN = re.compile(r"gradcomp_mean_(\d+)_over_(\d+)")
_STAGE = "gradcomp_stage"

# "ENTRY %main (x: f32[8]) -> f32[8] {" or in short "ENTRY main {".
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
# "ROOT %name = type opcode(rest": in no type does a word touch a parenthesis.
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# "body=%region_0" or "branch_computations={%a, %b}".
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"[\w.\-]+")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")  # f32[8,128]; <=8 is a bound
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective of a program; :func:`wire_report` says what is counted.

  Attributes:
    kind: the HLO opcode, ``"all-reduce"`` for ``all-reduce-start`` too.
    operands: dtype, in HLO's spelling, and shape of each array that a worker puts in.
    workers: the number of workers that exchange with each other, the largest group's if
      groups differ.
    times: the number of its runs in one execution of the program.
    in_loop: whether it is inside a loop of unknown trip count, which ``times`` counts
      once.
    in_branch: whether it is inside a branch of a conditional, which ``times`` counts as
      taken.
    scope: the ``op_name`` of the instruction, with the names of ``jax.named_scope``.
  """

  kind: str
  operands: tuple[tuple[str, tuple[int, ...]], ...]
  workers: int
  times: int
  in_loop: bool
  in_branch: bool
  scope: str

  @property
  def dtype(self) -> str:
    """The dtype of the operands; several different ones are joined by ``"+"``."""
    return "+".join(dict.fromkeys(dtype for dtype, _ in self.operands))

  @property
  def shapes(self) -> tuple[tuple[int, ...], ...]:
    """The shapes of the operands."""
    return tuple(shape for _, shape in self.operands)

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends each time, rounded up."""
    operand_bytes = sum(_SIZES[dtype] * math.prod(s) for dtype, s in self.operands)
    return math.ceil(_SHARE_SENT[self.kind](self.workers) * operand_bytes)

  @property
  def dense_bytes(self) -> int:
    """The bytes that a worker would send each time by a plain f32 all-reduce.

    The collective that completes a mean of gradcomp counts for the whole mean, and the
    stages before it count 0. Other collectives count their ``bytes_sent``.
    """
    if match := _MEAN.search(self.scope):
      elements, workers = map(int, match.groups())
      return math.ceil(_SHARE_SENT["all-reduce"](workers) * 4 * elements)
    return 0 if _STAGE in self.scope else self.bytes_sent

  def _row(self) -> list[str]:
    counts = collections.Counter(self.shapes).items()
    arrays = [f"{n} x " * (n > 1) + str(list(shape)) for shape, n in counts]
    return [
      self.kind,
      self.dtype,
      " ".join(arrays) if len(arrays) <= 3 else f"{len(self.shapes)} arrays",
      f"{self.workers:,}",
      "loop " * self.in_loop + "branch " * self.in_branch + f"{self.times:,}",
      f"{self.times * self.bytes_sent:,}",
      f"{self.times * self.dense_bytes:,}",
      "/".join(self.scope.split("/")[-2:]),
    ]


@dataclasses.dataclass(frozen=True)
class WireReport:
  """The collectives of a program; ``str(report)`` is a table of them.

  Attributes:
    collectives: one :class:`Collective` for each, in the order of the program.

  Example:
    >>> report = WireReport(())
    >>> report.bytes_sent, report.dense_bytes, report.ratio
    (0, 0, 1.0)
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

  def __str__(self) -> str:
    if not self.collectives:
      return "The program has no collectives: it sends nothing."
    header = "collective,dtype,operands,workers,times,bytes sent,as f32 mean,scope"
    total = ["total", *[""] * 4, f"{self.bytes_sent:,}", f"{self.dense_bytes:,}", ""]
    rows = [header.split(","), *(c._row() for c in self.collectives), total]
    lines = aligned(rows, right=range(3, 7))
    lines.append(f"Sends {self.ratio:.4g} x the bytes of a plain f32 mean.")
    if any(c.in_loop for c in self.collectives):
      lines.append("loop: its trip count is unknown; counted once, a lower bound.")
    if any(c.in_branch for c in self.collectives):
      lines.append("branch: of a conditional; every branch counts, an upper bound.")
    return "\n".join(lines)


def wire_report(program: jax.stages.Compiled | jax.stages.Lowered | str) -> WireReport:
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
  all-reduce of their ``e`` gradient elements. For others, these are ``bytes_sent``.

  Args:
    program: ``jax.jit(step).lower(...).compile()``, or the same without ``.compile()``,
      which is done here; or the optimized HLO text of one program.

  Returns:
    A :class:`WireReport`; ``print`` shows a table of its collectives.

  Raises:
    TypeError: ``program`` is something else, such as the jitted function.
    ValueError: the text is not optimized HLO, or some of its bytes would be missed.

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
  return WireReport(tuple(_collectives(text)))


def _parse(text: str) -> tuple[dict[str, list[tuple[str, ...]]], str, int]:
  """Returns a text's computations, the name of its entry, and the number of devices.

  Instructions are the groups of ``_INSTRUCTION``.
  """
  computations: dict[str, list[tuple[str, ...]]] = {}
  body: list[tuple[str, ...]] = []
  entries = []
  for line in text.splitlines():
    line = re.sub(r"/\*.*?\*/", "", line).strip()  # /*index=5*/
    if match := _INSTRUCTION.match(line):
      body.append(match.groups())
    elif match := _COMPUTATION.match(line):
      body = computations.setdefault(match[2], [])
      entries += [match[2]] if match[1] else []
  header = re.findall(r"^HloModule .*$", text, re.MULTILINE)
  if len(header) != 1 or len(entries) != 1:
    raise _unreadable("one HloModule with one ENTRY", text[:40])
  counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header[0])
  return computations, entries[0], math.prod(map(int, counts))


def _collectives(text: str) -> Iterator[Collective]:
  """Yields the collectives of a text, also of computations that it calls."""
  computations, entry, devices = _parse(text)

  def walk(name: str, times: int, loop: bool, branch: bool) -> Iterator[Collective]:
    if name not in computations:
      raise _unreadable("every computation that it calls", name)
    types = {name: type_ for name, type_, _, _ in computations[name]}
    for _, _, opcode, rest in computations[name]:
      kind = opcode.removesuffix("-start")
      plain = _STRING.sub("", rest)
      if kind in _SHARE_SENT:
        op_name = re.search(rf"op_name=({_STRING.pattern})", rest)
        yield Collective(
          kind=kind,
          operands=_operands(kind, plain, types),
          workers=_workers(kind, plain, devices),
          times=times,
          in_loop=loop,
          in_branch=branch,
          scope=op_name[1][1:-1] if op_name else "",
        )
      elif not opcode.endswith(("-update", "-done")):  # these repeat a -start's calls
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
        inner_loop = loop or (opcode == "while" and not trips)
        inner_branch = branch or opcode == "conditional"
        for attribute, called in _CALLED.findall(plain):
          runs = int(trips[1]) + (attribute == "condition") if trips else 1
          for callee in _NAME.findall(called):
            yield from walk(callee, times * runs, inner_loop, inner_branch)

  return walk(entry, 1, False, False)


def _operands(
  kind: str, rest: str, types: dict[str, str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Returns dtype and shape of each operand.

  They are not read from the type of the instruction: that of a -start holds results,
  too.
  """
  text = re.sub(r"\{[^{}]*\}", "", rest).partition(")")[0]  # no {1,0:T(8,128)}
  arrays = _ARRAY.findall(text)
  if not arrays:  # names without types, as XLA prints them today
    found = [types.get(name, "undefined[]") for name in _NAME.findall(text)]
    arrays = _ARRAY.findall(" ".join(found))
  if unknown := {dtype for dtype, _ in arrays} - _SIZES.keys():
    raise _unreadable("known dtypes", f"{', '.join(unknown)} in {kind}({text})")
  if kind == "ragged-all-to-all":
    arrays = arrays[:1]  # then come the output's buffer, offsets and sizes
  return tuple((dtype, tuple(map(int, re.findall(r"\d+", s)))) for dtype, s in arrays)


def _workers(kind: str, rest: str, devices: int) -> int:
  """Returns the size of a group, which XLA writes in four ways."""
  match = re.search(r"source_target_pairs=\{([{},\d]*)\}", rest)
  if kind == "collective-permute" and match:
    pairs = re.findall(r"(\d+),(\d+)", match[1])
    return len({worker for a, b in pairs if a != b for worker in (a, b)}) or 1
  if "replica_groups=" not in rest or "replica_groups={}" in rest:
    return devices
  if match := re.search(r"replica_groups=\{([{},\d]*)\}", rest):  # {{0,1},{2,3}}
    return max(group.count(",") + 1 for group in match[1].split("},"))
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):  # [2,4]<=[8]
    return int(match[1])
  # mesh['a'=2,'b'=8] {'a','b':(1)4}: all of the axis a and 4 of the 8 of b.
  if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", rest):
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
    axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
    if all(part or axis in sizes for axis, part in axes):
      return math.prod(int(part or sizes[axis]) for axis, part in axes)
  raise _unreadable("known replica groups", f"{kind}({rest}")


def _unreadable(rule: str, got: str) -> ValueError:
  """Returns the error for a text that breaks a rule."""
  return ValueError(
    f"`program` must be optimized HLO with {rule}, got {got!r}; pass "
    "jax.jit(step).lower(...).compile(), and report it to gradcomp if you did."
  )
