"""Moments of Adam that workers share: of mean gradients, or of compressed momenta."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.core.state import CompressState
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange import collectives
from gradcomp._src.mesh import agreement, shard_maps, types
from gradcomp._src.mesh.axes import AxisName

Variance = Literal["frozen", "doubling"]

_STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000)  # at which rates are compared
_GAPS = 16  # updates of the variance at each gap, as in the experiments of 0/1 Adam
_NEVER = -1  # no step has this number


class MomentsState(NamedTuple):
  """The moments of all workers, replicated, and the residuals of their momenta."""

  count: jax.Array  # type: ignore[assignment]  # steps so far, int32[]
  dense: jax.Array  # the next step that averages gradients, int32[]; -1 for none
  updates: jax.Array  # of the variance so far, int32[]
  later: jax.Array  # updates after the warm-up, int32[]
  norm: jax.Array  # the 1-norm of the variance that a rule compares with, float32[]
  mu: Any  # the mean momentum, like the parameters, float32 or wider
  nu: Any  # the variance, likewise, of real numbers
  exchange: CompressState  # the residuals of the momenta, and their key


@dataclasses.dataclass(frozen=True)
class Steps:
  """A warm-up of a number of steps."""

  steps: int

  def ended(
    self, count: jax.Array, nu: Any, norm: jax.Array, span: int
  ) -> tuple[jax.Array, jax.Array]:
    """Returns whether it ended after ``count`` steps, and the norm to keep."""
    return count >= self.steps, norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stable(checks.Checked):
  r"""Ends the warm-up once the variance hardly changes, as 1-bit Adam does.

  After every :math:`\Delta = 1 / (1 - \beta_2)` steps it compares the 1-norm of the
  variance with the one before. The warm-up ends at

  .. math::
     \min(\lVert v_t \rVert_1, \lVert v_{t - \Delta} \rVert_1) \ge \rho \max(\lVert v_t
     \rVert_1, \lVert v_{t - \Delta} \rVert_1)

  The paper compares in every step, and so keeps the norms of :math:`\Delta` steps. If a
  map makes further mesh axes manual that shard parameters, it must check types, or each
  shard decides by itself.

  Attributes:
    ratio: :math:`\rho`, above 0 and at most 1.
    least: the first step at which it may end, such as the last of a rising rate.

  Raises:
    ValueError: an attribute breaks its rule.

  Example:
    >>> Stable(ratio=0.9).least
    1

  References:
    Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, section 7.1
  """

  ratio: float = checks.field(0.96, checks.ABOVE_0)
  least: int = checks.field(1, checks.STEPS)

  def ended(
    self, count: jax.Array, nu: Any, norm: jax.Array, span: int
  ) -> tuple[jax.Array, jax.Array]:
    due = count % span == 0
    now = sum(map(of_leaf, jax.tree.leaves(nu)), jnp.float32(0))
    now = jnp.where(due, now, norm)
    alike = jnp.minimum(now, norm) >= self.ratio * jnp.maximum(now, norm)
    return due & alike & (norm > 0) & (count >= self.least), now


Warmup = Steps | Stable  # rules for its end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments(checks.Checked):
  """The options of the moments: their decays, floor, and the exchange of momenta."""

  b1: float = checks.field(..., checks.BELOW_1)
  b2: float = checks.field(..., checks.BELOW_1)
  eps: float
  warmup: Warmup
  variance: Variance = checks.field(..., checks.choice(Variance))
  compressed: Any  # the optax transformation of the momenta
  axis_name: AxisName | None
  floor: float = checks.field(..., checks.BELOW_1)

  def init(self, params: Any) -> MomentsState:
    """Creates the state, of zeros."""
    wide = lambda x: jnp.promote_types(x.dtype, jnp.float32)
    mu = jax.tree.map(lambda x: jnp.zeros_like(x, wide(x)), params)
    nu = jax.tree.map(lambda m: jnp.zeros_like(m, jnp.finfo(m.dtype).dtype), mu)
    zero = lambda: jnp.zeros([], jnp.int32)
    counts = zero(), zero(), zero(), zero()
    first = self.compressed.init(mu)
    return MomentsState(*counts, jnp.zeros([], jnp.float32), mu, nu, first)

  def update(
    self, across: types.Place, grads: Any, state: MomentsState, params: Any, like: Any
  ) -> tuple[Any, MomentsState]:
    """Returns a step at a rate of 1 in the dtypes of ``like``, and the next state."""
    count = optax.safe_increment(state.count)

    def dense(grads: Any, state: MomentsState) -> MomentsState:
      return self.averaged(grads, state._replace(count=count), across.axes)

    def own(grads: Any, mu: Any) -> tuple[Any, Any]:
      # Addends of a sum have a share of the mean momentum each.
      return self.moved(grads, mu, self.b1 / across.addends), mu

    def compressed(grads: Any, state: MomentsState) -> MomentsState:
      apart = shard_maps.per_device(own, grads, across, keeps=True)
      momenta, _ = apart(grads, state.mu)
      return self.exchanged(momenta, state._replace(count=count))

    is_sent = state.count != state.dense
    state = lax.cond(is_sent, compressed, dense, grads, state)
    return self.direction(state, state.count, like), state

  def averaged(
    self, grads: Any, state: MomentsState, axis_name: AxisName | None
  ) -> MomentsState:
    """Moves both moments by the mean gradient, of a state that counts this step."""
    tx: Any = compress(Dense(), axis_name=axis_name)
    plain = CompressState(state.count, state.exchange.key, None, None)
    mean = optax.tree.cast_like(tx.update(grads, plain)[0], state.mu)
    mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
    return self._counted(state._replace(mu=mu, nu=nu))

  def exchanged(
    self, own: Any, state: MomentsState, gap: jax.Array | int = 1
  ) -> MomentsState:
    """Sets the mean momentum to the mean of the workers' own, of ``gap`` steps."""
    mu, exchange = self.compressed.update(own, state.exchange)

    def first(m: jax.Array, v: jax.Array) -> jax.Array:
      # A variance of zero would stay so: the first momentum shows its gradient.
      gradient = jnp.abs(m) / begun(self.b1, gap, v.dtype)
      square = begun(self.b2, state.updates, v.dtype) * jnp.square(gradient)
      return jnp.where(v == 0, square, v)

    nu = jax.tree.map(first, mu, state.nu)
    return state._replace(mu=mu, nu=nu, exchange=exchange)

  def moved(self, grads: Any, momenta: Any, share: Any) -> Any:
    """Returns a worker's gradients with a share of momenta."""
    move = lambda g, m: share * m + (1 - self.b1) * g.astype(m.dtype)
    return jax.tree.map(move, grads, momenta)

  def _counted(self, state: MomentsState) -> MomentsState:
    """Counts an update of the variance, and decides which step has the next."""
    span = round(1 / (1 - self.b2))
    ended, norm = self.warmup.ended(state.count, state.nu, state.norm, span)
    later = state.later + (ended | (state.later > 0))
    gap = 2 ** jnp.minimum((later - 1) // _GAPS, 30)
    after = _NEVER if self.variance == "frozen" else state.count + gap - 1
    return state._replace(
      dense=jnp.where(later > 0, after, state.count),
      updates=state.updates + 1,
      later=later,
      norm=norm,
    )

  def direction(self, state: MomentsState, count: jax.Array, like: Any) -> Any:
    """Returns the step at a rate of 1, in the dtypes of a tree like the moments."""
    mu = optax.tree.bias_correction(state.mu, self.b1, count)
    step = lambda m, s, x: (m / s).astype(x.dtype)
    return jax.tree.map(step, mu, self.divisors(state), like)

  def divisors(self, state: MomentsState) -> Any:
    """Returns the roots of the corrected variances, plus ``eps``."""
    return jax.tree.map(lambda v: jnp.sqrt(v) + self.eps, self.variances(state))

  def variances(self, state: MomentsState) -> Any:
    """Returns the corrected variance, with its floor once momenta were sent."""
    sent = state.count > state.updates
    nu = optax.tree.bias_correction(state.nu, self.b2, state.updates)

    def lifted(v: jax.Array) -> jax.Array:
      root = jnp.sqrt(v)
      mean = of_leaf(root, jnp.mean, collectives.pmean)  # shards have one size
      least = jnp.square(self.floor * mean).astype(v.dtype)
      return jnp.where(sent, jnp.maximum(v, least), v)

    return jax.tree.map(lifted, nu) if self.floor else nu


def require_agreement(
  what: str, told: Mapping[str, Any], grads: Any, params: Any
) -> None:
  """Compares arguments of an optimizer: schedules by some rates, masks by leaves."""
  if agreement.is_alone():
    return
  decay, mask = told["weight_decay"], told["mask"]
  rates = {x: _at_steps(y) for x, y in told.items() if callable(y) and x != "mask"}
  if callable(mask) and params is not None and decoupled(decay, mask):
    mask = mask(params)
  leaves = jax.tree_util.tree_leaves_with_path(mask)
  masked = {f"mask{jax.tree_util.keystr(path)}": x for path, x in leaves}
  options = {**told, "mask": None, **rates, **masked}
  agreement.require_agreement(what, options, grads, told["axis_name"])


def _at_steps(schedule: Any) -> Any:
  """Returns the numbers of a schedule by steps; a traced array if they are traced."""
  number = lambda step: jnp.asarray(schedule(jnp.int32(step)))
  # In a thread of its own, for JAX computes no number inside of some maps.
  with ThreadPoolExecutor(1) as outside:
    rates = outside.submit(lambda: jnp.stack([*map(number, _STEPS)])).result()
  if isinstance(rates, jax.core.Tracer):
    return rates
  short = [float(str(rate)) for rate in np.asarray(rates)]
  return dict(zip(_STEPS, short, strict=True))


def with_decay(
  first: optax.GradientTransformationExtraArgs,
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: Any,
  mask: Any,
) -> optax.GradientTransformationExtraArgs:
  """Chains a direction, decoupled weight decay if there is any, and the rate."""
  parts = (first, decoupled(weight_decay, mask))
  return optax.chain(*filter(None, parts), optax.scale_by_learning_rate(learning_rate))


def decoupled(weight_decay: Any, mask: Any) -> optax.GradientTransformation | None:
  """Returns decoupled weight decay; None for a number that is zero."""
  if isinstance(weight_decay, int | float) and not weight_decay:
    return None
  return optax.add_decayed_weights(weight_decay, mask)


def begun(decay: float, count: jax.Array | int, dtype: Any) -> jax.Array:
  """Returns the share of the mean in a moment that began at zero: 1 - decay**count."""
  return jnp.asarray(1 - decay**count, dtype)


def of_leaf(
  x: jax.Array, reduce: Any = jnp.sum, between: Any = collectives.psum
) -> jax.Array:
  """Returns a leaf's sum, or another reduction, also over the axes of its type."""
  part, axes = reduce(x.astype(jnp.float32)), types.varying_axes(x)
  return between(part, tuple(sorted(axes))) if axes else part
