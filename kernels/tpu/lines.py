"""Common parts of the encoders that are Pallas kernels for TPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradcomp._src.kernels.gpu import tiles

# A register of a TPU has 8 rows of 128 lanes, and a last axis of 4 or 8 elements is
# padded to 128. So a kernel reads lines of 128 elements or more, each of whole buckets,
# and transposes its block to add or compare the elements of a bucket: a column then.
LANES = 128
ROWS = 8  # of a register
_ELEMENTS = 1 << 18  # of a block: 256 registers, and a MiB
_DECODED = 1 << 19  # elements of a block that is decoded, at least of 8 rows
_LARGEST_TILE = 1 << 17  # elements: so that a block of 8 tiles is at most 4 MiB
LARGEST_UNROLLED = 1 << 15  # elements of a tile that a program writes out


def width(bucket_size: int) -> int:
  """Returns the elements of the shortest line of whole buckets and registers."""
  return math.lcm(bucket_size, LANES)


def rows_of_block(rows: int, tile: int) -> int:
  """Returns the rows of a block of a MiB, or less, in whole registers of rows."""
  return min(max(1, _ELEMENTS // tile // ROWS), rows // ROWS) * ROWS


def by_registers(block: int, body: Callable[[Any], None]) -> None:
  """Runs ``body`` on the rows of one register after the other of a block."""
  from jax.experimental import pallas as pl

  def run(number: Any, carry: None) -> None:
    body(pl.ds(pl.multiple_of(number * ROWS, ROWS), ROWS))
    return carry

  lax.fori_loop(0, block // ROWS, run, None)


def run(
  kernel: Callable[..., None],
  inputs: Sequence[tuple[Array, int]],
  outputs: Sequence[tuple[tuple[int, ...], int, Any]],
  name: str,
  interpret: Any,
) -> list[Array]:
  """Runs a kernel on blocks of rows, of 0 rows for all of an array at each step."""
  from jax.experimental import pallas as pl

  def block(shape: tuple[int, ...], rows: int) -> Any:
    at = lambda number: (number if rows else 0, *[0] * (len(shape) - 1))
    return pl.BlockSpec((rows or shape[0], *shape[1:]), at)

  like, (shape, rows, _) = inputs[0][0], outputs[0]
  return pl.pallas_call(
    kernel,
    grid=(-(-shape[0] // rows),),
    in_specs=[block(x.shape, rows) for x, rows in inputs],
    out_specs=[block(shape, rows) for shape, rows, _ in outputs],
    out_shape=[tiles.typed(like, shape, dtype) for shape, _, dtype in outputs],
    interpret=interpret,
    name=name,
  )(*(x for x, _ in inputs))


def refusal(size: int, form: tiles.Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  least, tile = width(form.bucket_size), form.planes * form.bucket_size
  if not least <= tile <= _LARGEST_TILE:
    return (
      f"a kernel for TPUs has tiles of {least} elements or more here, and of at most "
      f"{_LARGEST_TILE}, and this one has {tile}"
    )
  return tiles.refusal_of_tiles(size, tile)


# Decorates an encoder of all whole tiles; the reference encodes the last, partial one.
completed = functools.partial(tiles.completed, in_blocks=False)


def encode(
  body: Callable[..., tuple[Array, ...]],
  x: Array,
  launch: tiles.Launch,
  tile: int,
  width: int,
  scalars: Sequence[Array] = (),
) -> list[Array]:
  """Encodes whole tiles of an array by ``body``, of a block of lines and of scalars."""
  # It returns an array for each output: `int32[tiles, words]`, or the residual, like
  # the block. The last block may reach beyond the array: what it makes there is
  # dropped, and no tile reads from another. The residual is flat.
  whole = x.size // tile
  lines = tile // width  # of a tile
  block = min(max(ROWS, _ELEMENTS // tile // ROWS * ROWS), whole)
  every, of_block = (whole * lines, width), block * lines
  outputs: list[Any] = [((whole, words), block, jnp.uint32) for words in launch.words]
  if launch.keep:
    outputs.append((every, of_block, jnp.float32))

  def kernel(x_ref: Any, *refs: Any) -> None:
    given, out = refs[: len(scalars)], refs[len(scalars) :]
    made = body(x_ref[...], *(ref[:, :1] for ref in given))
    for ref, found in zip(out, made, strict=True):
      words = ref.dtype == jnp.uint32
      ref[...] = lax.bitcast_convert_type(found, jnp.uint32) if words else found

  inputs = [(x.reshape(-1)[: whole * tile].reshape(every), of_block)]
  inputs += [(jnp.broadcast_to(y, (1, LANES)), 0) for y in scalars]
  *rows, last = run(kernel, inputs, outputs, launch.name, launch.interpret)
  return [*rows, last.reshape(-1) if launch.keep else last]


def packed(bits: Array, lines: int, bucket_size: int) -> Array:
  """Packs bits, ``int32[tiles * lines, width]``, by buckets: ``int32[tiles, B]``."""
  # Bucket k of a tile is bit k of a word.
  starts = range(0, bits.shape[1], bucket_size)
  line = _remainder(lax.broadcasted_iota(jnp.int32, bits.shape, 0), lines)
  words = joined(bits << (line * len(starts)), lines)
  parts = [words[:, at : at + bucket_size] << k for k, at in enumerate(starts)]
  return functools.reduce(jnp.bitwise_or, parts)


def rows_of_tiles(found: Sequence[Array], lines: int, rows: int) -> Array:
  """Puts a number a bucket into rows of tiles: ``int32[tiles, rows]``."""
  # `found` has the first bucket of each line, the second and so on, in columns,
  # `int32[1, tiles * lines]`.
  # Row k holds the numbers of bucket k in the column of its line, and zeros in others.
  shape = rows, found[0].shape[1]
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  column = _remainder(lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1), lines)
  own = jnp.broadcast_to(found[0], shape)
  for k, other in enumerate(found[1:], start=1):
    own = jnp.where(row & (len(found) - 1) == k, other, own)
  line = row >> (len(found) - 1).bit_length()
  return joined(jnp.where(line == column, own, 0).T, lines)


def joined(words: Array, lines: int) -> Array:
  """Returns the bitwise or of each tile's lines: ``[tiles, width]``."""
  words = words.reshape(-1, lines, words.shape[1])
  while (count := words.shape[1]) > 1:
    half = count // 2
    both = words[:, :half] | words[:, half : 2 * half]
    words = jnp.concatenate([both, words[:, 2 * half :]], axis=1) if count % 2 else both
  return words[:, 0]


def _remainder(x: Array, divisor: int) -> Array:
  """Returns ``x % divisor`` of small numbers, ``int32``, without a division."""
  # Divisions of vectors are slow, and the sign of one asks JAX for the device.
  if not divisor & (divisor - 1):
    return x & (divisor - 1)
  for power in reversed(range((x.size // divisor).bit_length())):
    x = jnp.where(x >= divisor << power, x - (divisor << power), x)
  return x


def decode(
  body: Callable[..., list[Array]],
  rows: Sequence[Array],
  name: str,
  tile: int,
  interpret: Any,
  x: Array | None = None,
) -> Array:
  """Decodes rows, ``[count, words]``, to flat elements, or subtracts these from x."""
  # `body` gets rows as columns, and returns a tile's elements in parts, as columns too:
  # so what belongs to several elements moves between the rows of a register, which is
  # cheap, and not between lanes. Lines have 128 elements: Mosaic stores with a stride,
  # from one tile to the next, no longer ones.
  from jax.experimental import pallas as pl

  count, lines = len(rows[0]), tile // LANES
  block = min(max(ROWS, _DECODED // tile // ROWS * ROWS), LANES, count)
  whole = [] if x is None else [x.reshape(-1, LANES)]

  def kernel(*refs: Any) -> None:
    given, out = refs[: len(rows)], refs[-1]
    elements = jnp.concatenate(body(*(ref[...].T for ref in given)))
    for k in range(lines):
      line = elements[k * LANES : (k + 1) * LANES].T
      at = pl.ds(k, block, stride=lines), slice(None)
      out[at] = refs[len(rows)][at] - line if whole else line

  inputs = [*((part, block) for part in rows), *((x, block * lines) for x in whole)]
  out = [((count * lines, LANES), block * lines, jnp.float32)]
  (found,) = run(kernel, inputs, out, name, interpret)
  return found.reshape(-1)


def decoder(
  reference: Callable[..., Array],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
  """Decorates a decoder of ``uint32[count, words]``, which then takes all rows."""

  def decorate(kernel: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(kernel)
    def decode_rows(rows: Array, *, form: tiles.Form, interpret: Any = False) -> Array:
      plain = functools.partial(reference, form=form)
      if not rows.size or refusal(form.planes * form.bucket_size, form):
        return plain(rows)
      found = kernel(rows.reshape(-1, rows.shape[-1]), form=form, interpret=interpret)
      return found.reshape(jax.eval_shape(plain, rows).shape)

    return decode_rows

  return decorate
