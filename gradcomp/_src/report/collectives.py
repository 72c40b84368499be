"""The collectives of a program: a record, the bytes that they send, and text tables."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gradcomp._src.exchange.collectives import REPEAT, STAGE

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
  **{"all_gather": "all-gather", "all_to_all": "all-to-all"},
  **dict.fromkeys(("pmax", "pmin", "psum"), "all-reduce"),
  **dict.fromkeys(("psum_scatter", "reduce_scatter"), "reduce-scatter"),
  "ppermute": "collective-permute",
}

# The bits of dtypes in HLO's spelling: the first number in the name.
_DTYPES = (
  "s1 u1 s2 u2 s4 u4 s8 u8 s16 u16 s32 u32 s64 u64 f16 bf16 f32 f64 c64 c128 f4e2m1fn "
  "f6e2m3fn f6e3m2fn f8e3m4 f8e4m3 f8e4m3fn f8e4m3b11fnuz f8e4m3fnuz f8e5m2 f8e5m2fnuz "
  "f8e8m0fnu"
)
BITS = {"pred": 1} | {x: int(re.findall(r"\d+", x)[0]) for x in _DTYPES.split()}


# The scopes of gradcomp.exchange, of the collective that completes a mean, and of
# gradcomp.parallel, with the floats that the plain one would send.
MEAN = re.compile(r"gradcomp_mean_(\d+)_over_(\d+)")
FLOATS = re.compile(r"gradcomp_float32_(\d+)")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each array
# The conditional, the number of its branch from 0, and the number of its branches.
Branch = tuple[str, int, int]
Pairs = Sequence[tuple[int, int]]  # of a permutation: from whom to whom
_Axes = Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective of a program; :func:`wire_report` documents its counts.

  Attributes:
    kind: the HLO opcode, ``"all-reduce"`` for ``all-reduce-start`` too.
    operands: dtype, in HLO's spelling, and shape of each array that a worker puts in.
    workers: the number of workers in the largest group that exchanges.
    times: the number of its runs in one execution of the program.
    in_loop: whether it is in a loop.
    trips_unknown: whether a loop around it has no known trip count, counted as one.
    branches: the branches around it, the outermost first, counted as taken: the name of
      the conditional, the number of the branch from 0, and the number of all branches.
    scope: the ``op_name`` of the instruction, with the names of ``jax.named_scope``.
    axis: the mesh axes along which these workers lie, joined by commas; empty if the
      mesh is unknown, or if no two workers exchange.
    again: whether it is a plain mean of a gradient that an exchange averages, too.
    moved: the bytes of a plain mean that count for a stage along another axis, above 0,
      in place of the collective that completes the mean, below 0.
    message: the number of its message in an :class:`Explanation`; else 0.
    packed: whether types narrower than a byte take only their bits.
    quantized: the dtype that XLA:TPU sends in place of the operands', or empty.
    span: the size of the aligned blocks of consecutive ranks that all sends stay in, in
      an :class:`Explanation`; else 0. Ranks are in the order of the axes.
  """

  kind: str
  operands: Shapes
  workers: int
  times: int
  in_loop: bool
  trips_unknown: bool
  scope: str
  branches: tuple[Branch, ...] = ()
  axis: str = ""
  again: bool = False
  moved: int = 0
  message: int = 0
  span: int = 0
  packed: bool = False
  quantized: str = ""

  @property
  def in_branch(self) -> bool:
    """True for a collective in a branch."""
    return bool(self.branches)

  @property
  def dtype(self) -> str:
    """The dtype that is sent; several different ones are joined by ``"+"``."""
    return self.quantized or "+".join(dict.fromkeys(x for x, _ in self.operands))

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
    """The bytes of the operands, as they are sent."""
    size = lambda dtype: max(BITS[dtype], 1 if self.packed else 8)
    arrays = [(self.quantized or x, math.prod(shape)) for x, shape in self.operands]
    return sum(-(-size(dtype) * elements // 8) for dtype, elements in arrays)

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
    """The bytes that a worker would send each time by a plain f32 all-reduce."""
    # The collective that completes a mean counts for all of its stages. One of
    # gradcomp.parallel counts as its own in float32, others as sent, and repeats not.
    if REPEAT in self.scope:
      return 0
    share = SHARE_SENT[self.kind](self.workers)
    plain = [math.ceil(share * 4 * size) for (size,) in self._named(FLOATS)]
    plain += [math.ceil(plain_bytes(size, n)) for size, n in self.means]
    if plain:
      return sum(plain) + self.moved
    if STAGE in self.scope or self.again:
      return self.moved
    return dataclasses.replace(self, quantized="").bytes_sent

  @property
  def means(self) -> list[tuple[int, int]]:
    """The elements and the workers of each mean that it completes."""
    # A repeat is of a mean that was completed before.
    return [] if REPEAT in self.scope else self._named(MEAN)

  def _named(self, pattern: re.Pattern[str]) -> list[Any]:
    """Returns the numbers in the matches of a pattern in the scope, by messages."""
    # XLA:GPU joins the names of collectives that it combines, "a/(b/..:c/..)", and
    # leaves one of equal names. An exchange gathers one array a message.
    # Arrays of one name have one size, and more numbers are in a larger array.
    found = [tuple(map(int, x.groups())) for x in pattern.finditer(self.scope)]
    sizes = [math.prod(shape) for shape in self.shapes]
    order = sorted(set(sizes))
    same = len(order) == len(found)  # else names belong to unknown arrays
    if self.kind != "all-gather" or not same or len(sizes) == len(found):
      return found
    by_size = dict(zip(order, sorted(found, key=lambda x: x[0]), strict=True))
    return [by_size[size] for size in sizes]


def plain_bytes(elements: Any, workers: int) -> Any:
  """Returns the bytes that a worker sends by a plain mean in float32, not rounded."""
  return SHARE_SENT["all-reduce"](workers) * 4 * elements


def dearest(
  found: Iterable[Collective],
  count: Callable[[Collective], int] = lambda x: x.times * x.bytes_sent,
  depth: int = 0,
) -> int:
  """Adds counts, by default bytes, and of each conditional the most of its branches."""
  total, inside = 0, dict[str, dict[int, list[Collective]]]()
  for x in found:
    if len(x.branches) == depth:
      total += count(x)
    else:
      name, number, _ = x.branches[depth]
      inside.setdefault(name, {}).setdefault(number, []).append(x)
  for branches in inside.values():
    total += max(dearest(x, count, depth + 1) for x in branches.values())
  return total


def by_link(found: Sequence[Collective]) -> tuple[Collective, ...]:
  """Splits plain means that are completed along one of two axes between both."""
  # A mean inside groups of C keeps 2 (C-1)/C 4 e of its bytes. The rest is between
  # groups, as where a plain mean adds inside groups first.
  moved = [0] * len(found)
  stages = [i for i, x in enumerate(found) if x.axis and STAGE in x.scope]
  for i, x in enumerate(found):
    for elements, workers in x.means if x.axis else []:
      beyond = [
        j
        for j in stages
        if x.workers * found[j].workers == workers
        and (x.times, x.branches) == (found[j].times, found[j].branches)
        and set(x.axis.split(",")).isdisjoint(found[j].axis.split(","))
      ]
      if beyond:
        whole, own = (plain_bytes(elements, n) for n in (workers, x.workers))
        between = math.ceil(whole) - math.ceil(own)
        moved[i] -= between
        moved[min(beyond, key=lambda j: abs(i - j))] += between
  pairs = zip(found, moved, strict=True)
  return tuple(dataclasses.replace(x, moved=n) if n else x for x, n in pairs)


def means_in(scopes: Iterable[str]) -> set[str]:
  """Returns the names of means in scopes, of some elements over several workers."""
  return {x[0] for x in MEAN.finditer(" ".join(scopes)) if int(x[1]) and int(x[2]) > 1}


def is_exchange(scope: str) -> bool:
  """Returns True for the scope of a collective of an exchange of gradients."""
  return bool(MEAN.search(scope)) or STAGE in scope


def connected(pairs: Pairs) -> list[set[int]]:
  """Returns the sets of workers that a permutation connects."""
  group_of: dict[int, set[int]] = {}
  for pair in pairs:
    small, large = sorted((group_of.setdefault(x, {x}) for x in pair), key=len)
    large |= small
    group_of |= dict.fromkeys(small, large)
  return [*{id(group): group for group in group_of.values()}.values()]


def span(axes: _Axes, data: _Axes, sizes: Mapping[str, int], pairs: Pairs) -> int:
  """Returns the size of the aligned blocks of ranks that all sends stay in."""
  # The axes are a collective's and all workers', and pairs a permutation's, or empty.
  first = min((data.index(axis) for axis in axes if axis in data), default=0)
  workers = math.prod(sizes[axis] for axis in data[first:])
  behind = {x: math.prod(sizes[y] for y in data[i:]) for i, x in enumerate(data, 1)}
  if not pairs:
    return workers
  places = np.unravel_index(np.array(pairs), [sizes[axis] for axis in axes])
  ranks = sum(behind.get(x, 0) * place for x, place in zip(axes, places, strict=True))
  together = lambda length: np.ptp(ranks // length, axis=1).max() == 0
  lengths = (x for x in range(1, workers) if workers % x == 0)
  return next(filter(together, lengths), workers)


def cells(x: Collective, operands: str = "", **counts: str) -> dict[str, str]:
  """Returns the cells of a collective, by their columns in the order of all reports."""
  return {
    "collective": x.kind,
    "dtype": x.dtype,
    "operands": operands,
    "axis": x.axis,
    "workers": f"{x.workers:,}",
    "times": "loop " * x.trips_unknown + "branch " * x.in_branch + f"{x.times:,}",
    "bytes sent": f"{x.times * x.bytes_sent:,}",
    **counts,
    "scope": "/".join(x.scope.split("/")[-2:]),
  }


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
  """Returns the lines of a table, with the columns of the first row."""
  return aligned([[*rows[0]], *([row.get(x, "") for x in rows[0]] for row in rows)])


_NUMBER = re.compile(r"(?:loop )?(?:branch )?[-+\d.,e]*|inf|nan|\?")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns one line a row, with columns of numbers flush right, no empty ones."""
  columns = []
  for head, *cells in zip(*rows, strict=True):
    width = max(map(len, (head, *cells)))
    pad = str.rjust if all(map(_NUMBER.fullmatch, cells)) else str.ljust
    if any(cells):
      columns.append([pad(x, width) for x in (head, *cells)])
  return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
