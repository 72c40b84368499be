"""Shared top-k: workers choose the same rows by a sketch, and add up only these."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src.bibliography import CHEN_2025, Citation
from gradcomp._src.checks import static_integer, static_number
from gradcomp._src.codecs import sparse
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.power_sgd import product
from gradcomp._src.codecs.protocol import InRounds, Round, Talk
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.kernels.common.threefry import fold_key, threefry2x32

_COLUMNS_RULE = "a number of columns, 1 or more and below 2**31"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTopK(InRounds):
  r"""Sends the rows of the mean that are largest by a sketch, the same of all workers.

  A leaf is read as a matrix :math:`G_i` of m rows, along its last axis, of n elements,
  worker :math:`i`'s own. With signs :math:`V` of n by r, which all workers draw from a
  shared key, other ones in each step, and with k rows :math:`I` to send,

  .. math:: P = \frac{1}{N} \sum_i G_i V, \qquad I = \mathrm{argtop}_k \lVert P_j
     \rVert_2, \qquad Q_j = \frac{1}{N} \sum_i G_{i, j} \text{ for } j \in I, \quad 0
     \text{ otherwise}

  Both sums are sums of plain numbers: no index is sent, and with ``exchange="psum"``
  what a worker sends does not depend on N, ``m * columns + k * n`` numbers, where
  payloads of :class:`gradcomp.codecs.TopK` are gathered, one from each worker.

  In the mean over V, :math:`\lVert P_j \rVert^2` is r times the squared length of row j
  of the mean. If one row is much longer than others, it is sent.

  It is biased, and needs a residual: :math:`G_i - Q`, against the mean of all workers,
  so that the residuals of all together hold what the mean lacks, and that alone.
  Each worker chooses rows by itself, from the same bits. So all workers need the same
  kind of device.

  A leaf of at most ``min_rate`` times the numbers that it would send, as every vector
  is, becomes ``Dense()``. A NaN or an infinity makes the whole leaf NaN on every
  worker.

  Three things differ from the paper. V has signs, not normal numbers: the estimates
  vary less, and nothing overflows. Feedback is the residual, or what the transformation
  is given, and not the paper's EF21 with momentum. Leaves of few rows are dense.

  Attributes:
    density: the share of the rows to send, above 0 and at most 1; at least one is sent.
      Default: 0.01.
    columns: r, the columns of the sketch, 1 or more. Default: 4.
    dtype: of the numbers on the wire, ``float32``, or ``bfloat16`` or ``float16``,
      which ``"psum"`` does not take. Default: ``float32``.
    min_rate: the elements of a leaf for each number that it would send, above 0: a leaf
      that has no more than so many is dense. Default: 2.0.
    matrix: m and n, a pair of integers, which :meth:`bind` finds, or None. Default:
      None.

  Raises:
    ValueError: a hyperparameter is outside these, when the codec is made.
    TypeError: ``encode`` is given integers or complex numbers.

  Example:
    >>> codec = SharedTopK(density=0.01)
    >>> x = jnp.ones((100, 64)).at[7].set(9.0)
    >>> payload = codec.encode(x)
    >>> x.nbytes, payload.rows.nbytes
    (25600, 2560)
    >>> jnp.nonzero(codec.decode(payload, like=x)[:, 0])[0]
    Array([7], dtype=int32)

  References:
    Chen et al., `An All-Reduce Compatible Top-K Compressor for Communication-Efficient
    Distributed Learning <https://arxiv.org/abs/2510.26709>`_, 2025, section 3
  """

  density: float = 0.01
  columns: int = 4
  dtype: DTypeLike = jnp.dtype(jnp.float32)  # Sphinx reads no signature with a class
  min_rate: float = 2.0
  matrix: tuple[int, int] | None = None

  citations: ClassVar[tuple[Citation, ...]] = (
    Citation(
      CHEN_2025,
      "The sketch is a product with random signs, and not with normal numbers. "
      "Feedback is a residual.",
    ),
  )

  def __post_init__(self) -> None:
    object.__setattr__(self, "density", sparse.checked_density(self.density))
    columns = static_integer(
      "columns", _COLUMNS_RULE, self.columns, least=1, most=2**31 - 1
    )
    object.__setattr__(self, "columns", columns)
    object.__setattr__(self, "dtype", Dense(dtype=self.dtype).dtype)
    rate = static_number("min_rate", "a positive number", self.min_rate)
    object.__setattr__(self, "min_rate", rate)

  @property
  def inner(self) -> Dense:
    """The codec of the sketch and of the rows."""
    return Dense(dtype=self.dtype)

  def bind(self, leaf: Leaf) -> "SharedTopK | Dense":
    """Returns the codec of a leaf's matrix; ``Dense()`` where that saves too little."""
    n = leaf.shape[-1] if leaf.shape else 1
    bound = dataclasses.replace(self, matrix=(math.prod(leaf.shape[:-1]), n))
    numbers = sum(math.prod(x.shape) for x in bound.rounds(leaf.shape))
    return bound if numbers * self.min_rate < leaf.size else Dense()

  def rounds(self, shape: tuple[int, ...]) -> tuple[Round, ...]:
    """Returns the sketch and the chosen rows."""
    m, n = self.matrix or (0, 0)  # until bind knows the leaf
    chosen = sparse.sent_of(self.density, m), n
    return Round((m, self.columns), self.inner), Round(chosen, self.inner)

  def init(self, leaf: Leaf, key: Array) -> Memory:
    """Returns the key of a leaf's first signs, ``uint32[2]``."""
    return Memory(shared=key)

  def in_rounds(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    """Computes the mean of leaves of one codec, while others average their arrays.

    Yields for each leaf the sketch, ``float32[m, columns]``, and then the chosen rows,
    ``float32[k, n]``. Returns the key of the next signs as the shared state.
    """
    (_, chosen), shape = self.rounds(leaves[0].shape), leaves[0].shape
    matrices = [leaf.reshape(self.matrix or (0, 0)) for leaf in leaves]
    pairs = zip(matrices, memory, strict=True)
    sketches = yield [_sketch(matrix, key, self.columns) for matrix, key in pairs]
    places = [_largest_rows(sketch, chosen.shape[0]) for sketch in sketches]
    rows = yield [x[rows] for x, rows in zip(matrices, places, strict=True)]
    parts = zip(rows, places, sketches, strict=True)
    means = [_mean(*part, self.matrix or (0, 0)).reshape(shape) for part in parts]
    return means, [_next_key(key) for key in memory]


_next_key = jax.jit(lambda key: fold_key(key, 0))


@functools.partial(jax.jit, static_argnums=2)  # leaves of a shape: traced once
def _sketch(matrix: Array, key: Array, columns: int) -> Array:
  """Multiplies a matrix by signs, scaled so that no sum of a row overflows."""
  n = matrix.shape[1]
  row = jnp.arange(n, dtype=jnp.uint32)[:, None]
  bits, _ = threefry2x32(key, (row, jnp.arange(columns, dtype=jnp.uint32)))
  scale = 2.0 ** -math.ceil(math.log2(n))
  signs = jnp.where(bits & 1 == 1, jnp.float32(scale), jnp.float32(-scale))
  return product("mn,nr->mr", matrix, signs)


@functools.partial(jax.jit, static_argnums=1)
def _largest_rows(sketch: Array, count: int) -> Array:
  """Returns the numbers of the rows with the largest norms, ``int32[count]``."""
  # Squares of numbers up to 1 do not overflow.
  largest = jnp.abs(sketch).max()
  scaled = sketch / jnp.where(largest > 0, largest, 1.0)
  return jax.lax.top_k(jnp.square(scaled).sum(axis=1), count)[1]


@functools.partial(jax.jit, static_argnums=3)
def _mean(rows: Array, places: Array, sketch: Array, shape: tuple[int, int]) -> Array:
  """Returns the matrix with rows in their places; NaN if the sketch is not finite."""
  mean = jnp.zeros(shape, jnp.float32).at[places].set(rows, unique_indices=True)
  return jnp.where(jnp.isfinite(sketch).all(), mean, jnp.nan)
