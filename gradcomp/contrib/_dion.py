"""Dion: momenta in low rank, which workers average as factors and orthonormalize."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from gradcomp._src import checks
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.sums import records
from gradcomp._src.codecs.sums.sum import SumFacts
from gradcomp._src.core import feedback, transform
from gradcomp._src.core.border import any_tree
from gradcomp._src.exchange import auto, plan, protocol
from gradcomp._src.mesh import axes, shard_maps
from gradcomp._src.optimizers.moments import require_agreement, with_decay
from gradcomp._src.transforms import low_rank


def dion(  # noqa: PLR0913 - options of users, by keyword
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: axes.AxisName | None = None,
  rank: int,
  mu: float = 0.95,
  weight_decay: Any = 0.0,
  mask: Any = None,
  exchange: auto.ExchangeName | auto.Auto | protocol.Exchange = "auto",
  message_bytes: plan.MessageBytes = "auto",
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains matrices by orthonormal steps of low rank: Dion.

  It replaces an optimizer, with nothing before it, and takes each worker's own gradient
  :math:`G_i`, m by n, as :func:`gradcomp.compress` does. Each worker keeps its own
  momentum :math:`M_i`; all have bit-identical :math:`Q` and parameters :math:`X`:

  .. math::
     B_i = M_i + G_i, \qquad P = \mathrm{orthonormalize}\Bigl(\frac{1}{N} \sum_i B_i
     Q\Bigr), \qquad R = \frac{1}{N} \sum_i B_i^T P

  .. math::
     M_i \leftarrow B_i - (1 - \mu) P R^T, \qquad Q \leftarrow R \text{ with columns of
     length } 1, \qquad X \leftarrow X - \eta \Bigl(\sqrt{\tfrac{n}{m}} \, P Q^T +
     \lambda X\Bigr)

  A worker sends ``r * (m + n)`` numbers of 32 bits in two averages, r being ``rank`` or
  the shorter side if that is less. Momenta keep the rest. It is the paper's form with
  decoupled momenta: the mean of all :math:`M_i` is the momentum of averaged gradients.
  At full rank, :math:`P Q^T` approaches the polar factor of the momentum, as Muon does:
  each step is one of a power iteration.

  All leaves must be matrices. Axes before the last two stack them, as layers in a scan.
  Send vectors, embeddings and the last layer to another optimizer, by
  ``optax.partition``. A matrix that is sharded over other axes is one matrix a shard.

  Three things differ from the paper. Rows are inputs, as in JAX, so that the paper's
  :math:`\sqrt{m / n}` is :math:`\sqrt{n / m}`. Columns are made orthonormal as in
  :func:`gradcomp.powersgd`, not by a randomized Cholesky QR: a dependent column becomes
  zero. Zero columns of :math:`Q` begin again from random numbers, which the step itself
  does not use. A NaN or an infinity makes a whole matrix NaN on every worker, and
  leaves the state as it was. :func:`gradcomp.reshard_state` should ``keep="mean"``.

  Args:
    learning_rate: :math:`\eta`, a number or a schedule of optax.
    axis_name: as for :func:`gradcomp.compress`.
    rank: the rank of a step, 1 or more.
    mu: :math:`\mu`, at least 0 and below 1.
    weight_decay: :math:`\lambda`, decoupled. Above 0, ``update`` needs the parameters.
    mask: the leaves that decay, a tree of bools or a function of the parameters.
    exchange, message_bytes: options of the factors, see
      :class:`gradcomp.CompressOptions`.
    key: the key of the first :math:`Q`, the same on all workers.

  Returns:
    A gradient transformation, an ``optax.chain`` that begins with a
    :class:`gradcomp.state.CompressState`. Its ``residual`` is the momentum, float32.

  Raises:
    ValueError: an option is bad; a leaf is no matrix; or as in
      :func:`gradcomp.compress`.
    TypeError: in ``update``, a gradient is not real floating point.

  Example:
    >>> from gradcomp.contrib import dion
    >>> tx = dion(1.0, rank=1)
    >>> gradient = jnp.outer(jnp.array([2.0, 0.0]), jnp.array([3.0, 4.0]))
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> np.array(update).round(4)
    array([[-0.6, -0.8],
           [ 0. ,  0. ]], dtype=float32)

  References:
    Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, 2025, algorithm 1, and its
    form for data parallel workers
  """
  told = dict(locals())
  way = auto.as_exchange(exchange)
  if not way.sends:
    raise ValueError(
      '`exchange` must send, because all workers take one step, got "local"; '
      "axis_name=None is for one worker."
    )
  step = transform.compress(
    _Factors(rank=rank, mu=mu),
    axis_name=axis_name,
    exchange=way,
    feedback=_Momentum(),
    min_leaf_size=0,
    message_bytes=message_bytes,
    key=key,
  )

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    require_agreement("gradcomp.contrib.dion", told, updates, params)
    # The rounding error of a step in fewer bits must not join the momentum.
    wide = jax.tree.map(_in_float32, updates)
    steps, state = step.update(wide, state, params, **extra_args)
    return jax.tree.map(lambda x, g: x.astype(g.dtype), steps, updates), state

  first = any_tree(step.init, update_fn, {"axis_name": axis_name})
  return with_decay(first, learning_rate, weight_decay, mask)


def _in_float32(gradient: Array) -> Array:
  if not jnp.issubdtype(gradient.dtype, jnp.floating):
    raise TypeError(f"`updates` must have real float dtypes, got {gradient.dtype}.")
  return shard_maps.map_addends(lambda x: x.astype(jnp.float32), gradient)


@dataclasses.dataclass(frozen=True)
class _Momentum(feedback.NoFeedback):
  """Keeps the rest of a message as momentum, and steps in place of the mean."""

  keeps: ClassVar[bool] = True

  def received(
    self, updates: Any, estimate: Any, reduced: feedback.Means
  ) -> feedback.Means:
    return [x._replace(mean=_step(x.mean, *x.memory.shared)) for x in reduced]


@jax.jit
def _step(mean: Array, right: Array, left: Array) -> Array:
  """Returns the step of a leaf, by factors; NaN where its mean is not finite."""
  m, n = left.shape[-1], right.shape[-1]
  step = math.sqrt(n / m) * low_rank.multiplied(left, right).reshape(mean.shape)
  return jnp.where(jnp.isfinite(mean), step, jnp.nan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Factors(low_rank.Factors):
  """Sends ``1 - mu`` of the mean as factors; keeps the last right and left ones."""

  rank: int = checks.field(..., low_rank.RANK)
  mu: float = checks.field(..., checks.BELOW_1)
  matrix: tuple[int, int, int] | None = None  # the stack, m and n, once bound

  papers: ClassVar[tuple[str, ...]] = ("ahn2025dion",)
  inner: ClassVar[Dense] = Dense()

  @property
  def sides(self) -> tuple[tuple[int, ...], ...]:
    """The left factors and the right ones, columns as rows."""
    stack, m, n = self._shape
    return (stack, self.rank, m), (stack, self.rank, n)

  @property
  def _shape(self) -> tuple[int, int, int]:
    return self.matrix or (0, 0, 0)  # until bind knows the leaf

  @property
  def facts(self) -> SumFacts:
    """The facts about sums of factors, which are steps in units of their own."""
    return dataclasses.replace(super().facts, own_units=True)

  def check_leaves(self, leaves: Sequence[records.Leaf]) -> None:
    """Raises ValueError for a leaf that is no matrix."""
    for leaf in leaves:
      if len(leaf.shape) < 2 or not leaf.size:
        raise ValueError(
          "`params` must have matrices alone, or stacks of them, none empty, but "
          f"{leaf.path!r} has the shape {leaf.shape}; give other leaves to another "
          "optimizer by optax.partition."
        )

  def bind(self, leaf: records.Leaf) -> Any:
    """Returns the codec of a leaf's matrices."""
    *stack, m, n = leaf.shape
    rank = min(self.rank, m, n)
    return dataclasses.replace(self, rank=rank, matrix=(math.prod(stack), m, n))

  def init(self, leaf: records.Leaf, key: Array) -> records.Memory:
    """Returns a leaf's first right factors, which are random, and no left ones."""
    stack, m, n = self._shape
    rows = low_rank.random_rows(key, stack * self.rank, n).reshape(stack, self.rank, n)
    return records.Memory(shared=(rows, jnp.zeros((stack, self.rank, m), jnp.float32)))

  def talk(self, leaves: Sequence[Array], memory: Sequence[Any]) -> low_rank.Talk:
    """Computes the share of the mean that is sent, while others average the factors."""
    stacks = [leaf.reshape(self._shape) for leaf in leaves]
    sums = yield [*map(low_rank.left_factor, stacks, (right for right, _ in memory))]
    basis = low_rank.each_orthonormal(jnp.concatenate(sums))
    lefts = basis.reshape(len(leaves), *sums[0].shape)
    rights = yield [*map(low_rank.right_factor, lefts, stacks)]
    start = low_rank.random_rows(jnp.zeros(2, jnp.uint32), self.rank, self._shape[2])
    shares, kept = list[Array](), list[tuple[Array, Array]]()
    for x, left, right, (old, last) in zip(leaves, lefts, rights, memory, strict=True):
      finite = jnp.isfinite(right).all(axis=(1, 2), keepdims=True)
      # Else a number that is not finite would reach its column alone.
      sent = jnp.where(finite, (1 - self.mu) * right, jnp.nan)
      shares.append(low_rank.multiplied(left, sent).reshape(x.shape))
      new = low_rank.remembered(old, right, start)
      kept.append((jnp.where(finite, new, old), jnp.where(finite, left, last)))
    yield shares, kept
