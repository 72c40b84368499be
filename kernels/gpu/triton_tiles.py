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

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

_THREADS = 32  # in a warp
_VECTOR = 4  # elements of a load of 16 bytes
_IN_REGISTERS = 64  # elements of all planes that one thread holds in registers
_LARGEST_BUCKET = 4096  # a larger bucket would not stay in registers

# The bits of a float32: a mask, and two values.
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000

Index = jax.Array | int


# Rows, and the residual or None.
Encoded = tuple[jax.Array, jax.Array | None]


class Form(Protocol):
  """The static options of an encoder; each operation has more of them."""

  @property
  def planes(self) -> int:
    """The buckets of a tile, ``P``."""

  @property
  def bucket_size(self) -> int:
    """The elements of a bucket, ``B``."""


class Launch(NamedTuple):
  """The launch of a kernel."""

  name: str
  row_words: int
  keep: bool = False  # whether it writes the residual
  # The elements of a plane in a block, at least those of one bucket; by default 16
  # bytes for each thread of four warps.
  elements: int = 4 * _THREADS * _VECTOR
  warps: int | None = None  # of a block; None for as few as hold its planes
  interpret: Any = False  # for any backend, slowly


def refusal(size: int, form: Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  bucket_size = form.bucket_size
  if bucket_size & (bucket_size - 1) or bucket_size > _LARGEST_BUCKET:
    return (
      f"a kernel's buckets are powers of two up to {_LARGEST_BUCKET}, and this one has "
      f"{bucket_size} elements"
    )
  return refusal_of_tiles(size, form.planes * bucket_size)


def refusal_of_tiles(size: int, tile: int) -> str:
  """Returns the reason why ``size`` elements are too few or too many; "" if not."""
  if tile <= size < 2**31:
    return ""
  return (
    f"a kernel's array has at least one tile, {tile} elements here, and less than "
    f"2**31, and this one has {size}"
  )


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


def encode(
  body: Callable[..., None],
  x: jax.Array,
  operands: tuple[jax.Array | None, ...],
  form: Form,
  launch: Launch,
) -> Encoded:
  """Encodes the whole tiles of an array; :func:`completed` adds a partial one.

  ``body`` encodes one block. It is called with a :class:`Block` and, for each operand,
  with its reference, or None for None. The rows are ``uint32[rows, row_words]``, and
  the residual is ``float32[n]``.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  planes, bucket_size = form.planes, form.bucket_size
  tiles = x.size // (planes * bucket_size)
  most = 1 << (tiles.bit_length() - 1)
  shape = min(max(launch.elements // bucket_size, 1), most), bucket_size
  given, outputs = arguments(x, operands, form, launch)

  def kernel(x_ref: Any, *refs: Any) -> None:
    inputs, out = iter(refs[: len(given)]), [*refs[len(given) :], None]
    block = Block(x_ref, out[0], out[1], shape, planes, tiles)
    body(block, *(None if operand is None else next(inputs) for operand in operands))

  found = pl.pallas_call(
    kernel,
    out_shape=outputs,
    grid=(-(-tiles // shape[0]),),
    compiler_params=triton.CompilerParams(
      num_warps=launch.warps or _warps(shape[0] * bucket_size, planes)
    ),
    interpret=launch.interpret,
    name=launch.name,
  )(x.reshape(-1), *given)
  return found[0], found[1] if launch.keep else None


def arguments(
  x: jax.Array, operands: tuple[jax.Array | None, ...], form: Form, launch: Launch
) -> tuple[list[jax.Array], list[jax.ShapeDtypeStruct]]:
  """Returns the operands that a kernel reads, and the types of its outputs."""
  rows = -(-x.size // (form.planes * form.bucket_size))
  out = [typed(x, (rows, launch.row_words), jnp.uint32)]
  out += launch.keep * [typed(x, (x.size,), x.dtype)]
  return [operand for operand in operands if operand is not None], out


def completed(
  reference: Callable[..., Encoded],
) -> Callable[[Callable[..., Encoded]], Callable[..., Encoded]]:
  """Decorates a kernel of whole tiles; the reference encodes a last, partial one.

  An operand of two axes has a line a row. The result is traced once for all leaves of a
  shape, and inlined, so that it is one call all the same.
  """

  def decorate(kernel: Callable[..., Encoded]) -> Callable[..., Encoded]:
    @functools.partial(jax.jit, static_argnames=("form", "interpret"), inline=True)
    @functools.wraps(kernel)
    def encode_rows(
      x: jax.Array, *operands: jax.Array | None, form: Form, interpret: Any = False
    ) -> Encoded:
      rows, residual = kernel(x, *operands, form=form, interpret=interpret)
      tiles, rest = divmod(x.size, form.planes * form.bucket_size)
      if rest:
        start = x.size - rest
        own = [a if a is None or a.ndim < 2 else a[tiles:] for a in operands]
        last = x.reshape(-1)[start:]
        words, unsent = reference(last, *own, form=form, first_row=tiles)
        rows = jax.lax.dynamic_update_slice(rows, words, (tiles, 0))
        if residual is not None and unsent is not None:
          residual = jax.lax.dynamic_update_slice(residual, unsent, (start,))
      return rows, None if residual is None else residual.reshape(x.shape)

    return encode_rows

  return decorate


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
