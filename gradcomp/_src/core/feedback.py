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

  def received(
    self, updates: Any, momentum: Any, estimate: Any, reduced: list[Reduced]
  ) -> list[Reduced]:
    """Returns the result of a step, given the result of its exchange."""
    return reduced


@dataclasses.dataclass(frozen=True)
class NoFeedback(Feedback):
  """No residual: the unsent part of a gradient is dropped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Feedback, checks.Checked):
  r"""Error feedback: keeps the unsent part, and adds it to the next gradient.

  With the gradient :math:`g`, the residual :math:`e`, and encoding and decoding
  :math:`Q`:

  .. math:: c = g + e, \qquad e' = d \, (c - Q(c))

  A residual takes as much memory as the parameters, in ``float32``. Fewer bits round it
  at random, with the mean that it had. ``bfloat16`` takes a half, and loses less than
  :math:`2^{-7}` of an element. ``"int8"`` takes a quarter, and 4 bytes for the scale of
  each block: the elements of a block, at most 256 of the last axis, lose less than
  :math:`1/63` of the largest. Where residuals keep their old value, because something
  is not finite, it is the old one up to such a rounding.

  It refuses a codec with a ``contraction`` of 0, whose residual would grow: see
  :class:`gradcomp.codecs.Codec`.

  Attributes:
    residual_dtype: how residuals are stored: ``float32``, ``bfloat16`` or ``"int8"``.
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

  ``u' = m u + g`` takes the place of the gradient, or ``m u' + g`` after Nesterov. So
  put no momentum behind it. Where a sparse codec sends an element, its ``u'`` becomes
  zero, so that an old gradient is not pushed on once it is sent.

  Attributes:
    decay: m, at least 0 and below 1.
    nesterov: whether momentum is Nesterov's.
    residual_dtype, residual_decay: as of :class:`ErrorFeedback`. The momentum stays
      ``float32``.

  Raises:
    ValueError: an attribute is outside these.

  References:
    Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018,
    sections 3.1 and 3.2; Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_,
    2018, section 2.4
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
  r"""EF21: sends the difference of a gradient to an estimate that owners follow, too.

  Worker :math:`i` with the gradient :math:`g_i` keeps its estimate :math:`h_i`, and all
  workers keep one of the mean, :math:`h`. Both are zero at first. With encoding and
  decoding :math:`Q`,

  .. math:: s_i = Q(g_i - h_i), \qquad h_i' = h_i + s_i, \qquad
     h' = h + \frac{1}{N} \sum_i s_i

  The update is :math:`h'`. Where gradients settle, differences vanish, and with them
  all that a codec loses, whatever its bias. Gradients of small batches do not settle.

  An exchange with a second stage sends :math:`y = Q(\frac{1}{N} \sum_i s_i + r)`, and
  its owner keeps the rest in :math:`r'`. Then :math:`h' = h + y`, and in every exchange

  .. math:: \frac{1}{N} \sum_i h_i = h + r

  up to the rounding of float32. In ``ring`` and ``hierarchical`` a worker's :math:`h_i`
  follows the partial sums that it encodes. Rounding :math:`h` to a narrow dtype of
  gradients is taken from every :math:`h_i`. Under Explicit axes :math:`h` is a sum, and
  there is no :math:`1/N`.

  The state has :math:`-h_i` as ``residual``, which a gradient is added to, and
  :math:`h` as ``estimate``, both ``float32``: they are never sent again, so that
  rounding to fewer bits would stay. The paper's first estimates are those after the
  first step here.

  Example:
    >>> tx = gradcomp.topk(density=0.5, min_leaf_size=0, feedback="ef21")
    >>> gradient = jnp.array([4.0, 1.0, 3.0, 2.0])
    >>> state = tx.init(gradient)
    >>> for _ in range(2):
    ...   update, state = tx.update(gradient, state)
    ...   print(update)
    [4. 0. 3. 0.]
    [4. 1. 3. 2.]

  References:
    Richtarik et al., `EF21: A New, Simpler, Theoretically Better, and Practically
    Faster Error Feedback <https://arxiv.org/abs/2106.05203>`_, 2021, algorithm 2
  """

  papers: ClassVar[tuple[str, ...]] = ("richtarik2021ef21",)
  keeps: ClassVar[bool] = True
  estimates: ClassVar[bool] = True

  def received(
    self, updates: Any, momentum: Any, estimate: Any, reduced: list[Reduced]
  ) -> list[Reduced]:
    """Adds the estimate to the means, and takes the gradients from the unsent parts."""
    sent = jax.tree.leaves(self.sent(updates, momentum))
    given: Any = list(zip(reduced, sent, jax.tree.leaves(estimate), strict=True))
    with jax.named_scope("gradcomp_estimate"):
      means = [x.mean + h.reshape(x.mean.shape) for x, _, h in given]
      # What is left of g - h, less g, is the new -h of the worker.
      less = lambda x, g: x - g.reshape(x.shape).astype(x.dtype)
      own = [less(x.unsent, g) for x, g, _ in given]
    every = zip(reduced, means, own, strict=True)
    return [x._replace(mean=mean, unsent=left, own=None) for x, mean, left in every]


def as_feedback(given: Any, codec: LeafCodec, name: str = "codec") -> Feedback:
  """Returns the feedback of a short form, or the object itself.

  ValueError for anything else, or if the codec's residual would grow.
  """
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
