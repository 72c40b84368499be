"""Arrays that XLA:CPU materializes once, updates in place, or picks out of several."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

_Arrays = TypeVar("_Arrays")

LARGE = 2**17  # elements: fewer are computed fast in any way
SOME = 2**8  # words: fewer are sooner encoded anew for each of their codes
_MANY = 2**14  # words of a payload, that is 64 KiB


def materialized(function: Callable[..., _Arrays], rows: Array, *given: Any) -> _Arrays:
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
    return jax.tree.map(lambda x: lax.broadcast(zeros[x.dtype], x.shape), like)

  return lax.cond(_never(first), nothing, function, rows, *given)


@jax.jit  # traced once for a type
def _never(bits: Array) -> Array:
  # XLA for other platforms knows that no number differs from itself.
  unknown = lambda x: lax.population_count(x) > 32
  return lax.platform_dependent(bits, cpu=unknown, default=lambda x: x != x)


def _first_bits(x: Array) -> Array:
  """Returns the bits of the first element, as an unsigned integer."""
  return lax.bitcast_convert_type(x[(0,) * x.ndim], f"uint{8 * x.dtype.itemsize}")


def packed(rows: Array, *, least: int = _MANY) -> Array:
  """Returns the words of a payload, materialized in rows on a CPU if they are many."""
  # XLA would compute them in the shape of the message that they are part of, one by one
  # and ten times as slowly, and again for the loss of encoding them. Before codes in
  # them are added as integers, `SOME` are many: XLA would encode a word anew for each
  # of its codes.
  return rows if rows.size < least else _down_once(rows)


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


def unknown(numbers: Sequence[int], like: Array) -> list[Array]:
  """Returns integers, ``int32[]``, that XLA for CPU does not know."""
  # A program that reads one as an index is then the program for another index, too, and
  # XLA compiles equal programs once. It would fuse a slice from a known index instead.
  # `like` is any array; the integers are typed to vary over the mesh as it does.
  if not like.size:
    return list(map(jnp.int32, numbers))
  return _unknown(like, *map(np.int32, numbers))


@jax.jit  # traced once for all numbers
def _unknown(like: Array, *numbers: Array) -> list[Array]:
  def known(like: Array, *numbers: Array) -> list[Array]:
    bits = _first_bits(like)
    zero = (bits ^ bits).astype(jnp.int32)
    return [lax.add(zero, number) for number in numbers]

  # Else an index would differ between the arrays of a batch, for all that is known.
  integers = functools.partial(materialized, known)
  return _mapped(integers, _unknown, [False] * len(numbers))(like, *numbers)


def starts(
  count: int, like: Array, *, fused: bool = False
) -> Callable[[int, int], Array | int]:
  """Returns a function of ``start, stop``: a start that XLA for CPU does not know."""
  # So programs for leaves of one shape are equal, and compiled once. All `count` rows
  # start at zero. `like` is any array that is materialized in any case. Where the
  # addition of a start would be `fused` into the program, and make it another one, each
  # start is an unknown number of its own.
  zero = functools.cache(lambda: unknown([0], like)[0])
  sum_of = lambda start: lax.add(zero(), np.int32(start))
  number = lambda start: unknown([start], like)[0] if fused else sum_of(start)
  return lambda start, stop: start if stop - start == count else number(start)


# Slices an axis, by default the first, from a start that XLA does not know.
slice_at = functools.partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)


def word_cutter(rows: Array, axis: int) -> Callable[[int, int], Array]:
  """Returns a function that slices words, from ``start`` to ``stop`` of an axis."""
  every = rows.shape[axis]
  at = starts(every, rows)

  def cut(start: int, stop: int) -> Array:
    # A CPU materializes many words.
    if stop - start == every or rows.size // every * (stop - start) < _MANY:
      return lax.slice_in_dim(rows, start, stop, axis=axis)
    return _cut(rows, at(start, stop), stop - start, axis)

  return cut


@functools.partial(jax.jit, static_argnums=(2, 3))  # leaves of a shape: traced once
def _cut(rows: Array, start: Array, count: int, axis: int) -> Array:
  # Fused into a decoder, a slice from an unknown start takes half as long as that.
  piece = lambda rows, start: slice_at(rows, start, count, axis)
  cut = functools.partial(materialized, piece)
  return _mapped(cut, lambda *given: _cut(*given, count, axis + 1))(rows, start)


def updated_in_place(
  function: Callable[..., _Arrays],
  old: _Arrays,
  count: Array,
  read: Sequence[Any],
) -> tuple[_Arrays, Array]:
  """Returns ``function(old, *read)``, written into the memory of ``old`` on a CPU."""
  # It is for arrays that the caller gives up, and that have another shape there. All
  # other arrays are in `read`. The next array to write takes the count, `int32[]` and
  # not negative, that this one returns. Else XLA would not know that an array that both
  # read may be written over, and copy it.

  def directly(old: _Arrays, count: Array) -> tuple[_Arrays, Array]:
    return function(old, *read), count

  def loop(old: _Arrays, count: Array) -> tuple[_Arrays, Array]:
    def round(passed: tuple[Array, _Arrays]) -> tuple[Array, _Arrays]:
      number, old = passed
      # XLA moves what depends on no number of a round out of the loop, and materializes
      # it. It does so while barriers stand, each of which gives its arrays one type.
      here = lambda x: lax.optimization_barrier((number, x))[1]
      return number + 1, function(old, *jax.tree.map(here, read))

    # XLA would write a reshaped result into new memory, and copy it. A loop keeps its
    # memory, and XLA does not know that this one has one round.
    rounds = (count >= 0).astype(jnp.int32)
    first = (jnp.int32(0), old)
    number, new = lax.while_loop(lambda passed: passed[0] < rounds, round, first)
    return new, number

  if max(x.size for x in jax.tree.leaves(old)) < LARGE:
    return directly(old, count)
  return lax.platform_dependent(old, count, cpu=loop, default=directly)


# `lax.switch` traces each branch with all arrays, which takes time by the square of
# their number. This traces the function once.
_PICK = Primitive("gradcomp_pick")
_PICK.multiple_results = True
_PICK.def_abstract_eval(lambda *_, body, count: body.out_avals)


def pick(
  function: Callable[[Array], _Arrays],
  number: Array,
  arrays: Sequence[Array],
) -> _Arrays:
  """Returns ``function(arrays[number])``, of arrays of one type."""
  if len(arrays) == 1:
    return function(arrays[0])
  assert len(set(map(jax.typeof, arrays))) == 1
  closed, like = jax.make_jaxpr(function, return_shape=True)(arrays[0])
  # What the function takes from around it is an operand, too.
  names = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
  body = ClosedJaxpr(closed.jaxpr.replace(constvars=[], invars=names), [])
  number = lax.convert_element_type(number, "int32")  # XLA takes no other
  found = _PICK.bind(number, *arrays, *closed.consts, body=body, count=len(arrays))
  return jax.tree.unflatten(jax.tree.structure(like), found)


@_PICK.def_impl
def _switch(number: Array, *operands: Array, body: ClosedJaxpr, count: int) -> Any:
  function, rest = jaxpr_as_fun(body), operands[count:]
  branches = [functools.partial(function, x, *rest) for x in operands[:count]]
  return lax.switch(number, branches)


def _batched(operands: Any, axes: Any, **params: Any) -> tuple[Any, list[int]]:
  found = jax.vmap(functools.partial(_switch, **params), axes)(*operands)
  return found, [0] * len(found)


def _lower(
  ctx: Any, number: Any, *operands: Any, body: ClosedJaxpr, count: int
) -> Sequence[Any]:
  function = jax.jit(jaxpr_as_fun(body))  # which a program then holds once
  lowered = mlir.lower_fun(function)
  same = [*body.jaxpr.outvars] == body.jaxpr.invars[:1]
  types = [mlir.aval_to_ir_type(ctx.module_context, x) for x in ctx.avals_out]
  case = stablehlo.CaseOp(types, index=number, num_branches=count)
  for region, x in zip(case.regions, operands[:count], strict=True):
    own = ctx.replace(avals_in=body.in_avals)  # a context takes results once
    with ir.InsertionPoint(region.blocks.append()):
      found = [x] if same else lowered(own, x, *operands[count:])
      stablehlo.return_(jax.tree.leaves(found))
  return case.results


batching.primitive_batchers[_PICK] = _batched
mlir.register_lowering(_PICK, _lower)
