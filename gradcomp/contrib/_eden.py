"""EDEN: blocks that each worker rotates at random, rounded to levels for a Gaussian."""

import dataclasses
import functools
import math
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.bibliography import VARGAFTIK_2021, VARGAFTIK_2022, Citation
from gradcomp._src.checks import one_of, static_integer
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import (
  divide,
  held,
  inverse,
  sign_bit,
  signed,
)
from gradcomp._src.kernels.common.scales import norms, sum_by_halves
from gradcomp._src.kernels.common.threefry import threefry2x32

Scale = Literal["unbiased", "least squares"]

_BLOCK_RULE = "a power of two from 32 to 65536"
_ROUNDS = 13  # of the cipher, as in dithers
_SMALLEST = np.float32(2.0**-96)  # a block of smaller numbers is sent as zeros
_MOST = np.float32(np.finfo(np.float32).max)
_SPARE = 4  # powers of two by which a scale is less, so that it does not overflow
_FEW = 8  # levels that comparisons find sooner than reads of a table do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eden(Codec):
  bits: int = 4
  block_size: int = 4096
  scale: Scale = "unbiased"
  rotations: int = 1

  needs_key: ClassVar[bool] = True
  citations: ClassVar[tuple[Citation, ...]] = (
    Citation(VARGAFTIK_2022, ""),
    Citation(VARGAFTIK_2021, ""),
  )

  def __post_init__(self) -> None:
    bits = static_integer("bits", "1 to 8", self.bits, least=1, most=8)
    object.__setattr__(self, "bits", bits)
    size = static_integer("block_size", _BLOCK_RULE, self.block_size)
    if size & (size - 1) or not 32 <= size <= 65536:
      raise ValueError(f"`block_size` must be {_BLOCK_RULE}, got {size}.")
    object.__setattr__(self, "block_size", size)
    one_of("scale", Scale, self.scale)
    turns = static_integer("rotations", "1 or 2", self.rotations, least=1, most=2)
    object.__setattr__(self, "rotations", turns)

  @property
  def unbiased(self) -> bool:
    return self.scale == "unbiased"

  def to_nearest(self) -> "Eden":
    """Returns the codec with least squares, for owners who keep what they lose."""
    return dataclasses.replace(self, scale="least squares")

  @property
  def tile_size(self) -> int:
    return self.block_size

  @property
  def row_words(self) -> int:
    return self.block_size // 32 * self.bits + 2

  @property
  def _stages(self) -> int:
    """The additions of a rotation, the logarithm of a block."""
    return self.block_size.bit_length() - 1

  @property
  def _halvings(self) -> int:
    """The powers of two that scales make up for; levels make up for the others."""
    return self.rotations * self._stages // 2

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    x = tiles.reshape(-1, self.block_size)
    drawn, count = context.drawn, jnp.arange(len(x), dtype=jnp.uint32)
    # A worker's mask is counted, so that each has signs of its own. XORed with them, it
    # would leave them, or turn all around, which changes no error.
    seeds, _ = threefry2x32(drawn[:2], (count, drawn[2]), _ROUNDS)
    turned, unit = _near_one(x, self._halvings)
    for turn in range(self.rotations):
      turned = _hadamard(_with_signs(turned, seeds, turn))
    size, energy = jnp.abs(turned), sum_by_halves(held(turned * turned))
    normal = size * inverse(math.sqrt(self.block_size), jnp.sqrt(energy))[:, None]
    number, level = _nearest(normal, _levels(self.bits))
    along = sum_by_halves(held(size * level))
    if self.scale == "unbiased":
      scale = divide(energy, along)
    else:
      scale = divide(along, sum_by_halves(held(level * level)))
    scale = jnp.where(unit == 0, 0.0, scale * unit)
    codes = number | sign_bit(turned) >> (32 - self.bits)
    words = _packed(codes, self.bits)
    behind = jnp.stack([seeds, planes.float_words(scale)], axis=1)
    return jnp.concatenate([*words, behind], axis=1)

  def decode_rows(self, rows: Array) -> Array:
    codes = _unpacked(rows, self.block_size, self.bits)
    seeds, scale = rows[:, -2], planes.floats(rows[:, -1])
    back = 2.0 ** (_SPARE + self._halvings - self.rotations * self._stages)
    level = _read(codes & np.uint32(2 ** (self.bits - 1) - 1), back * _levels(self.bits))
    turned = _hadamard(signed(level, sign_bit(codes << (32 - self.bits))))
    for turn in range(self.rotations - 1, 0, -1):
      turned = _hadamard(_with_signs(turned, seeds, turn))
    # Signs come last, which no compiler contracts with a following addition.
    return _with_signs(jnp.clip(turned * scale[:, None], -_MOST, _MOST), seeds, 0)


def _near_one(x: Array, halvings: int) -> tuple[Array, Array]:
  """Scales rows to a largest magnitude from 1 to 4; returns the unit of scales, too.

  The unit is 0 for a row to be sent as zeros, and NaN for one that is not finite.
  """
  largest = norms(x, "max")
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
  exponent = jnp.clip(bits >> 23, _exponent(_SMALLEST), 253)
  power = lambda n: jax.lax.bitcast_convert_type(n << 23, jnp.float32)
  none, finite = largest < _SMALLEST, jnp.isfinite(largest)
  unit = jnp.where(finite, power(exponent - halvings - _SPARE), jnp.nan)
  down = jnp.where(none, 0.0, power(254 - exponent))
  return x * down[:, None], jnp.where(none, 0.0, unit)


def _exponent(x: np.float32) -> int:
  return int(x.view(np.int32)) >> 23


def _with_signs(x: Array, seeds: Array, turn: int) -> Array:
  """Changes signs of elements at random, by each row's seed and the turn's number."""
  each = x.shape[1] // 32
  columns = jax.lax.broadcasted_iota(jnp.uint32, (1, each), 1)
  words, _ = threefry2x32((seeds[:, None], jnp.uint32(turn)), (columns, jnp.uint32(0)), _ROUNDS)
  plane = jax.lax.broadcasted_iota(jnp.uint32, (1, 32, 1), 1)
  signs = (words[:, None] >> plane) << 31
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ signs.reshape(x.shape)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _hadamard(x: Array) -> Array:
  """Multiplies rows by the Hadamard matrix of entries 1 and -1, which is symmetric."""
  rows, size = x.shape
  width = 1
  while width < size:
    pairs = x.reshape(rows, size // (2 * width), 2, width)
    # Products with -1 are exact, so that it does not matter if they are contracted.
    turned = pairs[:, :, 1:] * np.array([[1], [-1]], np.float32)
    x = (pairs[:, :, :1] + turned).reshape(rows, size)
    width *= 2
  return x


@functools.cache
def _levels(bits: int) -> np.ndarray:
  """Returns the positive levels of least squared error for normal numbers.

  Each is the mean of the numbers that are nearest to it (Lloyd, 1957; Max, 1960), found
  by Newton's method, and rounded to a multiple of 2**-16: hosts with other libraries of
  mathematics have the same bits.
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
  return np.float32(np.round(levels * 2**16) / 2**16)


def _nearest(size: Array, levels: np.ndarray) -> tuple[Array, Array]:
  """Returns the numbers of the levels nearest to magnitudes, and these levels."""
  edges = (levels[1:] + levels[:-1]) / 2
  number = jnp.zeros(size.shape, jnp.uint32)
  if len(levels) <= _FEW:
    for i, edge in enumerate(edges, start=1):
      number = jnp.where(size >= edge, jnp.uint32(i), number)
    return number, _read(number, levels)
  step = len(levels) // 2
  while step:  # a search by halves
    reached = size >= jnp.asarray(edges)[number + jnp.uint32(step - 1)]
    number, step = number + jnp.where(reached, jnp.uint32(step), jnp.uint32(0)), step // 2
  return number, _read(number, levels)


def _read(number: Array, levels: np.ndarray) -> Array:
  """Returns the levels of numbers."""
  if len(levels) > _FEW:
    return jnp.asarray(levels)[number]
  level = jnp.full(number.shape, levels[0])
  for i, other in enumerate(levels[1:], start=1):
    level = jnp.where(number == i, other, level)
  return level


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
