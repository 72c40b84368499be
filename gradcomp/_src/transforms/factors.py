"""Averages of factors in place of leaves, one after the other."""

import abc
import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import protocol, sums
from gradcomp._src.codecs.sums.sum import SumFacts
from gradcomp._src.exchange.step import Averaged, Step, average
from gradcomp._src.kernels.common.threefry import threefry2x32

# Yields the arrays of each average, is sent their means, and at last yields the means
# of the leaves, and the next state of each.
Talk = Generator[Any, list[Array], None]

RANK = checks.integer("a number of columns, 1 or more and below 2**31", 1, 2**31 - 1)


class Factors(protocol.LeafCodec, checks.Checked, abc.ABC):
  """The arrays that workers average in place of a leaf, a matrix or a stack of them."""

  fits: ClassVar[None] = None
  matrix: tuple[int, ...] | None  # the shape of the leaf's matrices; None until bound

  @property
  @abc.abstractmethod
  def inner(self) -> protocol.Codec:
    """The codec of the arrays."""

  @property
  @abc.abstractmethod
  def sides(self) -> tuple[tuple[int, ...], ...]:
    """The shapes of the arrays, one for each average."""

  @abc.abstractmethod
  def init(self, leaf: sums.records.Leaf, key: Array) -> sums.records.Memory:
    """Returns a leaf's first state; workers share its ``key``, ``uint32[2]``."""

  @abc.abstractmethod
  def talk(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    """Computes the means of ``float32`` leaves, while others average their arrays."""

  def used_entries(self, memory: sums.records.Memory) -> None:
    """Returns None: no array counts the entries that it sends."""

  def parts(self, like: jax.ShapeDtypeStruct) -> list[protocol.Part]:
    """Returns the arrays, and the elements of the leaf that each completes."""
    sides = [jax.ShapeDtypeStruct(side, like.dtype) for side in self.sides]
    *first, last = [(side, self.inner, 0) for side in sides]
    return [*first, (*last[:2], like.size)]

  @property
  def facts(self) -> SumFacts:
    facts = self.inner.facts.naming(self.inner)
    return dataclasses.replace(facts, keeps_float64=False)

  def average(self, step: Step, leaves: Any) -> Averaged:
    """Averages the first arrays, with all dense leaves, and then the second ones."""
    alike: dict[Factors, list[int]] = {}
    codecs: Sequence[Any] = step.plan.codecs  # and factors among them
    for i, each in enumerate(codecs):
      if isinstance(each, Factors):
        alike.setdefault(each, []).append(i)
    of = lambda values, own: [values[i] for i in own]
    shared = [x.shared for x in step.memory]
    talk = lambda each, own: each.talk(of(leaves, own), of(shared, own))
    talks = [(own, talk(each, own)) for each, own in alike.items()]
    arrays, means = dict(enumerate(leaves)), dict[int, Any]()
    averages: list[Averaged] = []
    rest = step._replace(keep=False, mark=False, watch=False)
    for turn in range(1 + max((x.turn for x in step.plan.messages), default=0)):
      for own, each in talks:
        arrays |= zip(own, each.send(of(means, own) if turn else None), strict=True)
      came = averages[-1].came if averages else ()
      averages.append(average(rest if turn else step, arrays, came, turn))
      means |= {i: x.mean for i, x in averages[-1].leaves.items()}
    found = averages[0].leaves
    count = step.plan.workers if step.plan.is_sum else 1
    for own, each in talks:
      for i, leaf, kept in zip(own, *each.send(of(means, own)), strict=True):
        one = found[i]._replace(mean=leaf, chosen=None)
        # A single worker's state would no longer be equal on all.
        if step.plan.axis_name is None or step.plan.sends:
          one = one._replace(memory=one.memory._replace(shared=kept))
        if step.keep:
          nth = leaf if count == 1 else leaf / count  # a worker's part of a sum
          one = one._replace(unsent=leaves[i] - nth, own=None)
          one = one._replace(sent=nth) if step.watch else one
        found[i] = one
    return averages[0]

  # A leaf is one row, of the words of all arrays.
  @property
  def tile_size(self) -> int:
    return math.prod(self.matrix or ())

  @property
  def row_words(self) -> int:
    rows = [-(-math.prod(side) // self.inner.tile_size) for side in self.sides]
    return sum(rows) * self.inner.row_words


# The rest of a dependent row is rounding: 2**-21 to 2**-18.7 of its length, measured on
# float32 products of random matrices with matrices of rank 1 and 3.
_DEPENDENT = 2.0**-16


def product(spec: str, *factors: Array) -> Array:
  """Multiplies as ``jnp.einsum`` does, with factors of full precision."""
  # GPUs and TPUs round factors to 10 or 7 bits by default. Rows would then be
  # orthogonal to 1e-3 or worse, and the common part of two rows would count twice.
  return jnp.einsum(spec, *factors, precision=jax.lax.Precision.HIGHEST)


def unit_rows(rows: Array) -> Array:
  """Scales rows, ``float32[..., m]``, to length 1; zero rows stay zero."""
  largest = jnp.abs(rows).max(axis=-1, keepdims=True)
  # Squares of numbers up to 1 neither overflow nor vanish. A NaN is not equal to zero.
  scaled = jnp.where(largest == 0, 0.0, rows / largest)
  length = jnp.sqrt(jnp.square(scaled).sum(axis=-1, keepdims=True))
  return jnp.where(length == 0, 0.0, scaled / length)


def orthonormal(rows: Array) -> Array:
  """Returns an orthonormal basis of rows, ``float32[r, m]``, or zero if dependent."""
  # Gram-Schmidt, with the span taken out twice (Giraud et al., 2005). Once is not
  # enough where little is left, which is then mostly rounding. A Cholesky factor is as
  # good for well-conditioned rows only.
  number = jnp.arange(rows.shape[0])

  def take_out(j: Array, rows: Array) -> Array:
    row = rows[j]
    for _ in range(2):
      share = jnp.where(number < j, product("rm,m->r", rows, row), 0.0)
      row = row - product("r,rm->m", share, rows)
    length = jnp.sqrt(jnp.square(row).sum())
    return rows.at[j].set(jnp.where(length <= _DEPENDENT, 0.0, row / length))

  return jax.lax.fori_loop(0, rows.shape[0], take_out, unit_rows(rows))


# Of a matrix, ``[..., m, n]``, and a right factor, ``[..., rank, n]``, the left one,
# ``[..., rank, m]``; of a left one and a matrix the right one; and of both the matrix.
left_factor = jax.jit(functools.partial(product, "...mn,...rn->...rm"))
right_factor = jax.jit(functools.partial(product, "...rm,...mn->...rn"))
multiplied = jax.jit(functools.partial(product, "...rm,...rn->...mn"))


def remembered(old: Array, right: Array, start: Array) -> Array:
  """Returns the next right factors, ``float32[..., rank, n]``; ``start`` for zeros."""
  new = unit_rows(right)
  # From a row that reaches nothing, or nothing new, zero would follow in every step.
  new = jnp.where((new == 0).all(axis=-1, keepdims=True), start, new)
  return jnp.where(jnp.isfinite(new).all(axis=-1, keepdims=True), new, old)


# One program for all leaves of a shape: the rows of a leaf follow one after another.
each_orthonormal = jax.jit(jax.vmap(orthonormal))


@functools.partial(jax.jit, static_argnums=(1, 2))  # leaves of a shape: traced once
def random_rows(key: Array, rows: int, columns: int) -> Array:
  """Draws ``float32[rows, columns]``, multiples of 2**-23 from -1 to 1."""
  row = jnp.arange(rows, dtype=jnp.uint32)[:, None]
  pair = jnp.arange(-(-columns // 2), dtype=jnp.uint32)
  counter: Any = jnp.broadcast_arrays(row, pair)
  words = jnp.concatenate(threefry2x32(key, counter), axis=1)[:, :columns]
  signed = jax.lax.bitcast_convert_type(words, jnp.int32) >> 8
  return signed.astype(jnp.float32) * jnp.float32(2.0**-23)
