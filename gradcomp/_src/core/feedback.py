"""Error feedback and momentum: the unsent part of a gradient joins the next one.

The residual is stored in 32, 16 or 8 bits.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import LeafCodec, require_contraction
from gradcomp._src.exchange.step import Reduced
from gradcomp._src.kernels.common.dithers import threefry2x32
from gradcomp._src.kernels.common.fixed_point import FRACTION, held, scaled
from gradcomp._src.kernels.common.scales import norms
from gradcomp._src.kernels.materialize import materialized

FeedbackName = Literal["auto", "error", "momentum", "ef21"]
Means = list[Reduced]  # of the leaves, with what is unsent
Storage = Literal["float32", "bfloat16", "int8"]

_LANES = 8  # elements that share a block of the cipher
_ROUNDS = 13  # of the cipher, as for dithers
_BLOCK = 256  # elements with one scale, at most
_FEWEST = 16  # and at least, unless the last axis is shorter
_TOP = 127


class Int8Residual(NamedTuple):
  """The residual of a leaf, as integers of 8 bits and scales that are powers of two."""

  # An element is its code times the scale of its block, a part of the last axis.
  codes: jax.Array  # int8, in the shape of the residual
  scales: jax.Array  # float32[..., blocks]


Stored = jax.Array | Int8Residual


def storage(name: str, value: Any) -> Storage:
  """Returns the name of a storage format of residuals; ValueError otherwise."""
  choices = get_args(Storage)
  try:
    found: Any = None if isinstance(value, np.generic) else jnp.dtype(value).name
  except TypeError:
    found = None
  if value is None or found not in choices:
    raise ValueError(
      f"`{name}` must be float32, bfloat16 or int8, as a dtype or its name, got "
      f"{value!r}."
    )
  return found


@dataclasses.dataclass(frozen=True)
class Feedback:
  """The rule for the unsent part of a gradient, for float32; here it is dropped."""

  keeps: ClassVar[bool] = False  # True if a worker keeps a residual
  moves: ClassVar[bool] = False  # True if a worker keeps a momentum of its gradients
  estimates: ClassVar[bool] = False  # True if workers share an estimate of the mean

  @property
  def stored(self) -> Storage:
    """The storage format of residuals."""
    return getattr(self, "residual_dtype", "float32")

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

  residual_dtype: DTypeLike | Storage = checks.field("float32", checks.Rule(storage))
  residual_decay: float = checks.field(1.0, checks.ABOVE_0)

  papers: ClassVar[tuple[str, ...]] = ("seide2014onebit",)
  keeps: ClassVar[bool] = True

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
    return [x._replace(mean=mean, unsent=left) for x, mean, left in every]


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


def is_stored(node: Any) -> bool:
  """Returns True for :class:`Int8Residual`; it is meant for ``is_leaf``."""
  return isinstance(node, Int8Residual)


def kind(residual: Any) -> Storage:
  """Returns the storage format of a leaf's residual."""
  return "int8" if is_stored(residual) else residual.dtype.name


def shaped(residual: Any) -> Any:
  """Returns the arrays in a tree of residuals that have the leaves' shapes."""
  codes = lambda x: x.codes if is_stored(x) else x
  return jax.tree.map(codes, residual, is_leaf=is_stored)


def first_residual(shape: tuple[int, ...], stored: Storage) -> Stored:
  """Returns the first residual of a leaf of this shape, of at least one axis."""
  if stored != "int8":
    return jnp.zeros(shape, stored)
  scales = jnp.zeros(_cut(shape)[:-1], jnp.float32)
  return Int8Residual(jnp.zeros(shape, jnp.int8), scales)


def read_residual(residual: Stored) -> jax.Array:
  """Returns the residual of a leaf as floats; a product with a scale is exact."""
  if not isinstance(residual, Int8Residual):
    return residual
  blocks = _cut(residual.codes.shape, residual.scales.shape[-1])
  codes = residual.codes.reshape(blocks)
  values = codes.astype(jnp.float32) * residual.scales[..., None]
  return values.reshape(residual.codes.shape)


def lanes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws random ``uint16`` of this shape, uniform and pairwise independent."""
  size = math.prod(shape)
  blocks = lax.iota(jnp.uint32, -(-size // _LANES))

  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return threefry2x32(key, (jnp.zeros_like(blocks), blocks), _ROUNDS)

  # Materialized: XLA would fuse the cipher into each of the four words that read it.
  a, b = materialized(draw, key)

  def spread(a: jax.Array) -> jax.Array:
    words = jnp.concatenate([a, b, a ^ b, a ^ ((b << 16) | (b >> 16))])
    return lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size]

  return materialized(spread, a).reshape(shape)


def to_bfloat16(x: jax.Array, lane: jax.Array) -> jax.Array:
  """Rounds ``float32`` to a finite neighbor in ``bfloat16``, unbiased."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  most = jnp.uint32(0x7F7FFFFF)
  magnitude = jnp.minimum((bits & jnp.uint32(0x7FFFFFFF)) + lane, most)
  kept = (magnitude | (bits & jnp.uint32(1 << 31))) >> FRACTION
  return lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)


def to_int8(x: jax.Array, lane: jax.Array, blocks: int | None = None) -> Int8Residual:
  """Rounds finite ``float32`` to multiples of the scale of its block, unbiased."""
  # The scale is the least power of two, 2**-126 or more, whose 127-fold reaches the
  # largest magnitude: multiples of an old scale stay. `lane` is uniform uint16.
  shape, cut = x.shape, _cut(x.shape, blocks)
  x, lane = x.reshape(cut), lane.reshape(cut)
  bits = lax.bitcast_convert_type(held(norms(x, "max"))[..., None], jnp.uint32)
  # The exponent of the largest, or the next if more than 127/64 of its power of two,
  # and 6 less, which is 1/64. The highest one has no next.
  exponent = jnp.clip((bits + jnp.uint32(0x1FFFF)) >> 23, 7, 254) - 6
  scale, inverse = (
    lax.bitcast_convert_type(power << 23, jnp.float32)
    for power in (exponent, 254 - exponent)
  )
  # Products with powers of two are exact, and the rest is integers: all modes agree.
  fixed = jnp.round(x * inverse * (1 << FRACTION)).astype(jnp.int32)
  top = _TOP << FRACTION
  codes = (jnp.clip(fixed, -top, top) + lane.astype(jnp.int32)) >> FRACTION
  return Int8Residual(codes.astype(jnp.int8).reshape(shape), scale[..., 0])


def _cut(shape: tuple[int, ...], blocks: int | None = None) -> tuple[int, ...]:
  """Returns the shape with its last axis split into blocks of one scale each."""
  # As many as there are stored scales: where a leaf is sharded over Auto axes, each
  # device's shard of the residual has its own blocks, and it is read as a whole.
  *lead, last = shape
  if blocks is None:
    sizes = range(min(_BLOCK, last), _FEWEST - 1, -1)
    blocks = last // next((size for size in sizes if last % size == 0), max(last, 1))
  return (*lead, blocks, last // blocks if blocks else 1)
