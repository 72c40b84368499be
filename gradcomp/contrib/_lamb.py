"""``lamb``: LAMB of workers that exchange compressed momenta in place of gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp._src.bibliography import LI_2021, Citation, cites
from gradcomp._src.checks import share_below_1
from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.compression import Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.inputs import any_tree, not_differentiated
from gradcomp._src.core.of_workers import of_workers
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.message_size import MessageBytes
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.unsharded_params import check_whole_params
from gradcomp._src.transforms.moments import (
  Moments,
  MomentsState,
  Stable,
  Warmup,
  as_warmup,
  of_leaf,
  require_agreement,
)

__all__ = ["LambState", "lamb"]

_ONE_BIT, _STABLE = OneBit(), Stable()
_Bounds = tuple[float, float]


class LambState(NamedTuple):
  """The state of :func:`gradcomp.contrib.lamb`.

  Attributes:
    moments: a :class:`gradcomp.contrib.MomentsState`.
    fresh: the variance of gradients that the mean momenta imply, as ``moments.nu``.
    ratios: the decaying mean of the trust ratios of each leaf, ``float32[leaves]``,
      replicated.
    factors: by which they were last scaled, likewise.

  Example:
    >>> state = gradcomp.contrib.lamb(0.1).init({"w": jnp.ones(300)})[0]
    >>> state.ratios, state.factors
    (Array([0.], dtype=float32), Array([1.], dtype=float32))
  """

  moments: MomentsState
  fresh: Any
  ratios: jax.Array
  factors: jax.Array


def lamb(  # noqa: PLR0913 - options of users, by keyword
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: AxisName | None = None,
  codec: LeafCodec = _ONE_BIT,
  warmup: int | Warmup = _STABLE,
  b1: float = 0.9,
  b2: float = 0.999,
  b3: float = 0.9,
  eps: float = 1e-6,
  weight_decay: Any = 0.0,
  mask: Any = None,
  ratio_bounds: _Bounds = (0.01, 10.0),
  factor_bounds: _Bounds = (0.5, 4.0),
  factor_change: float = 0.1,
  exchange: ExchangeName | Auto | Exchange = "two_shot",
  feedback: FeedbackName | Feedback | None = "error",
  min_leaf_size: int | None = None,
  message_bytes: MessageBytes = "auto",
  key: ArrayLike = 0,
  dither: Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""LAMB of N workers that send compressed momenta, as 1-bit LAMB has it.

  It takes the place of an optimizer, as :func:`gradcomp.contrib.adam` does, from
  which it has its moments :math:`m` and :math:`v`, its warm-up and what it sends. With
  :math:`d = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x` a leaf moves by
  :math:`-\gamma\, c\, d`. During the warm-up its trust ratio is LAMB's,

  .. math::
     c = \mathrm{clip}\Bigl(\frac{\lVert x \rVert}{\lVert d \rVert}\Bigr), \qquad
     \bar c \leftarrow \beta_3 \bar c + (1 - \beta_3)\, c

  and 1 if a norm is zero. Then :math:`v` and :math:`\bar c` stay as they are. The mean
  momenta imply gradients, whose variance :math:`u` goes on from :math:`v`, and by which
  the ratio follows the training:

  .. math::
     g = \frac{m - \beta_1 m'}{1 - \beta_1}, \qquad
     u \leftarrow \beta_2 u + (1 - \beta_2) g^2, \qquad
     c = r \bar c, \qquad
     r = \mathrm{clip}\Bigl(\max \frac{\sqrt{\hat v} + \epsilon}
     {\sqrt{\hat u} + \epsilon}\Bigr)

  The maximum is over the elements of the leaf, and :math:`m'` is the momentum before.
  :math:`r` changes by at most a share of itself in a step. Nothing else is sent.

  Here it departs from the paper: both variances and :math:`\bar c` are corrected for
  their start at zero, and momenta are not scaled to equal size before they are encoded,
  for each bucket has scales of its own.

  Under a map that makes further mesh axes manual, norms are of whole leaves if it
  checks types, and else of shards.

  Args:
    learning_rate: :math:`\gamma`, a number or a schedule of optax.
    axis_name, codec, warmup, b1, b2: as of :func:`gradcomp.contrib.adam`.
    b3: :math:`\beta_3`, at least 0 and below 1.
    eps, weight_decay, mask: as there.
    ratio_bounds: the least and the largest trust ratio of the warm-up.
    factor_bounds: those of :math:`r`.
    factor_change: the largest change of :math:`r` in a step, a share below 1.
    exchange, feedback, min_leaf_size, message_bytes, key, dither: as there.

  Returns:
    A gradient transformation, an ``optax.chain`` that begins with a
    :class:`gradcomp.contrib.LambState`.

  Raises:
    ValueError: an option is bad; in ``update``, there are no parameters; or as of
      :func:`gradcomp.compress`.
    TypeError: ``codec`` is not one.

  Example:
    >>> tx = gradcomp.contrib.lamb(0.1, warmup=2)
    >>> params = {"w": jnp.ones(300)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> round(float(updates["w"][0]), 4)
    -0.1

  References:
    Li et al., `1-bit LAMB <https://arxiv.org/abs/2104.06069>`_, 2021, algorithm 1
  """
  told = dict(locals())
  share_below_1("b3", b3)
  share_below_1("factor_change", factor_change)
  _check_bounds("ratio_bounds", ratio_bounds)
  _check_bounds("factor_bounds", factor_bounds)
  moments = Moments(
    b1=b1,
    b2=b2,
    warmup=as_warmup(warmup),
    variance="frozen",
    compressed=compress(
      codec,
      axis_name=axis_name,
      exchange=exchange,
      feedback=feedback,
      min_leaf_size=min_leaf_size,
      message_bytes=message_bytes,
      key=key,
      dither=dither,
    ),
    axis_name=axis_name,
    floor=0.0,
  )
  decay: Any = optax.add_decayed_weights(weight_decay, mask)
  of_leaves = lambda function, *trees: jnp.stack(
    [function(*leaves) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
    or [jnp.zeros([])]
  )

  def init_fn(params: Any) -> LambState:
    first = moments.init(params)
    count = max(1, len(jax.tree.leaves(params)))
    fresh = jax.tree.map(jnp.zeros_like, first.nu)
    return LambState(first, fresh, jnp.zeros(count), jnp.ones(count))

  def warm(state: LambState, direction: Any, params: Any) -> tuple[LambState, Any]:
    ratio = jnp.clip(of_leaves(_trust, params, direction), *ratio_bounds)
    ratios = b3 * state.ratios + (1 - b3) * ratio
    return state._replace(fresh=state.moments.nu, ratios=ratios), ratio

  def frozen(state: LambState, before: Any) -> tuple[LambState, Any]:
    now = state.moments
    implied = lambda m, old: (m - b1 * old) / (1 - b1)
    grads = jax.tree.map(implied, now.mu, before)
    fresh = optax.tree.update_moment_per_elem_norm(grads, state.fresh, b2, 2)
    hat = optax.tree.bias_correction(fresh, b2, now.count)
    grown = lambda v, u: (jnp.sqrt(v) + eps) / (jnp.sqrt(u) + eps)
    growth = jax.tree.map(grown, moments.corrected(now)[1], hat)
    factors = of_leaves(lambda x: of_leaf(x, _largest, collectives.largest), growth)
    factors = jnp.clip(factors, *factor_bounds)
    change = factor_change * state.factors
    factors = jnp.clip(factors, state.factors - change, state.factors + change)
    mean = state.ratios / (1 - b3**now.updates)
    return state._replace(fresh=fresh, factors=factors), factors * mean

  @cites(Citation(LI_2021, "Means are corrected for their start at zero."))
  def update_fn(
    updates: Any, state: LambState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, LambState]:
    del extra_args
    if params is None:
      raise ValueError(
        "`params` must be given to update, because steps are as long as they are, got "
        "None; call optimizer.update(grads, state, params)."
      )
    if axis_name is not None:
      check_whole_params(params, axis_name)
    require_agreement("gradcomp.contrib.lamb", told, updates, params)
    old = state.moments
    now = moments.step(not_differentiated(updates), old)
    state = state._replace(moments=now)
    step = lambda m, v: m / (jnp.sqrt(v) + eps)
    direction = jax.tree.map(step, *moments.corrected(now))
    wide = optax.tree.cast_like(params, direction)
    direction, _ = decay.update(direction, decay.init(wide), wide)
    state, ratios = lax.cond(
      old.count == old.dense,
      lambda state: warm(state, direction, wide),
      lambda state: frozen(state, old.mu),
      state,
    )
    leaves, treedef = jax.tree.flatten(direction)
    scaled = [x * ratios[i].astype(x.dtype) for i, x in enumerate(leaves)]
    return optax.tree.cast_like(jax.tree.unflatten(treedef, scaled), params), state

  update = of_workers(update_fn, axis_name, whole=True)
  return optax.chain(
    any_tree(init_fn, update), optax.scale_by_learning_rate(learning_rate)
  )


def _check_bounds(name: str, value: Any) -> None:
  """Raises ValueError unless the value is a pair of ascending numbers above zero."""
  if not isinstance(value, tuple) or len(value) != 2 or not 0 < value[0] <= value[1]:
    raise ValueError(
      f"`{name}` must be two numbers above 0, the least and the largest, got {value!r}."
    )


def _trust(x: jax.Array, direction: jax.Array) -> jax.Array:
  """Returns the ratio of two norms, or 1 if one of them is zero."""
  length = lambda x: jnp.sqrt(of_leaf(jnp.square(jnp.abs(x))))
  ours, step = length(x), length(direction)
  return jnp.where((ours == 0) | (step == 0), 1.0, ours / step)


def _largest(x: jax.Array) -> jax.Array:
  """Returns the maximum, of an empty leaf 1, for it has no ratio to change."""
  return jnp.max(x, initial=-jnp.inf) if x.size else jnp.ones([])
