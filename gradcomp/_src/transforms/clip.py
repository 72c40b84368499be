"""Clipping of each worker's gradient by its own norm, before the exchange."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gradcomp._src.bibliography import LIN_2018, Citation, cites
from gradcomp._src.checks import one_of, static_number
from gradcomp._src.core import agreement
from gradcomp._src.core.inputs import on_real_pairs
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.place import place
from gradcomp._src.mesh.shard_maps import per_device
from gradcomp._src.transforms.each_worker import scaled_norm

ClipRule = Literal["own", "share", "root"]


def clip_by_local_norm(
  max_norm: float, *, axis_name: AxisName | None = None, rule: ClipRule = "own"
) -> optax.GradientTransformation:
  r"""Scales each worker's gradient so that its norm is at most a limit.

  .. math:: g_i' = g_i \min(1, \frac{l}{\lVert g_i \rVert})

  Put it in front of a compressed exchange that keeps residuals: clipping behind it
  would clip residuals of many steps. With :math:`g_i` a worker's gradient before
  the mean of all N, the rules are

  =========  ===================  ======================================================
  ``rule``   :math:`l`            the norm of the mean
  =========  ===================  ======================================================
  ``own``    :math:`c`            at most c, by the triangle inequality, as behind a
                                  mean and ``optax.clip_by_global_norm(c)``
  ``share``  :math:`c \sqrt{N}`   about c at most, if the workers' gradients are
                                  independent; up to :math:`c \sqrt{N}` if they agree
  ``root``   :math:`c/\sqrt{N}`   at most :math:`c/\sqrt{N}`
  =========  ===================  ======================================================

  .. warning:: The default is not the papers' rule. Theirs is ``share``: each worker
    clips its share of the sum, :math:`g_i / N`, at :math:`N^{-1/2}` of the threshold,
    so that the mean can be longer than c. ``root`` has their limit for :math:`g_i` in
    place of :math:`g_i / N`, and is N times tighter. ``own`` ended best in a run of two
    seeds that clipped in all steps: see docs/methods/sparse.md.

  The norm is the l2 norm of all leaves of a worker. A gradient that is not finite stays
  so. Clipping is a bias, which no residual keeps.

  Args:
    max_norm: c, a positive, finite number.
    axis_name: the axis of the workers, or a tuple of axes; None for one worker, or for
      the axes that gradients are unreduced over.
    rule: one of the table above.

  Returns:
    A gradient transformation without state. It returns gradients in their own dtypes.

  Raises:
    ValueError: ``max_norm`` or ``rule`` is bad; in ``update``, the axes are wrong, as
      for :func:`gradcomp.compress`.
    TypeError: in ``update``, a gradient leaf is neither real nor complex floating
      point.

  Example:
    >>> tx = clip_by_local_norm(1.0, axis_name="data")
    >>> clip = lambda g: tx.update(g, tx.init(g))[0]
    >>> gradients = jnp.tile(jnp.array([3.0, 4.0]), (4, 1))  # of four workers
    >>> jax.vmap(clip, axis_name="data")(gradients)[0]
    Array([0.6, 0.8], dtype=float32)

  References:
    Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018,
    section 3.2; Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018,
    section 2.4
  """
  told = dict(locals())
  max_norm = static_number("max_norm", "a positive, finite number", max_norm)
  one_of("rule", ClipRule, rule)
  if axis_name is not None:
    axis_names(axis_name)

  @cites(
    Citation(
      LIN_2018,
      'The rule "share" is the paper\'s. "own", the default, clips each gradient at '
      "max_norm.",
    )
  )
  def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    del params, extra_args
    across = place(updates, axis_name)
    what = "gradcomp.wrappers.clip_by_local_norm"
    agreement.require_agreement(what, told, updates, across.axes)

    def on_device(updates: Any, state: Any) -> tuple[Any, Any]:
      root = math.sqrt(across.workers)
      limit = max_norm * {"own": 1.0, "share": root, "root": 1 / root}[rule]
      limit /= across.addends
      down, norm = scaled_norm(jax.tree.leaves(updates), across.others)
      clips = (norm > limit * down) & jnp.isfinite(norm)
      factors = jnp.where(clips, down, 1.0), jnp.where(clips, limit / norm, 1.0)
      scale = lambda g: (g * factors[0] * factors[1]).astype(g.dtype)
      return jax.tree.map(scale, updates), state

    return per_device(on_device, updates, state, across.axes, keeps_addends=True)

  empty = lambda params: optax.EmptyState()
  return on_real_pairs(empty, update_fn, axis_name, keeps_rows=True)
