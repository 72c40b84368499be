"""Common parts of the encoders that are Mosaic GPU kernels (Hopper and newer).

This is the counterpart of ``triton_tiles``. Each program of the grid is a warpgroup of
128 threads and encodes one tile. A plane is one bucket. Reductions are only over whole
planes, since Mosaic cannot reduce single axes of matrices. The reference encodes the
last, partial tile.

Lane semantics are used in all versions of JAX: they let scalars be bit-cast, and they
save the search for layouts, which takes seconds a kernel. Instead the code gives a
layout to arrays that are read and to iotas. All other layouts follow from these.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from gradcomp._src.kernels.gpu.triton_tiles import (
  Encoded,
  Form,
  Index,
  Launch,
  arguments,
  refusal_of_tiles,
)

_THREADS = 128  # of a warpgroup, which is a program
_VECTOR = 4  # elements of a load of 16 bytes
# Larger buckets and tiles would not stay in registers.
_LARGEST_BUCKET = 2048
_LARGEST_TILE = 16384


def refusal(size: int, form: Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  planes, bucket_size = form.planes, form.bucket_size
  power = not bucket_size & (bucket_size - 1)
  if not (power and _THREADS <= bucket_size <= _LARGEST_BUCKET):
    return (
      f"a Mosaic kernel's buckets are powers of two from {_THREADS} to "
      f"{_LARGEST_BUCKET}, and this one has {bucket_size} elements"
    )
  if planes * bucket_size > _LARGEST_TILE:
    return (
      f"a Mosaic kernel's tiles have at most {_LARGEST_TILE} elements, and {planes} "
      f"buckets of {bucket_size} have more"
    )
  return refusal_of_tiles(size, planes * bucket_size)


class Tile:
  """The tile that a program encodes.

  Attributes:
    number: ``int32[]``, the number of its row.
    shape: the shape of a plane, ``(1, B)``.
  """

  def __init__(self, x_ref, rows_ref, residual_ref, shape, planes):  # type: ignore[no-untyped-def]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    self.number = jax.lax.axis_index("tile")
    self.shape = shape
    self._planes = planes
    self._x, self._rows, self._residual = x_ref, rows_ref, residual_ref
    # A row starts where the one before ends, which may be at no multiple of 16 bytes.
    vector = math.gcd(_VECTOR, rows_ref.shape[1], shape[1] // _THREADS)
    self._layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
    self._flat = plgpu.Layout.WG_STRIDED(shape[1:], vec_size=vector)

  def iota(self, dtype: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns ``jax.lax.broadcasted_iota`` in the layout of a plane."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jax.lax.broadcasted_iota(dtype, shape, axis), self._layout)

  def plane(self, plane: Index) -> jax.Array:
    """Reads the elements of a plane: ``float32[1, B]``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x = plgpu.layout_cast(self._x[self._elements(plane)], self._flat)
    return x.reshape(self.shape)

  def first(self, plane: Index) -> jax.Array:
    """Reads the first element of a plane: ``float32[]``."""
    bucket = self.number * self._planes + plane
    return self._x[bucket * self.shape[1]]

  def put(self, words: jax.Array) -> None:
    """Writes the codes of the row: ``uint32[1, B]``."""
    from jax.experimental import pallas as pl

    self._rows[self.number, pl.ds(0, self.shape[1])] = words.reshape(self.shape[1:])

  def put_scale(self, number: Index, word: jax.Array) -> None:
    """Writes word ``number`` behind the codes of the row: ``uint32[]``."""
    self._rows[self.number, self.shape[1] + number] = word

  def put_residual(self, plane: Index, rest: jax.Array) -> None:
    """Writes the residual of a plane, ``float32[1, B]``, if the caller keeps it."""
    if self._residual is not None:
      self._residual[self._elements(plane)] = rest.reshape(self.shape[1:])

  def _elements(self, plane: Index) -> Any:
    from jax.experimental import pallas as pl

    bucket = self.number * self._planes + plane
    return pl.ds(bucket * self.shape[1], self.shape[1])


def encode(
  body: Callable[..., None],
  x: jax.Array,
  operands: tuple[jax.Array | None, ...],
  form: Form,
  launch: Launch,
) -> Encoded:
  """Encodes the whole tiles of an array: see :func:`triton_tiles.encode`.

  ``body`` is called with a :class:`Tile`. ``interpret`` is a
  ``plgpu.InterpretGPUParams``, which JAX has from 0.11 on, or False.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  shape = 1, form.bucket_size
  given, outputs = arguments(x, operands, form, launch)

  def kernel(x_ref: Any, *refs: Any) -> None:
    inputs, out = iter(refs[: len(given)]), [*refs[len(given) :], None]
    block = Tile(x_ref, out[0], out[1], shape, form.planes)
    body(block, *(None if operand is None else next(inputs) for operand in operands))

  kernel.__name__ = launch.name
  found = plgpu.kernel(
    kernel,
    out_type=outputs,
    grid=(x.size // (form.planes * form.bucket_size),),
    grid_names=("tile",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    interpret=launch.interpret or None,
  )(x.reshape(-1), *given)
  # Without the barrier, XLA of JAX 0.11.2 fuses the call with the update of its last
  # row, and then refuses the fusion.
  found = jax.lax.optimization_barrier(found)
  return found[0], found[1] if launch.keep else None
