"""``scape``: Adam of few elements, which all workers know before they send them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradcomp._src.bibliography import ZHENG_2026, Citation, cites
from gradcomp._src.checks import optional_size, share_below_1, step_count
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.sparse import checked_density, sent_of
from gradcomp._src.core import agreement
from gradcomp._src.core.inputs import any_tree, not_differentiated
from gradcomp._src.core.of_workers import of_workers
from gradcomp._src.core.state import CompressState
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.layout import default_min_leaf_size
from gradcomp._src.mesh.axes import AxisName, require_size
from gradcomp._src.mesh.reduction import Reduction, reduction
from gradcomp._src.mesh.shard_maps import per_device
from gradcomp._src.mesh.unsharded_params import check_whole_params
from gradcomp._src.transforms.moments import with_decay

__all__ = ["ScapeState", "scape"]


class ScapeState(NamedTuple):
  """The state of :func:`gradcomp.contrib.scape`.

  Attributes:
    count: steps so far, ``int32[]``, replicated.
    mu: the first moment, like the parameters, ``float32``, replicated.
    nu: the second moment, likewise.
    chosen: the elements that the next step sends of each sparse leaf, ``int32[k]``,
      replicated.
    exchange: the residuals of each worker.

  Example:
    >>> tx = gradcomp.contrib.scape(0.1, density=0.01)
    >>> state = tx.init({"w": jnp.ones((300, 10))})[0]
    >>> [x.shape for x in state.chosen], state.mu["w"].shape
    ([(30,)], (300, 10))
  """

  count: jax.Array  # type: ignore[assignment]
  mu: Any
  nu: Any
  chosen: tuple[jax.Array, ...]
  exchange: CompressState


def scape(  # noqa: PLR0913 - options of users, by keyword
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: AxisName | None = None,
  density: float = 0.01,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: Any = 0.0,
  mask: Any = None,
  warmup: int = 0,
  min_leaf_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""AdamW of N workers that send the same few elements, chosen a step before.

  It takes the place of an optimizer, with nothing in front, and gets each worker's own
  gradient :math:`g_i`, as :func:`gradcomp.compress` does. All workers know the elements
  :math:`J` of a step. So they add plain numbers, without places, and what a worker
  sends does not grow with N. With its residual :math:`e_i`, a step is

  .. math::
     c_i = g_i + e_i, \qquad g = \frac{1}{N} \sum_i c_i \text{ on } J, \; 0 \text{
     elsewhere}, \qquad e_i' = 0 \text{ on } J, \; c_i \text{ elsewhere}

  and AdamW's step by :math:`g`. Then each worker chooses from an Nth of each leaf,
  which it owns, elements for the next :math:`J`: those with the largest

  .. math:: \frac{|e_i'|}{\sqrt{\hat v} + \epsilon}

  which is by how much Adam would move an element if all workers had what the owner has
  not sent. So a choice costs an Nth, and elements that were never sent come up.

  In each step ``density * n`` of n elements travel as 32 bits each, and the places of
  the next ones in 32 bits each, in one sum. Small leaves travel whole.

  Where an element waits for T steps, :math:`v` is that of a sum of T gradients. So what
  has a steady gradient moves up to :math:`\sqrt{T}` times less than by AdamW, and two
  or three times AdamW's rate may be better.

  The paper's abstract is all that was read of it. By that, places come from the first
  moment, and a variant of Adam takes its second moment from the same buffer. Here they
  come from residuals, and the second moment is Adam's of what arrives: on a small
  transformer the first moment chose worse, and AdamS's second moment was far worse.

  A NaN or an infinity makes what its leaf sends NaN on every worker, and so the
  moments. Put :func:`gradcomp.skip_nonfinite` around all, which keeps the state. The
  moments are float32.

  Args:
    learning_rate: :math:`\gamma`, a number or a schedule of optax.
    axis_name: as of :func:`gradcomp.compress`.
    density: the share of a leaf that a step sends, above 0 and at most 1. With 1 it is
      ``optax.adamw`` of the mean gradient.
    b1, b2: the decay of both moments, at least 0 and below 1.
    eps: :math:`\epsilon`.
    weight_decay: decoupled. Above 0, ``update`` needs the parameters.
    mask: the leaves that decay, a tree of bools or a function of the parameters.
    warmup: steps that send all elements before the first sparse one, 0 or more. Early
      gradients change too fast to wait: a tenth of the training is well spent.
    min_leaf_size: the elements from which on a leaf is sparse; by default as of
      :func:`gradcomp.compress`.

  Returns:
    A gradient transformation, an ``optax.chain`` that begins with a
    :class:`gradcomp.contrib.ScapeState`.

  Raises:
    ValueError: an option is bad, or as of :func:`gradcomp.compress`.
    TypeError: in ``update``, a gradient is not real floating point.

  Example:
    >>> tx = gradcomp.contrib.scape(0.1, density=0.25, min_leaf_size=0)
    >>> params = jnp.zeros(8)
    >>> state = tx.init(params)
    >>> update, state = tx.update(jnp.arange(8.0), state, params)
    >>> int((update != 0).sum()), state[0].chosen[0].tolist()
    (1, [7, 6])

  References:
    Zheng et al., `SCAPE <https://arxiv.org/abs/2607.01678>`_, 2026
  """
  share = checked_density(density)
  least = optional_size("min_leaf_size", "elements", min_leaf_size)
  steps = step_count("warmup", warmup, least=0)
  decays = share_below_1("b1", b1), share_below_1("b2", b2)
  method = _Scape(*decays, eps, share, least, steps, axis_name)

  @cites(Citation(ZHENG_2026, _DEPARTURE))
  def update_fn(
    updates: Any, state: ScapeState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, ScapeState]:
    del extra_args
    if axis_name is not None:
      check_whole_params(params, axis_name)
    grads = not_differentiated(updates)
    across = reduction(grads, axis_name, local=False)
    told = {"density": share, "min_leaf_size": least, "warmup": steps}
    agreement.require_agreement("gradcomp.contrib.scape", told, grads, axis_name)
    step = functools.partial(method.step, across)
    return per_device(step, grads, state, across.axis_name, keeps_addends=False)

  first = any_tree(method.init, of_workers(update_fn, axis_name, whole=True))
  return with_decay(first, learning_rate, weight_decay, mask)


# Places below it come out of a mean: three roundings lose less than a half.
_RANGE = 2**21
_DEPARTURE = (
  "Workers keep unsent gradients as residuals, by which owners choose, and not by the "
  "first moment. The second moment is Adam's."
)


class _Scape(NamedTuple):
  """The options of the moments, and of the exchange."""

  b1: float
  b2: float
  eps: float
  density: float
  min_leaf_size: int | None
  warmup: int
  axis_name: AxisName | None

  def init(self, params: Any) -> ScapeState:
    """Creates the state; the first elements to send lie at equal distances."""
    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    mu, nu = jax.tree.map(zeros, params), jax.tree.map(zeros, params)
    leaves = jax.tree.leaves(params)
    chosen = tuple(
      jnp.arange(k, dtype=jnp.int32) * (x.size // k)
      for x, k in zip(leaves, self._counts(leaves), strict=True)
      if k
    )
    feedback: Any = {"feedback": "error", "axis_name": self.axis_name}
    kept = compress(Dense(), **feedback).init(mu)
    return ScapeState(jnp.zeros([], jnp.int32), mu, nu, chosen, kept)

  def _counts(self, leaves: Sequence[Any]) -> list[int]:
    """Returns the number of elements to send of each leaf; 0 sends it whole."""
    sizes = [x.size for x in leaves]
    least = self.min_leaf_size
    least = default_min_leaf_size(sizes, drops=True) if least is None else least
    sparse = lambda size: size >= max(least, 1) and self.density < 1
    return [sent_of(self.density, size) if sparse(size) else 0 for size in sizes]

  def step(
    self, across: Reduction, grads: Any, state: ScapeState
  ) -> tuple[Any, ScapeState]:
    """Takes the step of a worker, inside of the map over all of them."""
    own = state.exchange.residual
    waiting = jax.tree.map(_corrected, grads, own)
    if not self.warmup:
      mean, left, chosen = self._sparse(across, waiting, state)
    else:
      # The last branch is the one that explain shows.
      branches = (functools.partial(f, across) for f in (self._sparse, self._dense))
      late = state.count >= self.warmup
      mean, left, chosen = lax.cond(late, *branches, waiting, state)
    good = jax.tree.map(lambda x: jnp.isfinite(x).all(), mean)
    keep = lambda ok, e, old: jnp.where(ok, e.reshape(old.shape), old)
    kept = jax.tree.map(keep, good, left, own)
    count = optax.safe_increment(state.count)
    exchange = state.exchange._replace(count=count, residual=kept)
    updates, state = self._moved(mean, grads, state)
    return updates, state._replace(chosen=chosen, exchange=exchange)

  def _dense(
    self, across: Reduction, waiting: Any, state: ScapeState
  ) -> tuple[Any, Any, tuple[jax.Array, ...]]:
    """Returns the mean of all elements, nothing that is left, and the old places."""
    mean = _mean(across, waiting, state)
    return mean, jax.tree.map(jnp.zeros_like, waiting), state.chosen

  def _sparse(
    self, across: Reduction, waiting: Any, state: ScapeState
  ) -> tuple[Any, Any, tuple[jax.Array, ...]]:
    """Returns the mean of the chosen elements, the residual, and the next places."""
    workers = _workers(across)
    index = 0 if across.axis_name is None else lax.axis_index(across.axis_name)
    leaves, treedef = jax.tree.flatten(waiting)
    counts = self._counts(leaves)
    chosen = iter(state.chosen)
    places = [next(chosen) if k else None for k in counts]
    left = [*map(_left, leaves, places)]
    roots = jax.tree.leaves(self._root(state.nu, state.count))
    # Only the order counts, so addends need not be scaled.
    scores = [jnp.abs(e) / root for e, root in zip(left, roots, strict=True)]
    given = [(x, k) for x, k in zip(scores, counts, strict=True) if k]
    finds = [_found(x.reshape(-1), k, workers, index) for x, k in given]
    values = jax.tree.unflatten(treedef, [*map(_sent, leaves, places)])
    message = {"values": values, "places": finds}
    came = _mean(across, message, state)
    means = jax.tree.leaves(came["values"])
    mean = jax.tree.unflatten(treedef, [*map(_spread, means, places, leaves)])
    scale = 1 if across.is_sum else workers
    following = tuple(
      _places(scale * found, x.size, workers)
      for found, (x, _) in zip(came["places"], given, strict=True)
    )
    return mean, jax.tree.unflatten(treedef, left), following

  def _root(self, nu: Any, count: jax.Array) -> Any:
    """Returns the root of the second moment, as if it had not begun at zero."""
    right = optax.tree.bias_correction(nu, self.b2, jnp.maximum(count, 1))
    return jax.tree.map(lambda v: jnp.sqrt(v) + self.eps, right)

  def _moved(self, mean: Any, like: Any, state: ScapeState) -> tuple[Any, ScapeState]:
    """Returns Adam's updates by a mean gradient, and the state with its moments."""
    count = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
    right = optax.tree.bias_correction(mu, self.b1, count)
    move = lambda m, r, g: (m / r).astype(g.dtype)
    updates = jax.tree.map(move, right, self._root(nu, count), like)
    return updates, state._replace(count=count, mu=mu, nu=nu)


def _workers(across: Reduction) -> int:
  return 1 if across.axis_name is None else require_size(across.axis_name)


def _mean(across: Reduction, tree: Any, state: ScapeState) -> Any:
  """Returns the mean of all workers' trees; of addends, the sum."""
  plain = CompressState(state.count, state.exchange.key, None, None)
  exchange = compress(Dense(), axis_name=across.axis_name)
  mean, _ = exchange.update(tree, plain)
  scale = _workers(across) if across.is_sum else 1
  return jax.tree.map(lambda x: scale * x, mean)


def _corrected(g: jax.Array, e: jax.Array) -> jax.Array:
  """Returns a leaf and its residual; TypeError unless it has real floats."""
  if not jnp.issubdtype(g.dtype, jnp.floating):
    raise TypeError(f"`updates` must have real float dtypes, got {g.dtype}.")
  return g.astype(jnp.float32) + e.reshape(g.shape)


def _sent(c: jax.Array, places: jax.Array | None) -> jax.Array:
  """Returns the elements to send: NaN for all if another element is not finite."""
  if places is None:
    return c
  return jnp.where(jnp.isfinite(c).all(), c.reshape(-1)[places], jnp.nan)


def _left(c: jax.Array, places: jax.Array | None) -> jax.Array:
  """Returns a leaf without the elements that are sent."""
  if places is None:
    return jnp.zeros_like(c)
  return c.reshape(-1).at[places].set(0.0).reshape(c.shape)


def _spread(mean: jax.Array, places: jax.Array | None, like: jax.Array) -> jax.Array:
  """Returns a leaf with the mean elements in their places, and zeros elsewhere."""
  if places is None:
    return mean
  zeros = jnp.zeros(like.size, mean.dtype)
  return zeros.at[places].set(mean, unique_indices=True).reshape(like.shape)


def _found(score: jax.Array, count: int, workers: int, index: Any) -> jax.Array:
  """Returns the places that a worker finds, in its slots of the list of all workers.

  A place is the distance from the start of a range, ``float32[count]``.
  """
  shares = _shares(score.size, count, workers)
  each = len(shares) // workers  # ranges of a worker
  length = -(-score.size // len(shares))
  filled = jnp.pad(score, (0, length * len(shares) - score.size), constant_values=-1.0)
  own = filled.reshape(workers, each, length)[index]
  width = int(shares.max())
  # top_k takes NaN for the largest.
  found = jnp.zeros((workers, each, width)).at[index].set(lax.top_k(own, width)[1])
  return found.reshape(-1, width)[_used(shares)]


def _places(found: jax.Array, size: int, workers: int) -> jax.Array:
  """Returns the places of all workers in the leaf, ``int32[count]``."""
  shares = _shares(size, found.size, workers)
  length = -(-size // len(shares))
  first = np.repeat(np.arange(len(shares), dtype=np.int32) * length, shares)
  return jnp.rint(found).astype(jnp.int32) + first


def _used(shares: np.ndarray) -> np.ndarray:
  return np.arange(shares.max()) < shares[:, None]


def _shares(size: int, count: int, workers: int) -> np.ndarray:
  """Returns the elements to choose from each range of a leaf, in proportion to it.

  Each worker owns as many consecutive ranges, of at most 2**21 elements, whose
  places a mean in float32 keeps.

  Example:
    >>> _shares(10, 5, 4).tolist(), _shares(5, 5, 4).tolist()
    ([1, 2, 1, 1], [2, 2, 1, 0])
  """
  ranges = workers * -(-size // (workers * _RANGE))
  length = -(-size // ranges)
  ends = [min(i * length, size) * count // size for i in range(ranges + 1)]
  return np.diff(np.array(ends))
