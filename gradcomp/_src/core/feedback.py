"""Error feedback and momentum: the unsent part of a gradient joins the next one."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import LeafCodec, require_contraction
from gradcomp._src.core import residual_storage
from gradcomp._src.core.residual_storage import Storage, Stored
from gradcomp._src.exchange.step import Reduced
from gradcomp._src.kernels.common.fixed_point import scaled

FeedbackName = Literal["auto", "error", "momentum", "ef21"]
Means = list[Reduced]  # of the leaves, with what is unsent


@dataclasses.dataclass(frozen=True)
class Feedback:
  """The rule for the unsent part of a gradient, for float32; here it is dropped."""

  keeps: ClassVar[bool] = False  # True if a worker keeps a residual
  moves: ClassVar[bool] = False  # True if a worker keeps a momentum of its gradients
  estimates: ClassVar[bool] = False  # True if workers share an estimate of the mean

  def first(self, shape: tuple[int, ...]) -> Stored:
    """Returns the first residual of a leaf of this shape, of at least one axis."""
    return residual_storage.zeros(shape, "float32")

  def waits(self, unsent: jax.Array) -> jax.Array:
    """Returns the residual to store for a leaf, given its unsent part."""
    return unsent

  def sent(self, updates: Any, momentum: Any) -> Any:
    """Returns the tree that a step sends, without the residual."""
    return updates

  def moved(self, gradient: jax.Array, momentum: jax.Array) -> jax.Array:
    """Returns a leaf's momentum after a step, before sent elements are cleared."""
    return momentum

  def received(self, updates: Any, estimate: Any, reduced: Means) -> Means:
    """Returns the result of a step, given the result of its exchange."""
    return reduced


@dataclasses.dataclass(frozen=True)
class NoFeedback(Feedback):
  """No residual: the unsent part of a gradient is dropped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Feedback, checks.Checked):
  r"""Error feedback: keeps the unsent part, and adds it to the next gradient.

  .. math:: c = g + e, \qquad e' = d \, (c - Q(c))

  with the gradient :math:`g`, the residual :math:`e`, and encoding and decoding
  :math:`Q`. It refuses a codec with a ``contraction`` of 0, whose residual would grow:
  see :class:`gradcomp.codecs.Codec`.

  Attributes:
    residual_dtype: how residuals are stored: ``float32``, as much memory as the
      parameters; ``bfloat16``, half; or ``"int8"``, a quarter plus 4 bytes a block of
      at most 256 elements. Fewer bits are rounded at random, unbiased: ``bfloat16``
      loses less than :math:`2^{-7}` of an element, ``"int8"`` less than :math:`1/63` of
      the block's largest.
    residual_decay: d, above 0 and at most 1. Below 1, old residuals fade.

  Raises:
    ValueError: an attribute is outside these.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, feedback=ErrorFeedback(residual_dtype=jnp.bfloat16))
    >>> tx.init(jnp.zeros(4)).residual
    Array([0, 0, 0, 0], dtype=bfloat16)

  References:
    Seide et al., `1-Bit Stochastic Gradient Descent
    <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014,
    section 3.1; Grubic et al., 2018, section 2.2
  """

  residual_dtype: DTypeLike | Storage = checks.field(
    "float32", checks.Rule(residual_storage.storage)
  )
  residual_decay: float = checks.field(1.0, checks.ABOVE_0)

  papers: ClassVar[tuple[str, ...]] = ("seide2014onebit",)
  keeps: ClassVar[bool] = True

  def first(self, shape: tuple[int, ...]) -> Stored:
    return residual_storage.zeros(shape, cast(Storage, self.residual_dtype))

  def waits(self, unsent: jax.Array) -> jax.Array:
    return scaled(unsent, self.residual_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumFeedback(ErrorFeedback):
  """Error feedback for the momentum of the worker's own gradients.

  ``u' = m u + g`` takes the place of the gradient; with Nesterov, ``m u' + g`` does. So
  use an optimizer without momentum after it. Where a sparse codec sends an element, its
  ``u'`` becomes zero.

  Attributes:
    decay: m, at least 0 and below 1.
    nesterov: whether momentum is Nesterov's.
    residual_dtype, residual_decay: as in :class:`ErrorFeedback`. The momentum stays
      ``float32``.

  References:
    Lin et al., `2018 <https://arxiv.org/abs/1712.01887>`_, sections 3.1 and 3.2; Fang
    et al., `2018 <https://arxiv.org/abs/1808.04357>`_, section 2.4
  """

  decay: float = checks.field(0.9, checks.BELOW_1)
  nesterov: bool = checks.field(False, checks.FLAG)

  papers: ClassVar[tuple[str, ...]] = ("lin2018dgc", "fang2018redsync")
  moves: ClassVar[bool] = True

  def sent(self, updates: Any, momentum: Any) -> Any:
    with jax.named_scope("gradcomp_correct"):
      accumulated = jax.tree.map(self.moved, updates, momentum)
      if self.nesterov:
        accumulated = jax.tree.map(self.moved, updates, accumulated)
      return accumulated

  def moved(self, gradient: jax.Array, momentum: jax.Array) -> jax.Array:
    return _add(gradient, momentum, self.decay)


@dataclasses.dataclass(frozen=True)
class EF21(Feedback):
  """EF21: sends the difference of a gradient to an estimate that all workers follow.

  docs/methods/feedback.md has its formulas: the state has -h_i as ``residual`` and h as
  ``estimate``, zero at first, where the paper starts with the estimates of the first
  step. In every exchange the mean of all h_i is h + r, up to the rounding of float32:
  in ``ring`` and ``hierarchical`` h_i follows the partial sums that worker i encodes,
  and the rounding of h to a narrow dtype is taken from every h_i. Under Explicit axes h
  is a sum, without 1/N.
  """

  papers: ClassVar[tuple[str, ...]] = ("richtarik2021ef21",)
  keeps: ClassVar[bool] = True
  estimates: ClassVar[bool] = True

  def received(self, updates: Any, estimate: Any, reduced: Means) -> Means:
    """Adds the estimate to the means, and takes the gradients from the unsent parts."""
    trees = jax.tree.leaves(updates), jax.tree.leaves(estimate)
    given: Any = list(zip(reduced, *trees, strict=True))
    with jax.named_scope("gradcomp_estimate"):
      means = [x.mean + h.reshape(x.mean.shape) for x, _, h in given]
      # What is left of g - h, less g, is the new -h of the worker.
      less = lambda x, g: x - g.reshape(x.shape).astype(x.dtype)
      own = [less(x.unsent, g) for x, g, _ in given]
    every = zip(reduced, means, own, strict=True)
    return [x._replace(mean=mean, unsent=left, own=None) for x, mean, left in every]


def as_feedback(given: Any, codec: LeafCodec, name: str = "codec") -> Feedback:
  """Returns the feedback of a short form or an object; ValueError for another."""
  short: dict[Any, type[Feedback]] = {
    None: NoFeedback,
    "auto": NoFeedback if codec.unbiased else ErrorFeedback,
    "error": ErrorFeedback,
    "momentum": MomentumFeedback,
    "ef21": EF21,
  }
  known = given is None or isinstance(given, str)
  rule = short[given]() if known and given in short else given
  if not isinstance(rule, Feedback):
    raise ValueError(
      '`feedback` must be "auto", "error", "momentum", "ef21", None, '
      "gradcomp.ErrorFeedback() or gradcomp.MomentumFeedback(...), "
      f"got {given!r}."
    )
  if rule.keeps:
    require_contraction(name, codec, "feedback=None")
  return rule


@functools.partial(jax.jit, static_argnums=2)  # leaves of a shape: traced once
def _add(g: jax.Array, x: jax.Array, factor: float) -> jax.Array:
  """Returns ``factor * x + g``, float32."""
  # Product and sum are each rounded, so that all modes have the same bits.
  return scaled(x.reshape(g.shape), factor) + g.astype(jnp.float32)
