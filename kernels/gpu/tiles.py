"""Common parts of the encoders that are Pallas kernels, in Mosaic GPU."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradcomp._src.kernels.common.dithers import Dither, lane_stream
from gradcomp._src.mesh.types import varying_axes

# Each program of the grid is a warpgroup, which reads a block of whole tiles, plane by
# plane, and writes their rows. Threads exchange nothing but reductions over a bucket.
# No load is masked, and no two programs write the same: the reference encodes what is
# left after the last whole block. Pallas is imported where a kernel is traced: its back
# ends for GPUs would take a quarter of the time of `import gradcomp`.
_WARPS, _LANES = 2, 5  # bits of a thread's number
_VECTOR = 4  # elements of a load of 16 bytes
_ELEMENTS = 2048  # of a plane in a block: 16 for each thread
_LARGEST_BUCKET = 2048  # a larger bucket would not stay in registers

# The bits of a float32: a mask, and two values.
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000

Index = Array | int
Operand = Array | None
Encoded = tuple[Array, Operand]  # rows, and the residual or None
Shape = tuple[int, ...]


class Form(Protocol):
  """The static options of an encoder; each operation has more of them."""

  @property
  def planes(self) -> int:
    """The buckets of a tile, ``P``."""

  @property
  def bucket_size(self) -> int:
    """The elements of a bucket, ``B``."""


class Launch(NamedTuple):
  """The launch of an encoder; kernels for TPUs have no views."""

  name: str
  words: Sequence[int]  # of a row, in each output; on GPUs there is one
  interpret: Any  # True on any backend; plgpu.InterpretGPUParams from JAX 0.11
  keep: bool = False  # whether it writes the residual
  # The shapes in which the body reads a bucket; it writes residuals in the first one.
  views: Sequence[Shape] = ()  # by default the bucket as it is
  planar: bool = True  # whether words have the layout of a plane in the first view


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


@functools.cache
def layout(shape: Shape, vector: int = 1) -> Any:
  """Returns the layout of an array over the 128 threads of a warpgroup."""
  from jax.experimental.mosaic.gpu import fragmented_array as mgpu
  from jax.experimental.pallas import mosaic_gpu as plgpu

  # Axes take the bits of a thread's number from the first axis on, the highest bits
  # first. Threads that differ in other bits hold the same. A thread reads `vector`
  # neighbors of the last axis at once. So a reduction over last axes stays within a
  # warp where the first ones take its number, and arrays that begin with the same axes
  # have them in the same threads.
  # Each bit halves the tile along one axis.
  left = [size.bit_length() - 1 for size in shape]
  left[-1] -= vector.bit_length() - 1
  bits = [axis for axis, count in enumerate(left) for _ in range(count)]
  bits = bits[: _WARPS + _LANES]
  last = [1] * (len(shape) - 1) + [vector]
  tile = [size << bits.count(axis) for axis, size in enumerate(last)]
  tiles = [tuple(tile)]
  for axis in bits:
    tile[axis] //= 2
    tiles.append(tuple(tile))
  # After tiling, the axes of the tile number `n` are the n-th group from the end, and
  # the one that it was halved along has two entries.
  rank, count = len(shape), len(tiles)
  halves: list[Any] = [axis - rank * (count - n) for n, axis in enumerate(bits)]
  halves += [mgpu.Replicated(2)] * (_WARPS + _LANES - len(bits))
  own = mgpu.TiledLayout(
    mgpu.Tiling(tuple(tiles)),
    tuple(halves[:_WARPS]),
    tuple(halves[_WARPS:]),
    -1,
    _check_canonical=False,
  ).canonicalize()
  return plgpu.Layout.TILED(own.tiling, own.warp_dims, own.lane_dims, own.vector_dim)


class Block:
  """The consecutive tiles that one program of a kernel encodes."""

  def __init__(self, refs: Any, number: Array, rows: int, vector: int, interpret: Any):
    self._views, self._rows, self._residual = refs
    self._vector, self._interpret = vector, interpret
    self.shape: Shape = (rows, *self._views[0].shape[2:])  # of a plane in this view
    self.first_row = number * rows  # the row number of the first tile, int32[]

  def plane(self, plane: Index, *index: Any, view: int = 0) -> Array:
    """Reads the elements of a plane, or some of them: ``float32[rows, ...]``."""
    return self.read(self._views[view], plane, *index)

  def read(self, ref: Any, *index: Any) -> Array:
    """Reads the block's rows of a reference with a line a row, or a part of each."""
    ref = self._lines(ref, *index)
    if self._interpret is True:
      return ref[...]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # JAX before 0.11 has an index before the options. "Optimized" are loads of
    # shared memory, without conflicts of its banks.
    index = (...,) * ("idx" in inspect.signature(plgpu.load).parameters)
    return plgpu.load(ref, *index, layout=self._layout(ref.shape), optimized=False)

  def placed(self, x: Array) -> Array:
    """Gives an iota or a broadcast array the layout of its shape."""
    if self._interpret is True:
      return x
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(x, self._layout(x.shape))

  def iota(self, dtype: Any, shape: Shape, axis: int) -> Array:
    """Returns ``lax.broadcasted_iota`` in the layout of its shape."""
    return self.placed(lax.broadcasted_iota(dtype, shape, axis))

  def spread(self, x: Array, shape: Shape) -> Array:
    """Repeats an array along new last axes."""
    return self.placed(lax.broadcast_in_dim(x, shape, tuple(range(x.ndim))))

  def lanes(self, dither: Dither | None, first: Index = 0) -> Iterator[Operand]:
    """Yields lanes of planes from ``first``, a multiple of 8; None without a dither."""
    if dither is None:
      return itertools.repeat(None)

    def iota(dtype: Any, _: Shape, axis: int) -> Array:
      if axis == 0 or len(self.shape) == 2:
        return self.iota(dtype, self.shape, axis)
      part = self.iota(dtype, self.shape, 1) * jnp.array(self.shape[2], dtype)
      return part + self.iota(dtype, self.shape, 2)

    plane = self.shape[0], math.prod(self.shape[1:])
    return lane_stream(dither, plane, first_row=self.first_row, first=first, iota=iota)

  def put(self, words: Array, first: Index = 0) -> None:
    """Writes words of rows, ``uint32[rows, ...]``, from ``first`` on, or one a row."""
    from jax.experimental import pallas as pl

    count = math.prod(words.shape[1:])
    self.write(self._rows, words, pl.ds(first, count) if words.ndim > 1 else first)

  def put_residual(self, plane: Index, rest: Array) -> None:
    """Writes the residual of a plane, as :meth:`plane` reads it."""
    self.write(self._residual, rest, plane)

  def write(self, ref: Any, x: Array, *index: Any) -> None:
    """Writes the block's rows of a reference with a line a row, or a part of each."""
    if x.size == 1:  # Pallas writes such arrays as scalars only
      ref[(self.first_row, *index)] = x.max()
      return
    lines = self._lines(ref, *index)
    other = lines.shape != x.shape  # a plane's words, in the shape of a view
    if self._interpret is True or (self._interpret and other):
      lines[...] = x.reshape(lines.shape)
      return
    lines = lines.reshape(x.shape) if other else lines
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # From JAX 0.12 on it refuses to assign parts of a cache line, as scales are.
    if hasattr(plgpu, "store"):
      plgpu.store(lines, x, optimized=False)
    else:
      lines[...] = x

  def _lines(self, ref: Any, *index: Any) -> Any:
    from jax.experimental import pallas as pl

    count = self.shape[0]
    if count > 1 or self._interpret:
      return ref.at[(pl.ds(self.first_row, count), *index)]
    # JAX 0.10 refuses to read one row as a slice of several.
    line = ref.at[(self.first_row, *index)]
    return line.reshape(1, *line.shape)

  def _layout(self, shape: Shape) -> Any:
    return layout(shape, self._vector if shape == self.shape else 1)


def encode(
  body: Callable[..., None],
  x: Array,
  operands: tuple[Operand, ...],
  form: Form,
  launch: Launch,
) -> Encoded:
  """Encodes the whole blocks of an array; :func:`completed` adds the rest."""
  # `body` encodes one block. It is called with a `Block` and, for each operand, with
  # its reference, or None for None.
  planes, bucket_size = form.planes, form.bucket_size
  rows, whole = blocks(x.size // (planes * bucket_size), _ELEMENTS // bucket_size)
  count = whole * planes * bucket_size
  views = [(whole, planes, *view) for view in launch.views or [(bucket_size,)]]
  vector = math.gcd(_VECTOR, views[0][-1])
  if launch.planar:  # rows of words may begin at odd places
    vector = math.gcd(vector, *launch.words)
  given, structure = jax.tree.flatten(operands)
  flat = x.reshape(-1)
  # No interpreter views a reference in another shape, so that it is cut before.
  inside = not launch.interpret
  inputs = [flat] if inside else [flat[:count].reshape(view) for view in views]
  lines = -(-x.size // (planes * bucket_size))
  out = [typed(x, (lines, words), jnp.uint32) for words in launch.words]
  out += launch.keep * [typed(x, (x.size,) if inside else views[0], x.dtype)]

  def kernel(number: Array, *refs: Any) -> None:
    viewed = lambda ref: [ref.at[:count].reshape(view) for view in views]
    own, refs = list(refs[: len(inputs)]), refs[len(inputs) :]
    others, (rows_ref, *residual) = refs[: len(given)], refs[len(given) :]
    if inside:
      own, residual = viewed(own[0]), [viewed(ref)[0] for ref in residual]
    found = own, rows_ref, residual[0] if residual else None
    block = Block(found, number, rows, vector, launch.interpret)
    body(block, *jax.tree.unflatten(structure, others))

  grid = whole // rows
  words, *rest = run(kernel, grid, inputs + given, out, launch.name, launch.interpret)
  if not inside:
    rest = [jnp.pad(residual.reshape(-1), (0, x.size - count)) for residual in rest]
  return words, rest[0] if rest else None


def blocks(tiles: int, most: int) -> tuple[int, int]:
  """Returns the tiles of a block, a power of two, and of all whole blocks."""
  rows = 1 << (min(tiles, max(most, 1)).bit_length() - 1)
  return rows, tiles // rows * rows


def run(
  kernel: Callable[..., None],
  grid: int,
  inputs: Sequence[Array],
  outputs: Sequence[jax.ShapeDtypeStruct],
  name: str,
  interpret: Any,
) -> Sequence[Array]:
  """Runs a kernel, called with the program's number and references to all arrays."""
  if interpret is True:
    from jax.experimental import pallas as pl

    return pl.pallas_call(
      lambda *refs: kernel(pl.program_id(0), *refs),
      out_shape=list(outputs),
      grid=(grid,),
      interpret=True,
      name=name,
    )(*inputs)
  from jax.experimental.pallas import mosaic_gpu as plgpu

  def numbered(*refs: Any) -> None:
    kernel(lax.axis_index("block"), *refs)

  numbered.__name__ = name
  found = plgpu.kernel(
    numbered,
    out_type=list(outputs),
    grid=(grid,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(
      # Arrays that are read, and iotas, decide all other layouts. The search
      # for layouts in the other semantics takes seconds a kernel.
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      # No thread reads what another writes, nor what it wrote itself.
      unsafe_no_auto_barriers=True,
    ),
    interpret=interpret or None,
  )(*inputs)
  # `plgpu.kernel` drops the types of `jax.shard_map`.
  every = frozenset[str]().union(*map(varying_axes, inputs))
  lacking = [tuple(sorted(every - varying_axes(x))) for x in found]
  cast = functools.partial(lax.pcast, to="varying")
  typed = [cast(x, axes) if axes else x for x, axes in zip(found, lacking, strict=True)]
  # Without the barrier, XLA of JAX 0.11.2 fuses the call with the update of its last
  # row, and then refuses the fusion.
  return lax.optimization_barrier(typed)


def completed(
  reference: Callable[..., Encoded], in_blocks: bool = True
) -> Callable[[Callable[..., Encoded]], Callable[..., Encoded]]:
  """Decorates a kernel of whole tiles or blocks; the reference encodes the others."""

  def decorate(kernel: Callable[..., Encoded]) -> Callable[..., Encoded]:
    @functools.partial(jax.jit, static_argnames=("form", "interpret"), inline=True)
    @functools.wraps(kernel)
    def encode_rows(
      x: Array, *operands: Operand, form: Form, interpret: Any = False
    ) -> Encoded:
      rows, residual = kernel(x, *operands, form=form, interpret=interpret)
      tile = form.planes * form.bucket_size
      whole = x.size // tile
      if in_blocks:
        _, whole = blocks(whole, _ELEMENTS // form.bucket_size)
      if (start := whole * tile) < x.size:
        own = [a if a is None or a.ndim < 2 else a[whole:] for a in operands]
        last = x.reshape(-1)[start:]
        words, unsent = reference(last, *own, form=form, first_row=whole)
        rows = _ended(rows, words, whole)
        if residual is not None and unsent is not None:
          residual = _ended(residual, unsent, start)
      return rows, None if residual is None else residual.reshape(x.shape)

    return encode_rows

  return decorate


def _ended(x: Array, last: Array, at: int) -> Array:
  """Writes the last rows into the room that a kernel left, or behind its rows."""
  if len(x) == at:
    return jnp.concatenate([x, last])
  return lax.dynamic_update_slice(x, last, (at, *[0] * (x.ndim - 1)))


def typed(x: Array, shape: Shape, dtype: Any) -> jax.ShapeDtypeStruct:
  """Returns the type of an output that varies over the same mesh axes as ``x``."""
  # `jax.shard_map` checks these types.
  kind = jax.typeof(x).manual_axis_type
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def largest_bits(x: Array, axis: int = -1, keepdims: bool = False) -> Array:
  """Returns the bits of each line's largest magnitude; NaN's if one is not finite."""
  # Maxima of floats drop NaN on some GPUs, maxima of integers do not.
  magnitude = lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
  bits = magnitude.max(axis=axis, keepdims=keepdims)
  return jnp.where(bits < _INFINITY, bits, _NAN)
