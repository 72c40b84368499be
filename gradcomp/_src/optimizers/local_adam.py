"""Local steps of ``adam``: workers move by themselves between two exchanges."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src import checks
from gradcomp._src.core.state import OwnSteps
from gradcomp._src.local_steps import rounds
from gradcomp._src.mesh import shard_maps, study, types
from gradcomp._src.mesh.types import Place
from gradcomp._src.optimizers.moments import Moments, MomentsState, begun


class LocalMomentsState(NamedTuple):
  """The moments that workers share, and each worker's steps since an exchange."""

  moments: MomentsState  # after the last exchange, but with the count of all steps
  own: OwnSteps  # each worker's displacement from the shared parameters, and momentum
  synced: jax.Array  # the steps until the last exchange, int32[], replicated
  rate: jax.Array  # the sum of the rates since then, float32[], replicated
  decay: Any  # the state of the weight decay


@dataclasses.dataclass(frozen=True)
class EqualGaps:
  """Gaps of one length."""

  most: int

  def gap(self, since: jax.Array) -> jax.Array:
    return jnp.full_like(since, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoublingGaps(checks.Checked):
  r"""Doubles the gap between two exchanges after every k steps, as 0/1 Adam does.

  A gap that begins :math:`t` steps after the warm-up has
  :math:`\min(H, 2^{\lfloor t / k \rfloor})` steps. Let :math:`k` be the steps in which
  the learning rate halves: then workers move about as far apart in a long gap as in a
  short one.

  Attributes:
    every: :math:`k`, 1 or more.
    most: :math:`H`, 1 or more.

  Raises:
    ValueError: an attribute breaks its rule.

  Example:
    >>> gaps = DoublingGaps(every=100, most=16)
    >>> [int(gaps.gap(jnp.int32(t))) for t in (0, 99, 100, 250, 10**6)]
    [1, 1, 2, 4, 16]

  References:
    Lu et al., `0/1 Adam <https://arxiv.org/abs/2202.06009>`_, 2022, on choosing the
    steps that synchronize
  """

  every: int = checks.field(2**15, checks.STEPS)
  most: int = checks.field(16, checks.STEPS)

  def gap(self, since: jax.Array) -> jax.Array:
    """Returns the gap that begins ``since`` steps after the warm-up."""
    return jnp.minimum(self.most, 2 ** jnp.minimum(since // self.every, 30))


Gaps = EqualGaps | DoublingGaps  # rules for the steps from one exchange to the next


_Own = tuple[Any, ...]  # a worker's displacement and momentum, like the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalAdam:
  """Adam with workers that move by themselves between two exchanges."""

  moments: Moments
  gaps: Gaps
  names: tuple[str, ...]  # of the axes
  learning_rate: optax.ScalarOrSchedule
  decay: optax.GradientTransformation

  def init(self, params: Any) -> LocalMomentsState:
    """Creates the state, of zeros."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros_like(rounds.wide(x)), tree)
    return LocalMomentsState(
      moments=self.moments.init(params),
      own=rounds.first_own(params, self.names, zeros),
      synced=jnp.zeros([], jnp.int32),
      rate=jnp.zeros([], jnp.float32),
      decay=self.decay.init(params),
    )

  def update(
    self, across: Place, grads: Any, state: LocalMomentsState, params: Any, like: Any
  ) -> tuple[Any, LocalMomentsState]:
    """Moves this worker; in the last step of a gap, the parameters of all."""
    schedule: Any = self.learning_rate
    rate = schedule(state.moments.count) if callable(schedule) else schedule
    rate = jnp.asarray(rate, jnp.float32)

    def step(grads: Any, state: Any, like: Any, rate: Any) -> Any:
      return self._step(across.own(grads), state, like, rate)

    moved = shard_maps.per_device(step, grads, across, keeps=False)
    direction, new = moved(grads, state, like, rate)
    direction, decay = self.decay.update(direction, state.decay, params)
    met, total = new.synced == new.moments.count, state.rate + rate
    move = lambda u: jnp.where(met, (-total).astype(u.dtype) * u, 0)
    return jax.tree.map(move, direction), new._replace(decay=decay)

  def _step(
    self, grads: Any, state: LocalMomentsState, like: Any, rate: jax.Array
  ) -> tuple[Any, LocalMomentsState]:
    """Returns the direction of the last exchange, and the state after this step."""
    rounds.own_params(like, state.own.moved)  # ValueError for other workers' state
    reshaped = lambda x, m: x.reshape(m.shape)
    trees = state.own.moved, state.own.inner_state
    own = tuple(jax.tree.map(reshaped, x, state.moments.mu) for x in trees)
    moments = state.moments._replace(count=optax.safe_increment(state.moments.count))
    # The correction is one in all steps of a gap, so that these add up.
    first, total = state.synced + 1, state.rate + rate
    scale = lambda s: s * begun(self.moments.b1, first, s.dtype)
    scales = jax.tree.map(scale, self.moments.divisors(moments))

    def alone(grads: Any, own: _Own) -> tuple[MomentsState, _Own]:
      momenta = self.moments.moved(grads, own[1], self.moments.b1)

      move = lambda d, m, s, v: d - jnp.where(v == 0, 0, rate * (m / s))
      moved = jax.tree.map(move, own[0], momenta, scales, moments.nu)
      return moments, (moved, momenta)

    def sent(grads: Any, own: _Own) -> tuple[MomentsState, _Own]:
      study.note(("every", self.gaps.most))
      share = jnp.where(total == 0, 1, rate / total)

      def mean(m: jax.Array, d: jax.Array, s: jax.Array, v: jax.Array) -> jax.Array:
        """Returns the mean of a gap's momenta by their rates; the last without v."""
        before = jnp.where(state.rate == 0, 0, -d * s / state.rate)
        return jnp.where(v == 0, m, before + share * (m - before))

      momenta = self.moments.moved(grads, own[1], self.moments.b1)
      means = jax.tree.map(mean, momenta, own[0], scales, moments.nu)
      gap = moments.count - state.synced
      return self._together(self.moments.exchanged(means, moments, gap), like)

    def dense(grads: Any, own: _Own) -> tuple[MomentsState, _Own]:
      return self._together(self.moments.averaged(grads, moments, self.names), like)

    is_dense = state.moments.count == moments.dense
    gap = self.gaps.gap(state.synced - moments.updates + moments.later - 1)
    is_last = moments.count - state.synced >= gap
    # A mean of gradients needs all of them at the same parameters.
    is_sent = is_last | (moments.count == moments.dense)
    compressed = functools.partial(lax.cond, is_sent, sent, alone)
    new, own = lax.cond(~is_dense, compressed, dense, grads, own)
    met = is_dense | is_sent
    return self.moments.direction(new, first, like), LocalMomentsState(
      moments=new,
      own=OwnSteps({self.names: rounds.stored(own)}),
      synced=jnp.where(met, new.count, state.synced),
      rate=jnp.where(met, 0, total),
      decay=state.decay,
    )

  def _together(self, moments: MomentsState, like: Any) -> tuple[MomentsState, _Own]:
    """Returns shared moments, and all workers at the shared parameters with them."""
    own = lambda x, like: types.mark_varying(x, self.names, like)
    moved = jax.tree.map(jnp.zeros_like, moments.mu)
    return moments, tuple(jax.tree.map(own, x, like) for x in (moved, moments.mu))
