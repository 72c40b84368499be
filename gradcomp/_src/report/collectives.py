"""The collectives of a program: one record, and one table of the bytes that they send.

``explain`` and ``trace_wire`` read them from a trace, ``wire_report`` from optimized
HLO, and :mod:`gradcomp.cost` predicts their seconds.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

# The bytes that one of n workers sends for each byte of its operands: by the best
# algorithms for a ring.
SHARE_SENT: dict[str, Callable[[int], Fraction]] = {
  "all-reduce": lambda n: Fraction(2 * (n - 1), n),
  "reduce-scatter": lambda n: Fraction(n - 1, n),
  "all-to-all": lambda n: Fraction(n - 1, n),
  "all-gather": lambda n: Fraction(n - 1),
  "ragged-all-to-all": lambda n: Fraction(n > 1),
  "collective-permute": lambda n: Fraction(n > 1),
  "collective-broadcast": lambda n: Fraction(n > 1),
}

# The HLO opcodes of JAX's primitives, whose names in typed maps end in _invariant.
KINDS = {
  "all_gather": "all-gather",
  "all_to_all": "all-to-all",
  "pmax": "all-reduce",
  "pmin": "all-reduce",
  "ppermute": "collective-permute",
  "psum": "all-reduce",
  "psum_scatter": "reduce-scatter",
  "reduce_scatter": "reduce-scatter",
}

_DTYPES = {
  1: "pred s1 u1 s2 u2 s4 u4 s8 u8 f4e2m1fn f8e3m4 f8e4m3 f8e4m3fn f8e4m3b11fnuz "
  "f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
  2: "s16 u16 f16 bf16",
  4: "s32 u32 f32",
  8: "s64 u64 f64 c64",
  16: "c128",
}
SIZES = {dtype: size for size, names in _DTYPES.items() for dtype in names.split()}

# The scopes that gradcomp.exchange puts around the collective that completes a mean,
# and around the stages before it.
_MEAN = re.compile(r"gradcomp_mean_(\d+)_over_(\d+)")
_STAGE = "gradcomp_stage"

# The scope of a collective of gradcomp.parallel, with the number of floats that the
# uncompressed one would send.
_FLOATS = re.compile(r"gradcomp_float32_(\d+)")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each array
Pairs = Iterable[tuple[int, int]]  # of a permutation: from whom to whom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective of a program; :func:`wire_report` documents its counts.

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
    axis: the mesh axes along which these workers lie, joined by commas. It is empty if
      the mesh is unknown, or if no two workers exchange.
    message: the number of its message in an :class:`Explanation`; else 0.
    span: the size of the aligned blocks of consecutive ranks that all sends stay in, in
      an :class:`Explanation`; else 0. Ranks are in the order of the axes.
  """

  kind: str
  operands: Shapes
  workers: int
  times: int
  in_loop: bool
  in_branch: bool
  scope: str
  axis: str = ""
  message: int = 0
  span: int = 0

  @property
  def dtype(self) -> str:
    """The dtype of the operands; several different ones are joined by ``"+"``."""
    return "+".join(dict.fromkeys(dtype for dtype, _ in self.operands))

  @property
  def shapes(self) -> tuple[tuple[int, ...], ...]:
    """The shapes of the operands."""
    return tuple(shape for _, shape in self.operands)

  @property
  def elements(self) -> int:
    """The number of elements of the operands."""
    return sum(map(math.prod, self.shapes))

  @property
  def bytes_in(self) -> int:
    """The bytes of the operands."""
    return sum(SIZES[dtype] * math.prod(shape) for dtype, shape in self.operands)

  @property
  def exact_bytes_sent(self) -> Fraction:
    """The bytes that a worker sends each time, not rounded."""
    return SHARE_SENT[self.kind](self.workers) * self.bytes_in

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends each time, rounded up."""
    return math.ceil(self.exact_bytes_sent)

  @property
  def dense_bytes(self) -> int:
    """The bytes that a worker would send each time by a plain f32 all-reduce.

    The collective that completes a mean of gradcomp counts for the whole mean, and the
    stages before it count 0. A collective of :mod:`gradcomp.parallel` counts for the
    same one of ``float32``. Other collectives count their ``bytes_sent``.
    """
    if match := _MEAN.search(self.scope):
      elements, workers = map(int, match.groups())
      return math.ceil(SHARE_SENT["all-reduce"](workers) * 4 * elements)
    if match := _FLOATS.search(self.scope):
      return math.ceil(SHARE_SENT[self.kind](self.workers) * 4 * int(match[1]))
    return 0 if _STAGE in self.scope else self.bytes_sent


def connected(pairs: Pairs) -> list[set[int]]:
  """Returns the sets of workers that a permutation connects."""
  near: dict[int, list[int]] = {}
  for a, b in pairs:
    near.setdefault(a, []).append(b)
    near.setdefault(b, []).append(a)
  groups: list[set[int]] = []
  seen: set[int] = set()
  for first in near:
    if first in seen:
      continue
    group, last = {first}, [first]
    while last:
      last = [x for x in {y for z in last for y in near[z]} if x not in group]
      group.update(last)
    groups.append(group)
    seen |= group
  return groups


def span(
  axes: Sequence[str], data: Sequence[str], sizes: Mapping[str, int], pairs: Pairs
) -> int:
  """Returns the size of the aligned blocks of consecutive ranks that all sends stay in.

  ``axes`` are those of a collective, ``data`` those of all workers, and ``pairs`` those
  of a permutation; empty for other collectives.
  """
  first = min((data.index(axis) for axis in axes if axis in data), default=0)
  workers = math.prod(sizes[axis] for axis in data[first:])
  place = functools.partial(_place, axes=axes, data=data, sizes=sizes)
  pairs = [(place(i), place(j)) for i, j in pairs]
  for length in range(1, workers if pairs else 1):
    if workers % length == 0 and all(i // length == j // length for i, j in pairs):
      return length
  return workers


def _place(
  index: int, *, axes: Sequence[str], data: Sequence[str], sizes: Mapping[str, int]
) -> int:
  """Converts an index along some axes to a global worker rank."""
  result = 0
  for axis in reversed(axes):
    index, own = divmod(index, sizes[axis])
    if axis in data:
      behind = data[data.index(axis) + 1 :]
      result += own * math.prod(sizes[other] for other in behind)
  return result
