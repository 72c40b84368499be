"""PowerSGD: sends a leaf's matrix as a product of two thin ones, in two rounds."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.bibliography import VOGELS_2019, ZHANG_2023, Citation
from gradcomp._src.checks import flag, one_of, static_integer, static_number
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import InRounds, Round, Talk
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.kernels.common.threefry import threefry2x32

# The rest of a dependent row is rounding. Measured on float32 products of random
# matrices with those of rank 1 and 3, that is 2**-21 to 2**-18.7 of its length.
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


def orthonormal(rows: Array) -> tuple[Array, Array]:
  r"""Makes rows orthonormal by the Gram-Schmidt process: a basis of their span.

  With rows :math:`a_j`, and :math:`B_j` of the rows :math:`b_1` to :math:`b_{j-1}`,

  .. math:: v_j = (I - B_j^T B_j)^2 \, a_j, \qquad b_j = v_j / \lVert v_j \rVert

  The square means that the span is taken out twice. Once is not enough where little is
  left, which is then mostly rounding. Twice is, whatever the rows: of the result no
  product of two rows is above 2**-20. (A Cholesky factor is as good for
  well-conditioned rows only.)

  A row *depends* on those before it if 2**-16 of its length or less is left, and
  becomes zero, and False in ``bool[r]``. If an element is not finite, its row is NaN.

  References:
    Giraud et al., `Rounding error analysis of the classical Gram-Schmidt
    orthogonalization process <https://doi.org/10.1007/s00211-005-0615-4>`_, 2005
  """
  number = jnp.arange(rows.shape[0])

  def take_out(j: Array, rows: Array) -> Array:
    row = rows[j]
    for _ in range(2):
      share = jnp.where(number < j, product("rm,m->r", rows, row), 0.0)
      row = row - product("r,rm->m", share, rows)
    length = jnp.sqrt(jnp.square(row).sum())
    return rows.at[j].set(jnp.where(length <= _DEPENDENT, 0.0, row / length))

  basis = jax.lax.fori_loop(0, rows.shape[0], take_out, unit_rows(rows))
  return basis, jnp.any(basis != 0, axis=1)


_RANK_RULE = "a number of columns, 1 or more and below 2**31"
_MATRIX_RULE = "None, or a pair of the rows and columns, 1 or more each"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(InRounds):
  r"""Sends the mean of all workers' matrices as a product of rank ``rank``: PowerSGD.

  A leaf is read as a matrix :math:`M_i` of m by n, worker :math:`i`'s own. With the
  right factor :math:`Q` that the last step left, a step of subspace iteration finds the
  mean of N workers,

  .. math:: P = \frac{1}{N} \sum_i M_i Q, \qquad \hat P = \mathrm{orthonormalize}(P),
     \qquad Q' = \frac{1}{N} \sum_i M_i^T \hat P, \qquad
     \frac{1}{N} \sum_i M_i \approx \hat P Q'^T

  Both sums are sums of plain numbers. So what a worker sends does not depend on N:
  ``rank * (m + n)`` numbers of 32 bits in two rounds, or of 8 bits with ``bits=8``.
  Without that, a mean of rank ``rank`` or less is exact but for rounding, where
  :math:`P` spans its columns, as it does from almost every :math:`Q`.

  It is biased, and needs a residual: :math:`M_i - \hat P Q'^T`, against the mean of all
  workers, so that the residuals of all together hold what the mean lacks. Each worker
  computes :math:`\hat P` by itself, from the same bits. So all workers need the same
  kind of device.

  The matrix is the cut of a leaf's shape, between two of its axes, that makes ``m + n``
  least. Of two axes it is the leaf itself. (The paper cuts behind the first axis, where
  PyTorch's convolutions have their output channels; JAX's have them last.) A leaf of
  at most ``min_rate`` times the numbers that its factors have, as every vector is,
  becomes ``Dense()``.

  Three things differ from the paper. Columns of :math:`Q` are kept with length 1: their
  span is the same, and no scale of gradients overflows or vanishes. The first :math:`Q`
  is uniform, not normal. A column of :math:`P` of which 2**-16 or less lies outside the
  span of those before it becomes zero in :math:`\hat P`. Columns of :math:`Q'` that are
  zero, as they are then and of a zero gradient, are remembered as fixed random numbers
  instead, from which the next step can find something.

  With ``alternate=True`` a step sends one factor, in one round (ACP-SGD). Even steps
  take :math:`Q` from memory and send :math:`P`, odd ones the other way around:

  .. math:: \hat Q = \mathrm{orthonormalize}(Q), \quad
     P' = \frac{1}{N} \sum_i M_i \hat Q, \quad
     \frac{1}{N} \sum_i M_i \approx P' \hat Q^T

  So two steps are one of subspace iteration. That factor fills the longer side with
  zeros, for all steps to be one program: ``rank * max(m, n)`` numbers, half of both for
  a square matrix. The paper's residual is :math:`M_i - M_i \hat Q \hat Q^T`; the sum of
  all workers', on which alone means depend, is that of the residuals here.

  A NaN or an infinity makes the whole leaf NaN on every worker, and leaves its memory
  as it was.

  Attributes:
    rank: the columns of both factors, 1 or more. The paper tries 1, 2 and 4.
      Default: 4.
    min_rate: the elements of a leaf for each number of its factors, above 0: a leaf
      that has no more than so many is dense. Default: 2.0.
    bits: bits of a number of the factors: 32, or 8, rounded to nearest by
      ``QSGD(bits=8)``. Default: 32.
    alternate: whether each step sends one factor. Default: False.
    matrix: m and n, a pair of integers, which :meth:`bind` finds, or None. Default:
      None.

  Raises:
    ValueError: a hyperparameter is outside these, when the codec is made.
    TypeError: ``encode`` is given integers or complex numbers.

  Example:
    >>> codec = PowerSGD(rank=1)
    >>> x = jnp.outer(jnp.arange(128.0), jnp.linspace(-1.0, 1.0, 256))
    >>> payload = codec.encode(x)
    >>> x.nbytes, payload.rows.nbytes
    (131072, 1536)
    >>> bool(jnp.allclose(codec.decode(payload, like=x), x, rtol=1e-5))
    True

  References:
    Vogels et al., `PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization <https://arxiv.org/abs/1905.13727>`_, 2019, section 3; Zhang et al.,
    `Evaluation and Optimization of Gradient Compression for Distributed Deep Learning
    <https://arxiv.org/abs/2306.08881>`_, 2023, section IV, for ``alternate``
  """

  rank: int = 4
  min_rate: float = 2.0
  bits: Literal[8, 32] = 32
  alternate: bool = False
  matrix: tuple[int, int] | None = None

  citations: ClassVar[tuple[Citation, ...]] = (
    Citation(
      VOGELS_2019,
      "Columns of the right factor are kept with length 1. The first ones are uniform, "
      "and not normal. Those that the mean does not need are remembered as random "
      "numbers. A leaf becomes the matrix whose sides are least. Factors of 8 bits are "
      "not the paper's.",
    ),
    Citation(ZHANG_2023, "One factor a step, with alternate=True only."),
  )

  def __post_init__(self) -> None:
    rank = static_integer("rank", _RANK_RULE, self.rank, least=1, most=2**31 - 1)
    object.__setattr__(self, "rank", rank)
    if self.matrix is not None:
      if not isinstance(self.matrix, tuple) or len(self.matrix) != 2:
        raise ValueError(f"`matrix` must be {_MATRIX_RULE}, got {self.matrix!r}.")
      for side in self.matrix:
        static_integer("matrix", _MATRIX_RULE, side, least=1)
    rate = static_number("min_rate", "a positive number", self.min_rate)
    object.__setattr__(self, "min_rate", rate)
    one_of("bits", Literal[8, 32], self.bits)
    flag("alternate", self.alternate)

  @property
  def inner(self) -> Dense | QSGD:
    """The codec of both factors."""
    return Dense() if self.bits == 32 else QSGD(bits=8, rounding="nearest")

  @property
  def contraction(self) -> float:
    # A random subspace of `rank` dimensions holds so much of a matrix.
    share = self.rank / max(self.matrix) if self.matrix else 0.0
    return min(1.0, share) or super().contraction

  def rounds(self, shape: tuple[int, ...]) -> tuple[Round, ...]:
    """Returns the left factor and the right one, or the longer, columns as rows."""
    m, n = self._shape
    if self.alternate:
      return (Round((self.rank, max(m, n)), self.inner),)
    return Round((self.rank, m), self.inner), Round((self.rank, n), self.inner)

  def bind(self, leaf: Leaf) -> "PowerSGD | Dense":
    """Returns the codec of a leaf's matrix; ``Dense()`` where that saves too little."""
    shape = leaf.shape
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    m, n = min(cuts, key=sum, default=(1, leaf.size))
    if not (m + n) * self.rank * self.min_rate < m * n:
      return Dense()
    return dataclasses.replace(self, matrix=(m, n))

  def init(self, leaf: Leaf, key: Array) -> Memory:
    """Returns a leaf's first right factor: random rows, ``float32[rank, n]``.

    If factors alternate, zeros fill it to ``max(m, n)``, and beside it is the turn,
    ``int32[1]``: 0 if it is a right factor, and 1 if it is a left one.
    """
    rows = random_rows(key, self.rank, self._shape[1])
    if not self.alternate:
      return Memory(shared=rows)
    return Memory(shared=(_filled(rows, max(self._shape)), jnp.zeros(1, jnp.int32)))

  def in_rounds(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    """Computes the mean of leaves of one codec, while others average the factors.

    Yields for each leaf the left factor, ``float32[rank, m]``, and then the right one,
    ``float32[rank, n]``, which is also the shared state. If factors alternate, it
    yields the one that the memory does not have.
    """
    if self.alternate:
      return (yield from self._in_turn(leaves, memory))
    matrices = [leaf.reshape(self._shape) for leaf in leaves]
    sums = yield [left_factor(m, q) for m, q in zip(matrices, memory, strict=True)]
    basis, _ = each_orthonormal(jnp.stack(sums))
    factors = yield [right_factor(m, p) for m, p in zip(matrices, basis, strict=True)]
    given = zip(basis, factors, leaves, strict=True)
    means = [multiplied(p, q).reshape(leaf.shape) for p, q, leaf in given]
    old, new = jnp.stack(memory), jnp.stack(factors)
    return means, list(remembered(old, new, self._restarts[1]))

  def _in_turn(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    matrices = [leaf.reshape(self._shape) for leaf in leaves]
    old, turns = (jnp.stack(parts) for parts in zip(*memory, strict=True))
    basis, _ = each_orthonormal(old)
    factors = yield [*map(_other_factor, matrices, basis, turns)]
    new = jnp.stack(factors)
    finite = jnp.isfinite(new).all(axis=(1, 2))[:, None]
    # Else a number that is not finite would reach its row alone.
    new = jnp.where(finite[..., None], new, jnp.nan)
    is_left = turns[:, :, None] == 1  # the basis
    left = jnp.where(is_left, basis, new)[..., : self._shape[0]]
    right = jnp.where(is_left, new, basis)[..., : self._shape[1]]
    given = zip(left, right, leaves, strict=True)
    means = [multiplied(p, q).reshape(leaf.shape) for p, q, leaf in given]
    found = unit_rows(new)
    begins = [_filled(rows, max(self._shape)) for rows in self._restarts]
    begin = jnp.where(is_left, begins[1], begins[0])
    found = jnp.where((found == 0).all(axis=-1, keepdims=True), begin, found)
    kept = jnp.where(finite[..., None], found, old)
    return means, list(zip(kept, jnp.where(finite, 1 - turns, turns), strict=True))

  @property
  def _shape(self) -> tuple[int, int]:
    return self.matrix or (0, 0)  # until bind knows the leaf

  @property
  def _restarts(self) -> list[Array]:
    """The fixed random rows of a left and a right factor that begin again from zero."""
    key = jnp.zeros(2, jnp.uint32)
    return [random_rows(key, self.rank, side) for side in self._shape]


def _filled(rows: Array, columns: int) -> Array:
  """Fills rows with zeros."""
  return jnp.pad(rows, ((0, 0), (0, columns - rows.shape[1])))


@jax.jit
def _other_factor(matrix: Array, basis: Array, turn: Array) -> Array:
  """Returns the factor beside a basis, which is a left one if ``turn`` is 1."""
  m, n = matrix.shape
  right = lambda: _filled(right_factor(matrix, basis[:, :m]), max(m, n))
  left = lambda: _filled(left_factor(matrix, basis[:, :n]), max(m, n))
  return jax.lax.cond(turn[0] == 1, right, left)


@jax.jit
def left_factor(matrix: Array, right: Array) -> Array:
  """Returns the left factor beside a right one, ``float32[..., rank, m]``."""
  return product("...mn,...rn->...rm", matrix, right)


@jax.jit
def right_factor(matrix: Array, left: Array) -> Array:
  """Returns the right factor beside a left one, ``float32[..., rank, n]``."""
  return product("...rm,...mn->...rn", left, matrix)


@jax.jit
def multiplied(left: Array, right: Array) -> Array:
  """Returns the matrix of two factors, ``float32[..., m, n]``."""
  return product("...rm,...rn->...mn", left, right)


def remembered(old: Array, right: Array, start: Array) -> Array:
  """Returns the right factors of the next step, ``float32[..., rank, n]``.

  ``start`` replaces zero rows, and old ones stay in place of those not finite.
  """
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
  words = jnp.concatenate(threefry2x32(key, (row, pair)), axis=1)[:, :columns]
  signed = jax.lax.bitcast_convert_type(words, jnp.int32) >> 8
  return signed.astype(jnp.float32) * jnp.float32(2.0**-23)
