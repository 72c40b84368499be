"""PowerSGD: averages leaves as products of two thin matrices, and a dense start."""

import abc
import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import protocol
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.codecs.sums.sum import SumFacts
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.step import Averaged, Step, average
from gradcomp._src.kernels.common.dithers import threefry2x32
from gradcomp._src.transforms import switch
from gradcomp._src.transforms.options import CompressOptions, of_codec, recipe

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
  def init(self, leaf: Leaf, key: Array) -> Memory:
    """Returns a leaf's first state; workers share its ``key``, ``uint32[2]``."""

  @abc.abstractmethod
  def talk(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    """Computes the means of ``float32`` leaves, while others average their arrays."""

  def used_entries(self, memory: Memory) -> None:
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
          one = one._replace(unsent=leaves[i] - nth)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Factors):
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

  rank: int = checks.field(4, RANK)
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
    rows = random_rows(key, self.rank, self._shape[1])
    if not self.alternate:
      return Memory(shared=rows)
    return Memory(shared=(_filled(rows, max(self._shape)), jnp.zeros(1, jnp.int32)))

  def talk(self, leaves: Sequence[Array], memory: Sequence[Any]) -> Talk:
    """Yields left factors, then right ones; or in turns the one that memory lacks."""
    shape = self._shape
    matrices = [leaf.reshape(shape) for leaf in leaves]
    # The fixed random rows of a factor that begin again from zero.
    restart = functools.partial(random_rows, jnp.zeros(2, jnp.uint32), self.rank)
    kept: list[Any]
    right: Any
    if self.alternate:
      old, turns = (jnp.stack(parts) for parts in zip(*memory, strict=True))
      basis = each_orthonormal(old)
      sums = yield [*map(_other_factor, matrices, basis, turns)]
      new = jnp.stack(sums)
      finite = jnp.isfinite(new).all(axis=(1, 2))[:, None]
      # Else a number that is not finite would reach its row alone.
      new = jnp.where(finite[..., None], new, jnp.nan)
      is_left = turns[:, :, None] == 1  # the basis
      left = jnp.where(is_left, basis, new)[..., : shape[0]]
      right = jnp.where(is_left, new, basis)[..., : shape[1]]
      of_left, of_right = (_filled(restart(side), max(shape)) for side in shape)
      found = remembered(old, new, jnp.where(is_left, of_right, of_left))
      kept = [*zip(found, jnp.where(finite, 1 - turns, turns), strict=True)]
    else:
      sums = yield [*map(left_factor, matrices, memory)]
      left = each_orthonormal(jnp.stack(sums))
      right = yield [*map(right_factor, left, matrices)]
      start = restart(shape[1])
      kept = [*remembered(jnp.stack(memory), jnp.stack(right), start)]
    given = zip(left, right, leaves, strict=True)
    yield [multiplied(p, q).reshape(leaf.shape) for p, q, leaf in given], kept

  @property
  def _shape(self) -> tuple[int, int]:
    return self.matrix or (0, 0)  # until bind knows the leaf


def _filled(rows: Array, columns: int) -> Array:
  """Fills rows with zeros."""
  return jnp.pad(rows, ((0, 0), (0, columns - rows.shape[1])))


@jax.jit
def _other_factor(matrix: Array, basis: Array, turn: Array) -> Array:
  """Returns the factor beside a basis, which is a left one if ``turn`` is 1."""
  m, n = matrix.shape
  right = lambda: _filled(right_factor(basis[:, :m], matrix), max(m, n))
  left = lambda: _filled(left_factor(matrix, basis[:, :n]), max(m, n))
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
