"""Forces XLA:CPU to materialize an array once, or to update one in place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Arrays = TypeVar("_Arrays")

LARGE = 2**17  # elements: fewer are computed fast in any way
_MANY = 2**14  # words of a payload, that is 64 KiB
_SOME = 2**8  # words: fewer are sooner encoded anew for each of their codes


def materialized(
  function: Callable[..., _Arrays], rows: jax.Array, *given: Any
) -> _Arrays:
  """Returns ``function(rows, *given)``, materialized on a CPU before it is read."""
  if not rows.size:
    return function(rows, *given)
  # Else XLA fuses the computation of an element into its readers, once for each: a word
  # is read by its elements, and an element by its word and by the loss of encoding it.
  # XLA drops an optimization barrier before it fuses, but keeps a condition that never
  # holds if it cannot know that: no word has more than 32 bits.
  function = jax.jit(function)  # traced once for both of its uses
  like = jax.eval_shape(function, rows, *given)
  first = _first_bits(rows)

  def nothing(*_: Any) -> _Arrays:
    zero = first ^ first  # of the type of the words, which differ between workers
    types = dict.fromkeys([x.dtype for x in jax.tree.leaves(like)])
    zeros = {dtype: zero.astype(dtype) for dtype in types}
    return jax.tree.map(lambda x: jax.lax.broadcast(zeros[x.dtype], x.shape), like)

  return jax.lax.cond(_never(first), nothing, function, rows, *given)


@jax.jit  # traced once for a type
def _never(bits: jax.Array) -> jax.Array:
  # XLA for other platforms knows that no number differs from itself.
  unknown = lambda x: jax.lax.population_count(x) > 32
  return jax.lax.platform_dependent(bits, cpu=unknown, default=lambda x: x != x)


def _first_bits(x: jax.Array) -> jax.Array:
  """Returns the bits of the first element, as an unsigned integer."""
  return jax.lax.bitcast_convert_type(x[(0,) * x.ndim], f"uint{8 * x.dtype.itemsize}")


def packed(rows: jax.Array) -> jax.Array:
  """Returns the words of a payload, materialized in rows on a CPU if they are many."""
  # XLA would compute them in the shape of the message that they are part of, one by one
  # and ten times as slowly, and again for the loss of encoding them.
  return rows if rows.size < _MANY else _down_once(rows)


def stored(rows: jax.Array) -> jax.Array:
  """Returns words, materialized on a CPU before codes in them are added as integers."""
  # XLA would encode a word anew for each of its codes.
  return rows if rows.size < _SOME else _down_once(rows)


def _mapped(
  function: Callable[..., Any], of_batch: Callable[..., Any], batched: Any = True
) -> Callable[..., Any]:
  """Returns a function for which ``jax.vmap`` calls ``of_batch``, on first axes."""
  # Else `jax.vmap` would make a selection of the condition, through which XLA fuses.
  result = jax.custom_batching.custom_vmap(function)
  result.def_vmap(lambda size, known, *given: (of_batch(*given), batched))
  return result


_down: Any = _mapped(lambda x: materialized(lambda x: x, x), lambda x: _down(x))
_down_once = jax.jit(_down)  # leaves of a shape: traced once


def unknown(numbers: Sequence[int], like: jax.Array) -> list[jax.Array]:
  """Returns integers, ``int32[]``, that XLA for CPU does not know."""
  # A program that reads one as an index is then the program for another index, too, and
  # XLA compiles equal programs once. It would fuse a slice from a known index instead.
  # `like` is any array; the integers are typed to vary over the mesh as it does.
  if not like.size:
    return list(map(jnp.int32, numbers))
  return _unknown(like, *map(np.int32, numbers))


@jax.jit  # traced once for all numbers
def _unknown(like: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
  def known(like: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
    bits = _first_bits(like)
    zero = (bits ^ bits).astype(jnp.int32)
    return [jax.lax.add(zero, number) for number in numbers]

  # Else an index would differ between the arrays of a batch, for all that is known.
  integers = functools.partial(materialized, known)
  return _mapped(integers, _unknown, [False] * len(numbers))(like, *numbers)


def starts(
  count: int, like: jax.Array, *, fused: bool = False
) -> Callable[[int, int], jax.Array | int]:
  """Returns a function of ``start, stop``: a start that XLA for CPU does not know."""
  # So programs for leaves of one shape are equal, and compiled once. All `count` rows
  # start at zero. `like` is any array that is materialized in any case. Where the
  # addition of a start would be `fused` into the program, and make it another one, each
  # start is an unknown number of its own.
  zero = functools.cache(lambda: unknown([0], like)[0])
  sum_of = lambda start: jax.lax.add(zero(), np.int32(start))
  number = lambda start: unknown([start], like)[0] if fused else sum_of(start)
  return lambda start, stop: start if stop - start == count else number(start)


# Slices an axis, by default the first, from a start that XLA does not know.
slice_at = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)


def word_cutter(rows: jax.Array, axis: int) -> Callable[[int, int], jax.Array]:
  """Returns a function that slices words, from ``start`` to ``stop`` of an axis."""
  every = rows.shape[axis]
  at = starts(every, rows)

  def cut(start: int, stop: int) -> jax.Array:
    # A CPU materializes many words.
    if stop - start == every or rows.size // every * (stop - start) < _MANY:
      return jax.lax.slice_in_dim(rows, start, stop, axis=axis)
    return _cut(rows, at(start, stop), stop - start, axis)

  return cut


@functools.partial(jax.jit, static_argnums=(2, 3))  # leaves of a shape: traced once
def _cut(rows: jax.Array, start: jax.Array, count: int, axis: int) -> jax.Array:
  # Fused into a decoder, a slice from an unknown start takes half as long as that.
  piece = lambda rows, start: slice_at(rows, start, count, axis)
  cut = functools.partial(materialized, piece)
  return _mapped(cut, lambda *given: _cut(*given, count, axis + 1))(rows, start)


def updated_in_place(
  function: Callable[..., _Arrays],
  old: _Arrays,
  count: jax.Array,
  read: Sequence[Any],
  once: Callable[[_Arrays], _Arrays] | None = None,
) -> tuple[_Arrays, jax.Array]:
  """Returns ``function(old, *read)``, written into the memory of ``old`` on a CPU."""
  # It is for arrays that the caller gives up, and that have another shape there. All
  # other arrays are in `read`. `once` returns the same on other platforms, and of
  # arrays that are not large. The next array to write takes the count, `int32[]` and
  # not negative, that this one returns. Else XLA would not know that an array that both
  # read may be written over, and copy it.

  def directly(old: _Arrays, count: jax.Array) -> tuple[_Arrays, jax.Array]:
    return once(old) if once else function(old, *read), count

  def loop(old: _Arrays, count: jax.Array) -> tuple[_Arrays, jax.Array]:
    def round(passed: tuple[jax.Array, _Arrays]) -> tuple[jax.Array, _Arrays]:
      number, old = passed
      # XLA moves what depends on no number of a round out of the loop, and materializes
      # it. It does so while barriers stand, each of which gives its arrays one type.
      here = lambda x: jax.lax.optimization_barrier((number, x))[1]
      return number + 1, function(old, *jax.tree.map(here, read))

    # XLA would write a reshaped result into new memory, and copy it. A loop keeps its
    # memory, and XLA does not know that this one has one round.
    rounds = (count >= 0).astype(jnp.int32)
    first = (jnp.int32(0), old)
    number, new = jax.lax.while_loop(lambda passed: passed[0] < rounds, round, first)
    return new, number

  if max(x.size for x in jax.tree.leaves(old)) < LARGE:
    return directly(old, count)
  return jax.lax.platform_dependent(old, count, cpu=loop, default=directly)
