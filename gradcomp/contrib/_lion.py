"""Distributed Lion: workers send the signs of their own momentum, 1 bit an element."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp
from gradcomp._src.core.feedback import NoFeedback
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.mesh import study
from gradcomp._src.transforms.moments import with_decay
from gradcomp.codecs import Dense, Sign

Vote = Literal["majority", "mean"]


def lion(  # noqa: PLR0913 - options of users, by keyword
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: str | tuple[str, ...] | None = None,
  vote: Vote = "majority",
  b1: float = 0.9,
  b2: float = 0.99,
  weight_decay: float = 1e-3,
  mask: Any = None,
  sync_momentum: int | None = None,
  exchange: Any = "auto",
  bucket_size: int = 64,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains by Lion: workers exchange signs and nothing else.

  It stands alone, and takes each worker's own gradients :math:`g_i`, as
  :func:`gradcomp.compress` does. Each worker keeps a momentum of its own, and all have
  the same parameters after every step, to the bit:

  .. math::
     d_i = \mathrm{sgn}(\beta_1 m_i + (1 - \beta_1) g_i), \qquad
     m_i \leftarrow \beta_2 m_i + (1 - \beta_2) g_i, \qquad
     x \leftarrow x - \eta \, (D + \lambda x)

  where :math:`D` is the sign of :math:`\sum_i d_i`, 0 in a tie, or with
  ``vote="mean"`` the mean of all :math:`d_i`. A worker sends a little more than 1 bit
  an element: see :class:`gradcomp.codecs.Sign`. In ``two_shot`` 2 bits come back for a
  vote, and ``ceil(log2(2N + 2))`` for a mean; in ``all_gather``, which is for few
  workers, the bits of all others.

  With ``b1=b2`` it is signum, and with both 0 signSGD, with a majority vote.

  With one worker it is ``optax.lion``, each operation rounded by itself, but for a
  direction of exactly zero: 1 bit has no zero, so that it counts as positive, and a
  bucket of zeros does not vote. So rows of an embedding that no batch has met get no
  direction if ``bucket_size`` divides them.

  Where a gradient is not finite, its bucket becomes NaN on all workers, and their
  momentum there stays: put :func:`gradcomp.skip_nonfinite` around all.

  Momenta drift apart as workers see other batches. ``sync_momentum=K`` replaces them by
  their mean, in float32, in every K-th step.

  Args:
    learning_rate: :math:`\eta`, a number or a schedule.
    axis_name: the axis of the workers, or a tuple of axes; None for one worker.
    vote: ``"majority"`` or ``"mean"``.
    b1: :math:`\beta_1`, at least 0 and below 1.
    b2: :math:`\beta_2`, the same.
    weight_decay: :math:`\lambda`. Above 0, ``update`` needs the parameters.
    mask: of the weight decay, as in ``optax.add_decayed_weights``.
    sync_momentum: K, or None to leave momenta as they are.
    exchange: ``"auto"``, ``"all_gather"`` or ``"two_shot"``, or an object.
    bucket_size: of the signs: a multiple of 32.

  Returns:
    A gradient transformation, whose ``update`` needs the parameters. The momentum is
    ``velocity`` of a :class:`gradcomp.state.CompressState`, per worker.

  Raises:
    ValueError: an option is outside these; or ``sync_momentum`` is given without an
      axis.

  Example:
    >>> from gradcomp.contrib import lion
    >>> tx = lion(0.1, axis_name="data", weight_decay=0.0)
    >>> def worker(gradient):
    ...   params = jnp.zeros(2)
    ...   return tx.update(gradient, tx.init(params), params)[0]
    >>> gradients = jnp.array([[2.0, 1.0], [3.0, -1.0], [-9.0, -1.0]])
    >>> jax.vmap(worker, axis_name="data")(gradients)[0]
    Array([-0.1,  0.1], dtype=float32)

  References:
    Liu et al., `Communication Efficient Distributed Training with Distributed Lion
    <https://arxiv.org/abs/2404.00438>`_, 2024, algorithm 1; Ishikawa et al., `Lion Cub
    <https://arxiv.org/abs/2411.16462>`_, 2024, which synchronizes some of the momenta,
    here all; Bernstein et al., `signSGD with Majority Vote
    <https://arxiv.org/abs/1810.05291>`_, 2018
  """
  votes = scale_by_lion(
    axis_name=axis_name,
    vote=vote,
    b1=b1,
    b2=b2,
    sync_momentum=sync_momentum,
    exchange=exchange,
    bucket_size=bucket_size,
  )
  return with_decay(votes, learning_rate, weight_decay, mask)


def scale_by_lion(  # noqa: PLR0913 - options of users, by keyword
  *,
  axis_name: str | tuple[str, ...] | None = None,
  vote: Vote = "majority",
  b1: float = 0.9,
  b2: float = 0.99,
  sync_momentum: int | None = None,
  exchange: Any = "auto",
  bucket_size: int = 64,
) -> optax.GradientTransformationExtraArgs:
  """Replaces gradients by Lion's direction: the first part of :func:`lion`.

  Args:
    axis_name, vote, b1, b2, sync_momentum, exchange, bucket_size: as of :func:`lion`.

  Returns:
    A gradient transformation. The momentum is ``velocity`` of its
    :class:`gradcomp.state.CompressState`, per worker.

  Raises:
    ValueError: as of :func:`lion`.

  Example:
    >>> from gradcomp.contrib import scale_by_lion
    >>> tx = scale_by_lion()
    >>> gradient = jnp.array([3.0, -0.5])
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> update, state.velocity
    (Array([ 1., -1.], dtype=float32), Array([ 0.03 , -0.005], dtype=float32))
  """
  for name, value in (("b1", b1), ("b2", b2)):
    if not 0 <= value < 1:
      raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}.")
  if sync_momentum is not None:
    if not isinstance(sync_momentum, int) or sync_momentum < 1:
      raise ValueError(
        "`sync_momentum` must be a number of steps, 1 or more, or None, got "
        f"{sync_momentum!r}."
      )
    if axis_name is None:
      raise ValueError(
        "`sync_momentum` must be None without an axis, over which momenta would be "
        f"averaged, got {sync_momentum}; give axis_name=."
      )
  return gradcomp.compress(
    Sign(scale="one", vote=vote, bucket_size=bucket_size),
    axis_name=axis_name,
    exchange=exchange,
    feedback=_LionMomentum(b1, b2, axis_name, sync_momentum),
  )


@dataclasses.dataclass(frozen=True)
class _LionMomentum(NoFeedback):
  """Sends Lion's mix of momentum and gradient, and keeps the momentum, no residual."""

  b1: float
  b2: float
  axis_name: str | tuple[str, ...] | None
  every: int | None  # the steps between two means of the momentum

  moves: ClassVar[bool] = True

  def sent(self, updates: Any, momentum: Any) -> Any:
    return jax.tree.map(
      lambda g, m: _mix(g, m.reshape(g.shape), self.b1), updates, momentum
    )

  def keep(
    self, updates: Any, momentum: Any, reduced: Any, counts: Sequence[jax.Array]
  ) -> Any:
    def kept(g: jax.Array, m: jax.Array, mean: jax.Array) -> jax.Array:
      finite = jnp.isfinite(mean.reshape(m.shape))
      return jnp.where(finite, _mix(g.reshape(m.shape), m, self.b2), m)

    treedef = jax.tree.structure(momentum)
    means = jax.tree.unflatten(treedef, reduced.mean)
    new = jax.tree.map(kept, updates, momentum, means)
    if self.every is None or not counts:
      return new
    due = (counts[0] + 1) % self.every == 0
    return lax.cond(due, self._averaged, lambda m: m, new)

  def _averaged(self, momentum: Any) -> Any:
    study.note(study.Options((("every", self.every),)))  # for explain
    assert self.axis_name is not None
    rows = jax.tree.map(lambda m: m[None], momentum)
    mean = gradcomp.mean_over(rows, codec=Dense(), mesh_axis=self.axis_name)
    return gradcomp.defer_reduction(mean, axis_name=self.axis_name)  # each worker's own


def _mix(g: jax.Array, m: jax.Array, b: float) -> jax.Array:
  """Returns ``b m + (1 - b) g`` in float32."""
  # Products and sum are each rounded, so that all modes have the same bits.
  return scaled(m, b) + scaled(g.astype(jnp.float32), 1 - b)
