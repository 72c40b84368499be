"""PowerSGD: averages leaves as products of two thin matrices, and a dense start."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.core.transform import compress
from gradcomp._src.transforms import factors, switch
from gradcomp._src.transforms.options import CompressOptions, of_codec, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(factors.Factors):
  """The factors of each leaf, as :func:`gradcomp.powersgd` describes them.

  Attributes:
    rank: the columns of both factors, 1 or more. The paper tries 1, 2 and 4. Default:
      4.
    min_rate: the elements of a leaf for each number of its factors, above 0; a leaf
      with no more is dense. Default: 2.0.
    bits: bits of a number of the factors: 32, or 8, rounded to nearest by
      ``QSGD(bits=8)``. Default: 32.
    alternate: whether each step sends one factor. Default: False.

  References:
    Vogels et al., `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019, section 3;
    Zhang et al., `Evaluation and Optimization of Gradient Compression
    <https://arxiv.org/abs/2306.08881>`_, 2023, section IV, for ``alternate``
  """

  rank: int = checks.field(4, factors.RANK)
  min_rate: float = checks.field(2.0, checks.number("a positive number"))
  bits: Literal[8, 32] = checks.field(32, checks.choice(Literal[8, 32]))
  alternate: bool = checks.field(False, checks.FLAG)
  matrix: tuple[int, int] | None = None  # m and n, which bind finds

  papers: ClassVar[tuple[str, ...]] = ("vogels2019powersgd", "zhang2023acpsgd")

  @property
  def inner(self) -> Dense | QSGD:
    return Dense() if self.bits == 32 else QSGD(bits=8, rounding="nearest")

  @property
  def sides(self) -> tuple[tuple[int, ...], ...]:
    """The left factor and the right one, or the longer; columns are rows."""
    m, n = self._shape
    if self.alternate:
      return ((self.rank, max(m, n)),)
    return (self.rank, m), (self.rank, n)

  def bind(self, leaf: Leaf) -> Any:
    """Returns the factors of a leaf's matrix; ``Dense()`` if they save too little."""
    shape = leaf.shape
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    m, n = min(cuts, key=sum, default=(1, leaf.size))
    if not (m + n) * self.rank * self.min_rate < m * n:
      return Dense()
    return dataclasses.replace(self, matrix=(m, n))

  def init(self, leaf: Leaf, key: Array) -> Memory:
    """Returns random right factors, ``float32[rank, n]``; in turns filled to m, n."""
    rows = factors.random_rows(key, self.rank, self._shape[1])
    if not self.alternate:
      return Memory(shared=rows)
    return Memory(shared=(_filled(rows, max(self._shape)), jnp.zeros(1, jnp.int32)))

  def talk(self, leaves: Sequence[Array], memory: Sequence[Any]) -> factors.Talk:
    """Yields left factors, then right ones; or in turns the one that memory lacks."""
    if self.alternate:
      yield from self._in_turn(leaves, memory)
      return
    matrices = [leaf.reshape(self._shape) for leaf in leaves]
    pairs = zip(matrices, memory, strict=True)
    sums = yield [factors.left_factor(m, q) for m, q in pairs]
    basis = factors.each_orthonormal(jnp.stack(sums))
    pairs = zip(matrices, basis, strict=True)
    rights = yield [factors.right_factor(p, m) for m, p in pairs]
    given = zip(basis, rights, leaves, strict=True)
    means = [factors.multiplied(p, q).reshape(leaf.shape) for p, q, leaf in given]
    old, new = jnp.stack(memory), jnp.stack(rights)
    yield means, list(factors.remembered(old, new, self._restarts[1]))

  def _in_turn(self, leaves: Sequence[Array], memory: Sequence[Any]) -> factors.Talk:
    matrices = [leaf.reshape(self._shape) for leaf in leaves]
    old, turns = (jnp.stack(parts) for parts in zip(*memory, strict=True))
    basis = factors.each_orthonormal(old)
    sums = yield [*map(_other_factor, matrices, basis, turns)]
    new = jnp.stack(sums)
    finite = jnp.isfinite(new).all(axis=(1, 2))[:, None]
    # Else a number that is not finite would reach its row alone.
    new = jnp.where(finite[..., None], new, jnp.nan)
    is_left = turns[:, :, None] == 1  # the basis
    left = jnp.where(is_left, basis, new)[..., : self._shape[0]]
    right = jnp.where(is_left, new, basis)[..., : self._shape[1]]
    given = zip(left, right, leaves, strict=True)
    means = [factors.multiplied(p, q).reshape(leaf.shape) for p, q, leaf in given]
    found = factors.unit_rows(new)
    begins = [_filled(rows, max(self._shape)) for rows in self._restarts]
    begin = jnp.where(is_left, begins[1], begins[0])
    found = jnp.where((found == 0).all(axis=-1, keepdims=True), begin, found)
    kept = jnp.where(finite[..., None], found, old)
    yield means, list(zip(kept, jnp.where(finite, 1 - turns, turns), strict=True))

  @property
  def _shape(self) -> tuple[int, int]:
    return self.matrix or (0, 0)  # until bind knows the leaf

  @property
  def _restarts(self) -> list[Array]:
    """The fixed random rows of a left and a right factor that begin again from zero."""
    key = jnp.zeros(2, jnp.uint32)
    return [factors.random_rows(key, self.rank, side) for side in self._shape]


def _filled(rows: Array, columns: int) -> Array:
  """Fills rows with zeros."""
  return jnp.pad(rows, ((0, 0), (0, columns - rows.shape[1])))


@jax.jit
def _other_factor(matrix: Array, basis: Array, turn: Array) -> Array:
  """Returns the factor beside a basis, which is a left one if ``turn`` is 1."""
  m, n = matrix.shape
  right = lambda: _filled(factors.right_factor(basis[:, :m], matrix), max(m, n))
  left = lambda: _filled(factors.left_factor(matrix, basis[:, :n]), max(m, n))
  return jax.lax.cond(turn[0] == 1, right, left)


@recipe(PowerSGD)
def powersgd(
  rank: int = PowerSGD.rank,
  *,
  min_rate: float = PowerSGD.min_rate,
  start: int = 0,
  bits: Literal[8, 32] = PowerSGD.bits,
  alternate: bool = PowerSGD.alternate,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""PowerSGD: averages gradients over ``axis_name`` as products of thin matrices.

  A leaf of worker :math:`i`, with its residual, is read as a matrix :math:`M_i` of m by
  n. From the right factor :math:`Q` of the last step, a step of subspace iteration
  finds the mean of N workers, by two averages one after the other,

  .. math:: P = \frac{1}{N} \sum_i M_i Q, \qquad \hat P = \mathrm{orthonormalize}(P),
     \qquad Q' = \frac{1}{N} \sum_i M_i^T \hat P, \qquad
     \frac{1}{N} \sum_i M_i \approx \hat P Q'^T

  A worker sends ``rank * (m + n)`` numbers of 32 bits, or of 8 bits with ``bits=8``,
  whatever N is. In 32 bits a mean of rank ``rank`` or less is exact up to rounding, if
  :math:`P` spans its columns, as it does from almost every :math:`Q`.

  It is biased, and always keeps a residual, :math:`M_i - \hat P Q'^T`: the residuals of
  all workers together hold the loss of the mean. Each worker computes :math:`\hat P`
  from the same bits, so all need the same kind of device. Put momentum after it, as in
  the paper: ``optax.sgd(0.1, momentum=0.9)``.

  The matrix is the cut of a leaf's shape between two axes that makes ``m + n`` least.
  (The paper cuts after the first axis, where PyTorch's convolutions have their output
  channels; JAX's have them last.) A leaf of at most ``min_rate`` times the numbers of
  its factors, as every vector is, goes in float32 with the left factors. PowerSGD is no
  codec: combine it with others by ``optax.partition``, not by a policy.

  Three things differ from the paper. Columns of :math:`Q` are kept with length 1, so
  that no scale of gradients overflows or vanishes; their span is the same. The first
  :math:`Q` is uniform, not normal. A column of :math:`P` with 2**-16 or less of its
  length outside the span of earlier ones becomes zero in :math:`\hat P`; a zero column
  of :math:`Q'` is remembered as fixed random numbers, from which the next step can find
  a direction.

  ``alternate=True`` (ACP-SGD) sends one factor a step, by one average. Even steps take
  :math:`Q` from memory and send :math:`P`, odd steps the other way around:

  .. math:: \hat Q = \mathrm{orthonormalize}(Q), \quad
     P' = \frac{1}{N} \sum_i M_i \hat Q, \quad
     \frac{1}{N} \sum_i M_i \approx P' \hat Q^T

  Two steps are one of subspace iteration. All steps are one program, so the factor is
  filled with zeros to the longer side: ``rank * max(m, n)`` numbers. The paper's
  residual is :math:`M_i - M_i \hat Q \hat Q^T`; its sum over workers, on which alone
  means depend, is equal. A NaN or an infinity makes the whole leaf NaN on every worker,
  and leaves its factor as it was.

  Args:
    start: dense steps before the first compressed one, 0 or more. Default: 0.
    feedback: ``"error"``, ``"momentum"``, an object of these, or ``"auto"``, which is
      ``"error"``; see :class:`gradcomp.CompressOptions`. Default: ``"auto"``.

  Returns:
    A gradient transformation, as :func:`gradcomp.compress` returns it; with ``start`` a
    :func:`gradcomp.wrappers.switch` to that. The shared memory of its state has the
    right factors, ``float32[rank, n]`` each.

  Raises:
    ValueError: an argument that factors or ``compress`` do not allow; ``feedback`` is
      None; or ``start`` is no number of steps.

  Example:
    >>> tx = gradcomp.powersgd(rank=1)
    >>> gradient = {"w": jnp.diag(jnp.array([4.0, 1.0] + 62 * [0.0]))}
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> jax.tree.map(lambda *x: bool(jnp.allclose(x[0] + x[1], x[2], atol=1e-6)),
    ...              update, state.residual, gradient)
    {'w': True}
  """
  feedback = options.get("feedback", "auto")
  if feedback is None:
    raise ValueError(
      '`feedback` must be "auto", "error" or "momentum" in PowerSGD, got None; only '
      "residuals keep the error of a low rank."
    )
  steps = checks.step_count("start", start, least=0)
  exchanged = of_codec(powersgd, PowerSGD, locals())
  if not steps:
    return exchanged
  # It keeps the residuals that the next one needs. They stay zero.
  dense: CompressOptions = {**options}
  dense["feedback"] = "error" if feedback == "auto" else feedback
  return switch.switch([steps], [compress(Dense(), **dense), exchanged])
