"""Common parts of the encoders that are Pallas kernels in Triton style.

Each program of the grid reads a block of whole tiles, plane by plane, and writes their
rows. A plane holds one bucket of each tile. Threads therefore exchange nothing but
reductions over a bucket. The reference encodes the last, partial tile.

No load is masked. A mask would make Triton's loads narrower, and some versions of JAX
do not mask a ragged last block at all. Instead the last program takes the last whole
tiles, some of which another program encodes as well. Both write the same words.

Pallas is imported where a kernel is traced. With its back ends for GPUs it would take
a quarter of the time of ``import gradcomp``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.gpu import last_tile
from gradcomp._src.kernels.gpu.last_tile import Reference, complete

_THREADS = 32  # in a warp
_VECTOR = 4  # elements of a load of 16 bytes
_IN_REGISTERS = 64  # elements of all planes that one thread holds in registers
_LARGEST_BUCKET = 4096  # a larger bucket would not stay in registers

# The bits of a float32: a mask, and two values.
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000

Index = jax.Array | int


def refusal(size: int, planes: int, bucket_size: int) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  if bucket_size & (bucket_size - 1) or bucket_size > _LARGEST_BUCKET:
    return (
      f"a kernel's buckets are powers of two up to {_LARGEST_BUCKET}, and this one has "
      f"{bucket_size} elements"
    )
  return last_tile.refusal(size, planes * bucket_size)


class Block:
  """The consecutive tiles that one program of a kernel encodes.

  Attributes:
    first_row: ``int32[]``, the row number of the first tile.
    shape: the shape of a plane, ``(rows, B)``.
  """

  def __init__(self, x_ref, rows_ref, residual_ref, shape, planes, tiles):  # type: ignore[no-untyped-def]
    from jax.experimental import pallas as pl

    self.shape = shape
    self.first_row = jnp.minimum(pl.program_id(0) * shape[0], tiles - shape[0])
    self._planes = planes
    self._x, self._rows, self._residual = x_ref, rows_ref, residual_ref

  @property
  def rows(self) -> Any:
    """The indices of the block's rows, for references that have one line a row."""
    from jax.experimental import pallas as pl

    return pl.ds(self.first_row, self.shape[0])

  def elements(self, plane: Index, first: int, count: int) -> jax.Array:
    """Returns the indices of ``count`` elements of each of a plane's buckets.

    They are ``int32[rows, count]``, into the flat array, from the place ``first`` of
    each bucket on.
    """
    shape = self.shape[0], count
    row = self.first_row + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    column = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (row * self._planes + plane) * self.shape[1] + column

  def plane(self, plane: Index) -> jax.Array:
    """Reads the elements of a plane: ``float32[rows, B]``."""
    return self._x[self.elements(plane, 0, self.shape[1])]

  def part(self, places: jax.Array) -> jax.Array:
    """Reads the elements at indices that :meth:`elements` gave."""
    return self._x[places]

  def put(self, words: jax.Array, first: int = 0) -> None:
    """Writes words of the block's rows, ``uint32[rows, B]``, from ``first`` on."""
    from jax.experimental import pallas as pl

    self._rows[self.rows, pl.ds(first, words.shape[1])] = words

  def put_scale(self, number: Index, words: jax.Array) -> None:
    """Writes word ``number`` behind the codes of each row: ``uint32[rows]``."""
    self._rows[self.rows, self.shape[1] + number] = words

  def put_residual(self, plane: Index, rest: jax.Array) -> None:
    """Writes the residual of a plane, ``float32[rows, B]``, if the caller keeps it."""
    if self._residual is not None:
      self._residual[self.elements(plane, 0, self.shape[1])] = rest


def encode(  # noqa: PLR0913 - the tile's shape and the launch, which kernels choose
  body: Callable[..., None],
  name: str,
  x: jax.Array,
  operands: tuple[jax.Array | None, ...],
  *,
  planes: int,
  bucket_size: int,
  row_words: int,
  keep: bool,
  last: Reference,
  elements: int = 4 * _THREADS * _VECTOR,
  warps: int | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes an array tile by tile.

  Args:
    body: encodes one block. It is called with a :class:`Block` and, for each operand,
      with its reference, or None for None.
    name: the name of the kernel.
    x: ``float32`` of any shape, with one whole tile or more.
    operands: the other arrays that the kernel reads, or None.
    planes: buckets a tile, ``P``.
    bucket_size: elements a bucket, ``B``.
    row_words: words in a row.
    keep: whether to write the residual.
    last: encodes the elements of a last, partial tile, given its row number.
    elements: the elements of a plane in a block, at least those of one bucket; by
      default 16 bytes for each thread of four warps.
    warps: the warps of a block; by default as few as hold its planes in registers.
    interpret: whether to interpret the kernel, which any backend can do, slowly.

  Returns:
    The rows, ``uint32[rows, row_words]``, and the residual like ``x``, or None.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  tile = planes * bucket_size
  tiles = x.size // tile
  whole = tiles * tile
  rows = min(max(elements // bucket_size, 1), 1 << (tiles.bit_length() - 1))
  given = [operand for operand in operands if operand is not None]

  def kernel(x_ref: Any, *refs: Any) -> None:
    inputs, outputs = iter(refs[: len(given)]), refs[len(given) :]
    block = Block(
      x_ref,
      outputs[0],
      outputs[1] if keep else None,
      (rows, bucket_size),
      planes,
      tiles,
    )
    body(block, *(None if operand is None else next(inputs) for operand in operands))

  out = [((-(-x.size // tile), row_words), jnp.uint32)] + keep * [((x.size,), x.dtype)]
  found = pl.pallas_call(
    kernel,
    out_shape=[typed(x, shape, dtype) for shape, dtype in out],
    grid=(-(-tiles // rows),),
    compiler_params=triton.CompilerParams(
      num_warps=warps or _warps(rows * bucket_size, planes)
    ),
    interpret=interpret,
    name=name,
  )(x.reshape(-1), *given)
  return complete(found, x, tiles, whole, last)


def typed(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Returns the type of an output that varies over the same mesh axes as ``x``."""
  # `jax.shard_map` checks these types.
  kind = jax.typeof(x).manual_axis_type
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def _warps(elements: int, planes: int) -> int:
  """Returns the number of warps of a block: 1, 2 or 4."""
  # Few are best, since all threads of a bucket take part in finding its scale. But a
  # thread should hold at most 64 elements of all planes in its registers, unless more
  # threads would load less than 16 bytes of a plane each.
  fewest = elements * planes // (_THREADS * _IN_REGISTERS)
  most = elements // (_THREADS * _VECTOR)
  return 1 << max(min(fewest, most, 4).bit_length() - 1, 0)


def largest_bits(x: jax.Array, axis: int | None = 1) -> jax.Array:
  """Returns the bits of the largest magnitude of each line of ``float32[rows, n]``.

  They are ``int32[rows]``, or ``int32[]`` if ``axis`` is None. A NaN or an infinity in
  a line gives the bits of NaN.
  """
  # Maxima of floats drop NaN on GPUs, those of integers do not.
  magnitude = jax.lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
  bits = magnitude.max(axis=axis)
  return jnp.where(bits < _INFINITY, bits, _NAN)
