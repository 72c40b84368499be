"""EDEN: blocks that each worker rotates at random, rounded to levels for a Gaussian."""

import dataclasses
import functools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.tiles import in_order
from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.dithers import threefry2x32
from gradcomp._src.kernels.common.fixed_point import divide, held, inverse, sign_bit
from gradcomp._src.kernels.common.scales import norms, sum_by_halves
from gradcomp._src.kernels.materialize import LARGE

Scale = Literal["unbiased", "least squares"]

# Squared errors of the levels for normal numbers, by bits.
_LOST = (0.3634, 0.1175, 0.0345, 0.0095, 0.0025, 0.00064, 0.00016, 0.00004)
_ROUNDS = 13  # of the cipher, as in dithers
_SMALLEST = np.float32(2.0**-96)  # a block of smaller numbers is sent as zeros
_MOST = np.float32(np.finfo(np.float32).max)
_SPARE = 4  # powers of two by which a scale is less, so that it does not overflow
_FEW = 8  # levels that comparisons find sooner than reads of a table do
_PART = 2**15  # elements that a CPU encodes at a time, in its cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eden(Codec):
  r"""Rotates each block at random, and rounds it to the best levels for a Gaussian.

  A worker turns a block :math:`x` of d elements by :math:`R = H D`, with its own random
  signs :math:`D` and the orthonormal Hadamard matrix :math:`H`. Elements of
  :math:`\sqrt d R x / |x|` are nearly standard normal, whatever :math:`x` is. Each is
  rounded to the nearest of ``2**bits`` levels :math:`q` of least squared error for
  normal numbers (Lloyd and Max). A block decodes by itself to

  .. math:: R^{-1} S q, \qquad S = \frac{|x|^2}{\langle R x, q \rangle} \text{ or }
     S = \frac{\langle R x, q \rangle}{|q|^2}

  for ``scale="unbiased"`` and ``"least squares"``. A row holds codes, the seed of the
  signs and the scale: ``bits + 64 / block_size`` bits an element, 1.016 at 1 bit.

  The squared error over :math:`|x|^2` is D by least squares, and D / (1 - D) unbiased.
  Errors of workers are independent, and a mean of N unbiased messages has an Nth of it.
  On gradients of workers' own batches that is the least of all codecs here at equal
  bits. Where all gradients are nearly the same, QSGD has less, because its dithers
  cancel.

  ========  ======  ======  ======  ======  =======  =======  =======  =======
  bits      1       2       3       4       5        6        7        8
  ========  ======  ======  ======  ======  =======  =======  =======  =======
  D         0.3634  0.1175  0.0345  0.0095  0.00250  0.00064  0.00016  0.00004
  unbiased  0.5708  0.1331  0.0358  0.0096  0.00251  0.00064  0.00016  0.00004
  ========  ======  ======  ======  ======  =======  =======  =======  =======

  Use it with ``exchange="all_gather"``, where each message is encoded once. A worker
  decodes N messages, each by log2(d) additions an element. Other exchanges rotate and
  round partial sums again. An owner that keeps a residual encodes by least squares,
  which is biased.

  The unbiased scale makes :math:`\langle x, R^{-1} S q \rangle` equal to :math:`|x|^2`
  in each message. It is exactly unbiased for a uniformly random rotation only; 20,000
  messages of Gaussian blocks of 1024 showed no bias. If one element has half the
  squared length of its block, the others arrive as 0.83 of their size on average at 1
  bit, and as 0.999 at 4 bits. If it has 1000 times the others' squared length, they
  arrive as 0 and 0.03. ``rotations=2`` turns twice by other signs, in twice the time:
  both were 1.00 within 0.012.

  A block of magnitudes below ``2**-96`` decodes to zeros. Elements beyond the largest
  float32 number become that number. Three things differ from the papers. They turn a
  whole vector; here blocks have a scale each, so that owners can have shares and each
  row decodes alone. Levels are multiples of ``2**-16``. The second rotation is not
  theirs.

  Attributes:
    bits: bits of a code, 1 to 8; 1 bit is DRIVE. Default: 4.
    block_size: d, the elements that are turned together, a power of two from 32 to
      65536. Default: 4096.
    scale: ``"unbiased"`` or ``"least squares"``. Default: ``"unbiased"``.
    rotations: how often a block is turned, 1 or 2. Default: 1.

  Example:
    >>> codec = Eden(bits=2)
    >>> x = jax.random.normal(jax.random.key(0), (4096,))
    >>> payload = jax.jit(codec.encode)(x, key=jax.random.key(1))
    >>> payload.rows.shape  # 2 bits an element, a seed and a scale
    (1, 258)
    >>> lost = jax.jit(codec.decode)(payload, like=x) - x
    >>> print(f"{jnp.sum(lost**2) / jnp.sum(x**2):.2f}")
    0.14

  References:
    Vargaftik et al., `EDEN <https://arxiv.org/abs/2108.08842>`_, 2022; Vargaftik et
    al., `DRIVE <https://arxiv.org/abs/2105.08339>`_, 2021
  """

  bits: int = checks.field(4, checks.integer("1 to 8", 1, 8))
  block_size: int = checks.field(4096, checks.power_of_two(32, 65536))
  scale: Scale = checks.field("unbiased", checks.choice(Scale))
  rotations: int = checks.field(1, checks.integer("1 or 2", 1, 2))

  needs_key: ClassVar[bool] = True
  papers: ClassVar[tuple[str, ...]] = ("vargaftik2022eden", "vargaftik2021drive")

  @property
  def unbiased(self) -> bool:
    return self.scale == "unbiased"

  @property
  def contraction(self) -> float:
    lost = 1.1 * _LOST[self.bits - 1]  # a tenth more of blocks that are hardly normal
    return 1 - lost if self.scale == "least squares" else 1 - lost / (1 - lost)

  def to_nearest(self) -> "Eden":
    """Returns the codec with least squares, for owners that keep residuals."""
    return dataclasses.replace(self, scale="least squares")

  @property
  def tile_size(self) -> int:
    return self.block_size

  @property
  def row_words(self) -> int:
    return self.block_size // 32 * self.bits + 2

  @property
  def _doublings(self) -> int:
    """The additions of all rotations: scales make up for half, levels for the rest."""
    return self.rotations * (self.block_size.bit_length() - 1)

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    x, drawn = tiles.reshape(-1, self.block_size), context.drawn
    # A worker's mask is counted, so that each has signs of its own. XORed with signs it
    # would leave them, or turn all of them around, which changes no error.
    number = jnp.arange(len(x), dtype=jnp.uint32)
    seeds, _ = threefry2x32(drawn[:2], (number, drawn[2]), _ROUNDS)
    return _by_parts(self._encode, self.block_size, x, seeds)

  def decode_rows(self, rows: Array) -> Array:
    return _by_parts(self._decode, self.block_size, rows)

  def sum_rows(self, rows: Array) -> Array:
    """Decodes ``uint32[K, rows, words]``, and adds K payloads in their order."""
    return _by_parts(self._sum, self.block_size, rows.swapaxes(0, 1))

  def _sum(self, rows: Array) -> Array:
    add = lambda k, total: total + self._decode(rows[:, k])
    # A decoder is too long to be compiled anew for each worker.
    return in_order(add, rows.shape[1], self._decode(rows[:, 0]), unrolled=1)

  def _encode(self, x: Array, seeds: Array) -> Array:
    turned, unit = _near_one(x, self._doublings // 2)
    for turn in range(self.rotations):
      turned = _hadamard(_with_signs(turned, seeds, turn))
    size, energy = jnp.abs(turned), sum_by_halves(held(turned * turned))
    normal = size * inverse(math.sqrt(self.block_size), jnp.sqrt(energy))[:, None]
    number, level = _nearest(normal, normal_levels(self.bits))
    along = sum_by_halves(held(size * level))
    if self.scale == "unbiased":
      scale = divide(energy, along)
    else:
      scale = divide(along, sum_by_halves(held(level * level)))
    scale = planes.float_words(jnp.where(unit == 0, 0.0, scale * unit))
    codes = number | sign_bit(turned) >> (32 - self.bits)
    words = _packed(codes, self.bits)
    return jnp.concatenate([*words, seeds[:, None], scale[:, None]], axis=1)

  def _decode(self, rows: Array) -> Array:
    codes = _unpacked(rows, self.block_size, self.bits)
    seeds, scale = rows[:, -2], planes.floats(rows[:, -1:])
    back = 2.0 ** (_SPARE + self._doublings // 2 - self._doublings)
    levels = normal_levels(self.bits) * np.float32(back)
    level = _read(codes & np.uint32(len(levels) - 1), levels)
    turned = _hadamard(fixed_point.signed(level, sign_bit(codes << (32 - self.bits))))
    for turn in range(self.rotations - 1, 0, -1):
      turned = _hadamard(_with_signs(turned, seeds, turn))
    # Signs come last, so that no compiler contracts the product with a later sum.
    return _with_signs(jnp.clip(turned * scale, -_MOST, _MOST), seeds, 0)


def _by_parts(function: Callable[..., Array], block: int, *given: Array) -> Array:
  """Applies a function to rows; on a CPU to a few at a time, within its cache."""
  rows, each = len(given[0]), max(1, _PART // block)
  sharded = any(axis for x in given for axis in jax.typeof(x).sharding.spec)
  if rows * block < LARGE or sharded:
    return function(*given)

  def parts(*given: Array) -> Array:
    def cut(x: Array) -> Array:
      filled = jnp.pad(x, [(0, -rows % each)] + [(0, 0)] * (x.ndim - 1))
      return filled.reshape(-1, each, *x.shape[1:])

    found = jax.lax.map(lambda part: function(*part), tuple(map(cut, given)))
    return found.reshape(-1, found.shape[-1])[:rows]

  return jax.lax.platform_dependent(*given, cpu=parts, default=function)


def _near_one(x: Array, halvings: int) -> tuple[Array, Array]:
  """Scales rows to largest magnitudes of 1 to 4; units are 0 for zeros, or NaN."""
  largest = norms(x, "max")
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
  exponent = jnp.clip(bits >> 23, int(_SMALLEST.view(np.int32)) >> 23, 253)
  power = lambda n: jax.lax.bitcast_convert_type(n << 23, jnp.float32)
  none, finite = largest < _SMALLEST, jnp.isfinite(largest)
  unit = jnp.where(finite, power(exponent - halvings - _SPARE), jnp.nan)
  down = jnp.where(none, 0.0, power(254 - exponent))
  return x * down[:, None], jnp.where(none, 0.0, unit)


def _with_signs(x: Array, seeds: Array, turn: int) -> Array:
  """Changes signs of elements at random, by each row's seed and the turn's number."""
  columns = jax.lax.broadcasted_iota(jnp.uint32, (1, x.shape[1] // 32), 1)
  key, number = (seeds[:, None], jnp.uint32(turn)), (columns, jnp.uint32(0))
  words, _ = threefry2x32(key, number, _ROUNDS)
  plane = jax.lax.broadcasted_iota(jnp.uint32, (1, 32, 1), 1)
  signs = (words[:, None] >> plane) << 31
  return planes.floats(planes.float_words(x) ^ signs.reshape(x.shape))


def _hadamard(x: Array) -> Array:
  """Multiplies rows by the Hadamard matrix of entries 1 and -1, which is symmetric."""
  pairs, last = divmod(x.shape[1].bit_length() - 1, 2)
  x = jax.lax.fori_loop(0, pairs, lambda _, x: _round(x, 4), x)
  return _round(x, 2) if last else x


def _round(x: Array, count: int) -> Array:
  """Transforms groups of 2 or 4 neighbors, and puts like results side by side."""
  # Behind all rounds elements have their first order again. The rounds are one program,
  # in a loop, which XLA:CPU would else fuse, and compute elements anew for each reader.
  groups = x.reshape(len(x), x.shape[1] // count, count)
  parts = [groups[..., k] for k in range(count)]
  for _ in range(count.bit_length() - 1):
    first, second = parts[0::2], parts[1::2]
    sums = [*map(jnp.add, first, second)]
    parts = sums + [*map(jnp.subtract, first, second)]
  return jnp.concatenate(parts, axis=1)


def _nearest(size: Array, levels: np.ndarray) -> tuple[Array, Array]:
  """Returns the numbers of the levels nearest to magnitudes, and these levels."""
  edges = (levels[1:] + levels[:-1]) / 2
  number = jnp.zeros(size.shape, jnp.uint32)
  if len(levels) <= _FEW:
    level = jnp.full(size.shape, levels[0])
    for i, edge in enumerate(edges, start=1):
      reached = size >= edge
      number = jnp.where(reached, np.uint32(i), number)
      level = jnp.where(reached, levels[i], level)
    return number, level
  step = len(levels) // 2
  while step:  # a search by halves
    reached = size >= _read(number + np.uint32(step - 1), edges)
    number = number + jnp.where(reached, np.uint32(step), np.uint32(0))
    step //= 2
  return number, _read(number, levels)


def _read(number: Array, table: np.ndarray) -> Array:
  """Returns the entries of a table that have these numbers."""
  if len(table) == 1:
    return jnp.full(number.shape, table[0])
  return jnp.asarray(table).at[number].get(mode="promise_in_bounds")


def _widths(bits: int) -> list[tuple[int, int]]:
  """Returns the parts of a code, as first bits and widths that divide 32."""
  return [(bits & (width - 1), width) for width in (1, 2, 4, 8) if bits & width]


def _packed(codes: Array, bits: int) -> list[Array]:
  """Packs rows of codes into words, each part of a code into words of its own."""
  parts = []
  for first, width in _widths(bits):
    part = (codes >> first) & np.uint32(2**width - 1)
    part = part.reshape(len(codes), 32 // width, codes.shape[1] // 32 * width)
    parts.append(planes.pack_planes([part[:, k] for k in range(32 // width)], width))
  return parts


def _unpacked(rows: Array, size: int, bits: int) -> Array:
  """Unpacks rows to codes, ``uint32[rows, size]``."""
  codes, start = jnp.zeros((len(rows), size), jnp.uint32), 0
  for first, width in _widths(bits):
    stop = start + size // 32 * width
    part = planes.unpack_planes(rows[:, start:stop], width)
    codes, start = codes | part.reshape(codes.shape) << first, stop
  return codes


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
  """Returns the positive half of ``2**bits`` levels for a standard normal number.

  Each is the mean of the numbers nearest to it (Lloyd, 1957; Max, 1960), by Newton's
  method, rounded to a multiple of 2**-16, so that all hosts have the same bits.

  Example:
    >>> normal_levels(2)
    array([0.45277405, 1.5104218 ], dtype=float32)
  """
  count, normal = 2 ** (bits - 1), NormalDist()
  # Many levels are as dense as the third root of the density (Panter and Dite, 1951).
  start = [normal.inv_cdf((count + i + 0.5) / (2 * count)) for i in range(count)]
  levels = math.sqrt(3) * np.array(start)
  for _ in range(12):
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    above = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in edges])
    share = above[:-1] - above[1:]
    mean = (density[:-1] - density[1:]) / share
    # By how much a mean moves with the edge below and above, half as fast as a level.
    below = (mean - edges[:-1]) * density[:-1] / share / 2
    over = (edges[1:-1] - mean[:-1]) * density[1:-1] / share[:-1] / 2
    slopes = np.diag(1 - np.append(0.0, below[1:]) - np.append(over, 0.0))
    slopes -= np.diag(below[1:], -1) + np.diag(over, 1)
    levels = levels - np.linalg.solve(slopes, levels - mean)
  return (np.round(levels * 2**16) / 2**16).astype(np.float32)
