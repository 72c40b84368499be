"""Feedback adds what was not sent to what comes next, with or without momentum."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from gradcomp._checks import flag, share_below_1
from gradcomp.codecs import LeafCodec, working_dtype
from gradcomp.kernels.fixed_point import scaled
from gradcomp.sums import rewritten

FeedbackName = Literal["auto", "error", "momentum"]


@runtime_checkable
class Feedback(Protocol):
  """What a worker does with what it did not send: a frozen dataclass.

  Leaves and trees are float32.
  """

  keeps: ClassVar[bool]
  """True if a worker keeps a residual."""

  moves: ClassVar[bool]
  """True if a worker keeps a momentum of its gradients."""

  def sent(self, updates: Any, momentum: Any) -> Any:
    """Returns what a step shall send but for the residual."""

  def keep(
    self,
    updates: Any,
    momentum: Any,
    means: Any,
    unsent: Any,
    chosen: Sequence[jax.Array | None],
    counts: Sequence[jax.Array],
  ) -> Any:
    """Returns the new momentum.

    Args:
      updates: the gradients.
      momentum: the old momentum.
      means: the means of all workers.
      unsent: what this worker did not send.
      chosen: for each leaf the positions in it, flat, where a sparse codec sent
        something, or its size; None if the codec sends all elements.
      counts: for each leaf the count of :func:`remainder`.
    """


@dataclasses.dataclass(frozen=True)
class NoFeedback:
  """Forgets what was not sent."""

  keeps: ClassVar[bool] = False
  moves: ClassVar[bool] = False

  def sent(self, updates: Any, momentum: Any) -> Any:
    return updates

  def keep(
    self,
    updates: Any,
    momentum: Any,
    means: Any,
    unsent: Any,
    chosen: Sequence[jax.Array | None],
    counts: Sequence[jax.Array],
  ) -> Any:
    return momentum


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(NoFeedback):
  r"""Keeps what was not sent, and adds it to the next gradient.

  With the gradient :math:`g`, the residual :math:`e` and what encodes and decodes,
  :math:`Q`:

  .. math:: c = g + e, \qquad e' = c - Q(c)

  Example:
    >>> tx = gradcomp.qsgd(bits=4, feedback=ErrorFeedback())
    >>> tx.init(jnp.zeros(4)).residual
    Array([0., 0., 0., 0.], dtype=float32)

  References:
    Seide et al., `1-Bit Stochastic Gradient Descent
    <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014,
    section 3.1; Grubic et al., 2018, section 2.2
  """

  keeps: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumFeedback(ErrorFeedback):
  """Sends a momentum of the worker's own gradients, and keeps what was not sent.

  ``u' = m u + g`` takes the place of the gradient, or ``m u' + g`` after Nesterov. So
  put no momentum behind it. Where a sparse codec sends something, ``u'`` becomes zero,
  so that what waited is not pushed on once it is sent.

  Attributes:
    decay: m, at least 0 and below 1.
    nesterov: whether momentum is Nesterov's.

  Raises:
    ValueError: an attribute is outside these.

  References:
    Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018,
    sections 3.1 and 3.2; Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_,
    2018, section 2.4
  """

  decay: float = 0.9
  nesterov: bool = False

  moves: ClassVar[bool] = True

  def __post_init__(self) -> None:
    object.__setattr__(self, "decay", share_below_1("decay", self.decay))
    flag("nesterov", self.nesterov)

  def sent(self, updates: Any, momentum: Any) -> Any:
    with jax.named_scope("gradcomp_correct"):
      accumulated = _add(updates, momentum, self.decay)
      return _add(updates, accumulated, self.decay) if self.nesterov else accumulated

  def keep(
    self,
    updates: Any,
    momentum: Any,
    means: Any,
    unsent: Any,
    chosen: Sequence[jax.Array | None],
    counts: Sequence[jax.Array],
  ) -> Any:
    """Returns ``u'``, which is zero where a sparse codec sent something.

    So what was sent is not sent again as momentum of what is old. The old momentum
    stays where something is not finite.
    """
    trees = map(jax.tree.leaves, (updates, momentum, means, unsent))
    leaves = zip(*trees, chosen, counts, strict=True)
    kept = [_kept(self.decay, *leaf) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(momentum), kept)


def as_feedback(given: Any, codec: LeafCodec) -> Feedback:
  """Returns feedback as it is, or what a short form stands for.

  Raises:
    ValueError: it is neither.

  Example:
    >>> as_feedback("auto", gradcomp.codecs.OneBit())  # which is biased
    ErrorFeedback()
  """
  if given == "auto":
    return NoFeedback() if codec.unbiased else ErrorFeedback()
  if given is None:
    return NoFeedback()
  if given == "error":
    return ErrorFeedback()
  if given == "momentum":
    return MomentumFeedback()
  if isinstance(given, type) or not isinstance(given, Feedback):
    raise ValueError(
      '`feedback` must be "auto", "error", "momentum", None, gradcomp.ErrorFeedback() '
      f"or gradcomp.MomentumFeedback(...), got {given!r}."
    )
  return given


def _add(updates: Any, tree: Any, factor: float) -> Any:
  """Returns ``factor * tree + updates``, float32.

  Product and sum are each rounded, so that all modes have the same bits.
  """
  return jax.tree.map(
    lambda g, x: scaled(x.reshape(g.shape), factor) + g.astype(jnp.float32),
    updates,
    tree,
  )


def correct(updates: Any, residual: Any, codec: LeafCodec) -> Any:
  """Returns the gradient plus the residual, or the gradient if there is none.

  Both are in the dtype that an exchange with the codec adds.
  """

  def add(g: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    wide = g.astype(working_dtype(codec, g.dtype))
    if residual is None:
      return wide
    return residual.reshape(g.shape).astype(wide.dtype) + wide

  with jax.named_scope("gradcomp_correct"):
    return jax.tree.map(add, updates, *([] if residual is None else [residual]))


def remainder(
  unsent: jax.Array, mean: jax.Array, old: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the new residual: what was not sent, or the old one if that is not finite.

  The old one also stays where the mean is not finite. So a gradient that is not finite,
  and its whole bucket with it, is never kept. And of that bucket no worker counts as
  sent what nobody can use.

  Args:
    unsent: what was not sent, in any shape of as many elements.
    mean: the mean of all workers, float32.
    old: the residual of the last step.
    count: the number of the step, ``int32[]``.

  Returns:
    The residual, and a count for what is to be written next, see
    :func:`gradcomp.sums.rewritten`.
  """

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    usable = mean.reshape(unsent.shape)
    finite = jnp.isfinite(unsent * one) & jnp.isfinite(usable * one)
    return jnp.where(finite, unsent.astype(old.dtype), old)

  with jax.named_scope("gradcomp_residual"):
    if unsent.shape == old.shape:
      return keep(old, jnp.float32(1.0)), count
    new, count = rewritten(keep, old.reshape(unsent.shape), count)
    return new.reshape(old.shape), count


def _kept(
  decay: float,
  gradient: jax.Array,
  old: jax.Array,
  mean: jax.Array,
  unsent: jax.Array,
  chosen: jax.Array | None,
  count: jax.Array,
) -> jax.Array:
  """Returns the momentum of a leaf that is kept.

  Args:
    decay: what the old momentum is multiplied by.
    gradient: this step's gradient.
    old: the momentum without it.
    mean: the mean of all workers.
    unsent: what this worker did not send.
    chosen: the positions in the flat leaf where a sparse codec sent something, or at
      least the leaf's size; None if the codec sends all elements.
    count: the count of :func:`remainder`.
  """

  def finite(mean: jax.Array, unsent: jax.Array) -> jax.Array:
    # A codec that sends all elements makes the mean NaN wherever one is not finite.
    both = jnp.isfinite(mean)
    return both if chosen is None else both & jnp.isfinite(unsent)

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    # The barrier has u' computed again, from the same numbers. Else it would take the
    # memory of a gradient from the encoding to the end of the exchange.
    added, again = jax.lax.optimization_barrier((gradient.reshape(old.shape), old))
    usable = finite(mean * one, unsent.reshape(mean.shape) * one).reshape(old.shape)
    return jnp.where(usable, _add(added, again, decay), old)

  with jax.named_scope("gradcomp_residual"):
    if chosen is None:
      return rewritten(keep, old, count)[0]
    kept = keep(old, jnp.float32(1.0))
    # Zeros are written one by one into the old momentum's memory, without a mask. A
    # flat view of it would be a copy.
    mean, unsent = (x.reshape(-1).at[chosen].get(mode="clip") for x in (mean, unsent))
    place = jnp.where(finite(mean, unsent), chosen, old.size)
    return kept.at[_index(place, old.shape)].set(0.0, mode="drop")


def _index(place: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
  """Returns the index of positions in a flat array; of its size, one out of bounds."""
  index = []
  for size in reversed(shape[1:]):
    index.append(place % size)
    place = place // size
  return (place, *reversed(index))
