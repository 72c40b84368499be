"""Forces XLA:CPU to materialize an array once, or to update one in place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

_Arrays = TypeVar("_Arrays")

LARGE = 2**17  # elements: fewer are computed soon, however that is done
_MANY = 2**14  # words of a payload, that is 64 KiB
_SOME = 2**8  # words: fewer are sooner encoded anew for each of their codes


def materialized(function: Callable[[jax.Array], _Arrays], rows: jax.Array) -> _Arrays:
  """Returns ``function(rows)``, materialized on a CPU before anything reads it.

  Example:
    >>> materialized(lambda rows: rows + 1, jnp.zeros((1, 2), jnp.uint32))
    Array([[1, 1]], dtype=uint32)
  """
  if not rows.size:
    return function(rows)
  # Else XLA fuses the computation of an element into its readers, once for each: a word
  # is read by its elements, and an element by its word and by the loss of encoding it.
  # XLA drops an optimization barrier before it fuses, but not a condition of which it
  # does not know that it never holds: no word has more than 32 bits.
  function = jax.jit(function)  # traced once for all of its three uses
  like = jax.eval_shape(function, rows)

  def condition(rows: jax.Array) -> _Arrays:
    first = _first_bits(rows)

    def nothing(rows: jax.Array) -> _Arrays:
      zero = first ^ first  # of the type of the words, which differ between workers
      types = dict.fromkeys(x.dtype for x in jax.tree.leaves(like))
      zeros = {dtype: zero.astype(dtype) for dtype in types}
      return jax.tree.map(lambda x: jnp.broadcast_to(zeros[x.dtype], x.shape), like)

    return jax.lax.cond(jax.lax.population_count(first) > 32, nothing, function, rows)

  return jax.lax.platform_dependent(rows, cpu=condition, default=function)


def _first_bits(x: jax.Array) -> jax.Array:
  """Returns the bits of the first element, as an unsigned integer."""
  first = x[(0,) * x.ndim]
  return jax.lax.bitcast_convert_type(first, f"uint{8 * x.dtype.itemsize}")


def packed(rows: jax.Array) -> jax.Array:
  """Returns the words of a payload, materialized in rows on a CPU if they are many.

  Example:
    >>> packed(jnp.zeros((1, 2), jnp.uint32))
    Array([[0, 0]], dtype=uint32)
  """
  # XLA would compute them in the shape of the message that they are part of, one by one
  # and ten times as slowly, and again for the loss of encoding them.
  return rows if rows.size < _MANY else _down_once(rows)


def stored(rows: jax.Array) -> jax.Array:
  """Returns words, materialized on a CPU before codes in them are added as integers.

  Example:
    >>> stored(jnp.zeros((1, 2), jnp.uint32))
    Array([[0, 0]], dtype=uint32)
  """
  # XLA would encode a word anew for each of its codes.
  return rows if rows.size < _SOME else _down_once(rows)


@jax.custom_batching.custom_vmap
def _down(rows: jax.Array) -> jax.Array:
  return materialized(lambda rows: rows, rows)


@_down.def_vmap
def _down_together(
  size: int, batched: list[bool], rows: jax.Array
) -> tuple[jax.Array, bool]:
  """Materializes the rows of a batch at once."""
  # Else `jax.vmap` would make a selection of the condition, through which XLA fuses.
  del size, batched
  return _down(rows), True


_down_once = jax.jit(_down)  # leaves of a shape: traced once


def unknown(numbers: Sequence[int], like: jax.Array) -> list[jax.Array]:
  """Returns integers, ``int32[]``, that XLA for CPU does not know.

  A program that reads one as an index is then the program for another index, too, and
  XLA compiles equal programs once. It would fuse a slice from a known index instead.
  ``like`` is any array; the integers are typed to vary over the mesh as it does.

  Example:
    >>> unknown([3, 5], jnp.zeros(2))
    [Array(3, dtype=int32), Array(5, dtype=int32)]
  """

  def known(like: jax.Array) -> list[jax.Array]:
    bits = _first_bits(like)
    zero = (bits ^ bits).astype(jnp.int32)
    return [zero + number for number in numbers]

  @jax.custom_batching.custom_vmap
  def integers(like: jax.Array) -> list[jax.Array]:
    return materialized(known, like)

  @integers.def_vmap
  def together(size: int, batched: list[bool], like: jax.Array) -> tuple[Any, Any]:
    # Else an index would differ between the arrays of a batch, for all that is known.
    del size, batched
    return integers(like), [False] * len(numbers)

  return integers(like) if like.size else list(map(jnp.int32, numbers))


def word_cutter(rows: jax.Array, axis: int) -> Callable[[int, int], jax.Array]:
  """Returns a function that slices words, from ``start`` to ``stop`` of an axis.

  A CPU materializes many words. Programs that read those of leaves of one shape are
  then equal, and XLA compiles one. It would fuse another slice into each.

  Example:
    >>> word_cutter(jnp.arange(6, dtype=jnp.uint32), 0)(1, 3)
    Array([1, 2], dtype=uint32)
  """
  zero = functools.cache(lambda: unknown([0], rows)[0])

  def cut(start: int, stop: int) -> jax.Array:
    every = rows.shape[axis]
    if stop - start == every or rows.size // every * (stop - start) < _MANY:
      return jax.lax.slice_in_dim(rows, start, stop, axis=axis)
    return _cut(rows, zero() + start, stop - start, axis)

  return cut


@functools.partial(jax.jit, static_argnums=(2, 3))  # leaves of a shape: traced once
def _cut(rows: jax.Array, start: jax.Array, count: int, axis: int) -> jax.Array:
  @jax.custom_batching.custom_vmap
  def part(rows: jax.Array, start: jax.Array) -> jax.Array:
    cut = functools.partial(
      jax.lax.dynamic_slice_in_dim,
      start_index=start,
      slice_size=count,
      axis=axis,
      allow_negative_indices=False,
    )
    # Fused into a decoder, a slice from an unknown start takes half as long as that.
    return materialized(cut, rows)

  @part.def_vmap
  def together(
    size: int, batched: list[bool], rows: jax.Array, start: jax.Array
  ) -> tuple[jax.Array, bool]:
    # Else `jax.vmap` would make a selection of the condition, see `packed`.
    del size, batched
    return _cut(rows, start, count, axis + 1), True

  return part(rows, start)


def updated_in_place(
  function: Callable[[jax.Array, jax.Array], jax.Array],
  old: jax.Array,
  count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns ``function(old, one)``, written into the memory of ``old`` on a CPU.

  It is for an array that the caller gives up, and that has another shape there. XLA
  moves the parts of ``function`` that depend only on other arrays out of the loop, and
  materializes them, but not a part that is multiplied by ``one``: it does not know that
  this is 1.0, nor that ``count``, ``int32[]``, is not negative. The next array to write
  takes the count that this one returns. Else XLA would not know that an array that both
  read may be written over, and copy it.

  Example:
    >>> updated_in_place(lambda old, one: old + one, jnp.zeros(2), jnp.int32(0))[0]
    Array([1., 1.], dtype=float32)
  """

  def once(old: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    return function(old, jnp.float32(1.0)), count

  def loop(old: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    def round(passed: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      number, old = passed
      few = jax.lax.population_count(number) <= 32
      return number + 1, function(old, few.astype(jnp.float32))

    # XLA would write a reshaped result into new memory, and copy it. A loop keeps its
    # memory, and XLA does not know that this one has one round.
    rounds = (count >= 0).astype(jnp.int32)
    first = (jnp.int32(0), old)
    number, new = jax.lax.while_loop(lambda passed: passed[0] < rounds, round, first)
    return new, number

  if old.size < LARGE:
    return once(old, count)
  return jax.lax.platform_dependent(old, count, cpu=loop, default=once)
