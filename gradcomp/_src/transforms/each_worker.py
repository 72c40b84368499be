"""Each worker's own gradient: its norm, clipping by it, and transformations of it."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src import checks, public
from gradcomp._src.core.border import on_workers, pairs
from gradcomp._src.exchange.collectives import largest, psum
from gradcomp._src.mesh import agreement, shard_maps, trees, types
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.types import Place, place
from gradcomp._src.transforms.freeze import decided

ClipRule = Literal["own", "share", "root"]


def global_norm(grads: Any, *, axis_name: AxisName | None = None) -> jax.Array:
  r"""Returns the l2 norm of each worker's own gradient, before the exchange.

  .. math:: \sqrt{\sum_j |g_{ij}|^2}

  of worker i's gradient, over the elements j of all leaves. It is for logs, and sends
  nothing. The norm of the mean is ``optax.global_norm`` of the result of an exchange
  like :func:`gradcomp.dense`. It is at most the mean of these norms, and shorter the
  less the workers' gradients agree.

  Args:
    grads: gradients from :func:`gradcomp.value_and_grad`, in any place, or another tree
      of real or complex floats.
    axis_name: the axis of the workers, or a tuple of axes; required inside a map if
      gradients differ, by their types, along more than one axis.

  Returns:
    Inside a map, the worker's norm, ``float32[]``. In plain ``jax.jit`` the norms of
    all N workers, ``float32[N]``, sharded over their axis. For other gradients, one
    number.

  Raises:
    ValueError: ``axis_name`` is missing as above, or is not the axis of the gradients.

  Example:
    >>> rows = jnp.array([[3.0, 4.0], [0.0, 1.0]])  # of two workers
    >>> global_norm({"w": gradcomp.PerWorker(rows, "data")})
    Array([5., 1.], dtype=float32)
    >>> jax.vmap(gradcomp.global_norm, axis_name="data")({"w": rows})
    Array([5., 1.], dtype=float32)
  """
  grads = trees.unboxed(grads)
  if trees.of_all(grads):
    rows = jax.tree.leaves(trees.unmarked(grads)[0])
    return jax.vmap(lambda own: _own_norm(own, [()] * len(own)))([*map(pairs, rows)])
  across = place(grads, axis_name, local=True)
  grads = [*map(pairs, jax.tree.leaves(grads))]
  axes, others = across.axes, across.others
  if axes is None or not across.is_sum:
    varying = [types.varying_axes(x) for x in grads]
    found = frozenset().union(*varying)
    if axes is None and len(found) > 1:
      raise ValueError(
        "`axis_name` must name the axes of the workers where gradients differ along "
        f"several, {sorted(found)}, got None: along others, each device has a shard."
      )
    own = found if axes is None else axis_names(axes)
    return _own_norm(grads, [tuple(sorted(x.difference(own))) for x in varying])
  workers, spread = across.workers, NamedSharding(types.mesh_of(grads), P(axes))
  zeros = jax.reshard(jnp.zeros(workers), spread)
  on_device = lambda grads, zeros: (grads, zeros + workers * _own_norm(grads, others))
  return shard_maps.per_device(on_device, grads, across, keeps=True)(grads, zeros)[1]


def on_each_worker(
  transformation: optax.GradientTransformation, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
  """Runs a transformation of others on each worker's own gradient, in every place.

  It returns :math:`g_i' = f(g_i)` of worker i's gradient, before an exchange: with
  ``optax.clip_by_global_norm(1.0)`` each worker's gradient is clipped by its own norm.
  In plain ``jax.jit``, where such a transformation alone is an error, it runs in a map
  over the axis. Under Explicit axes it sees N times the device's addend, which is the
  worker's gradient, and its result is divided by N. In maps it changes nothing.

  The state must be equal on all workers: nothing, or counts as in
  ``optax.scale_by_schedule``. For moments, put the optimizer after the exchange, or use
  :class:`gradcomp.MomentumFeedback`.

  Args:
    transformation: of optax, or another one that sends nothing.
    axis_name: the axes of the workers, see :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation with the state of ``transformation``.

  Raises:
    ValueError: in ``update``, the axes are wrong, as for :func:`gradcomp.compress`; the
      gradients decide the next state; or a gradient is a shard, over an axis that is
      not the workers'.

  Example:
    >>> own = on_each_worker(optax.clip_by_global_norm(1.0), axis_name="data")
    >>> tx = optax.chain(own, gradcomp.dense(axis_name="data"))
    >>> rows = jnp.array([[3.0, 4.0], [0.0, 0.5]])  # of two workers
    >>> mean = lambda g: tx.update(g, tx.init(g))[0]
    >>> jax.vmap(mean, axis_name="data")(rows)[0]
    Array([0.3 , 0.65], dtype=float32)
  """
  inner = optax.with_extra_args_support(transformation)
  if axis_name is not None:
    axis_names(axis_name)

  def own(
    across: Place, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
  ) -> tuple[Any, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, _), others in zip(leaves, across.others, strict=True):
      if others:
        raise ValueError(
          f"`updates`{jax.tree_util.keystr(path)} must be the whole gradient of a "
          f"worker, got a shard over {others}; use "
          "gradcomp.wrappers.clip_by_local_norm, or transform the mean after the "
          "exchange."
        )
    if paths := decided(inner, updates, state, params, extra_args):
      raise ValueError(
        "`transformation` must keep a state that is equal on all workers, but "
        f"gradients decide its {', '.join(paths)}; put it after the exchange, or, for "
        'a momentum, use feedback="momentum" of the exchange.'
      )
    new, state = inner.update(across.own(updates), state, params, **extra_args)
    return jax.tree.map(lambda g: g / across.addends, new), state

  return on_workers(inner.init, own, axis_name, keeps=True, reads=True, whole=True)


def clip_by_local_norm(
  max_norm: float, *, axis_name: AxisName | None = None, rule: ClipRule = "own"
) -> optax.GradientTransformation:
  r"""Scales each worker's gradient so that its norm is at most a limit.

  .. math:: g_i' = g_i \min(1, \frac{l}{\lVert g_i \rVert})

  Put it before a compressed exchange that keeps residuals: clipping after it would clip
  residuals of many steps. The norm is the l2 norm of all leaves of worker i's gradient
  :math:`g_i`. With N workers the rules are

  =========  ===================  ======================================================
  ``rule``   :math:`l`            the norm of the mean
  =========  ===================  ======================================================
  ``own``    :math:`c`            at most c, by the triangle inequality, as with
                                  ``optax.clip_by_global_norm(c)`` after a mean
  ``share``  :math:`c \sqrt{N}`   about c at most, if the workers' gradients are
                                  independent; up to :math:`c \sqrt{N}` if they agree
  ``root``   :math:`c/\sqrt{N}`   at most :math:`c/\sqrt{N}`
  =========  ===================  ======================================================

  .. warning:: The papers' rule is ``share``: each worker clips its share of the sum,
    :math:`g_i / N`, at :math:`N^{-1/2}` of the threshold. ``root`` applies this limit
    to :math:`g_i`, and is N times tighter. docs/methods/sparse.md compares them.

  A gradient that is not finite stays so. Clipping is a bias, which no residual keeps.

  Args:
    max_norm: c, a positive, finite number.
    axis_name: the axes of the workers, see :class:`gradcomp.CompressOptions`.
    rule: a rule of the table.

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
  max_norm = checks.static_number("max_norm", "a positive, finite number", max_norm)
  checks.one_of("rule", ClipRule, rule)
  if axis_name is not None:
    axis_names(axis_name)

  @public.cites("lin2018dgc")
  def scaled(across: Place, updates: Any, state: Any) -> Any:
    what = "gradcomp.wrappers.clip_by_local_norm"
    agreement.require_agreement(what, told, updates, across.axes)
    root = math.sqrt(across.workers)
    limit = max_norm * {"own": 1.0, "share": root, "root": 1 / root}[rule]
    limit /= across.addends
    down, norm = scaled_norm(jax.tree.leaves(updates), across.others)
    clips = (norm > limit * down) & jnp.isfinite(norm)
    factors = jnp.where(clips, down, 1.0), jnp.where(clips, limit / norm, 1.0)
    scale = lambda g: (g * factors[0] * factors[1]).astype(g.dtype)
    return jax.tree.map(scale, updates), state

  return on_workers(lambda params: optax.EmptyState(), scaled, axis_name, keeps=True)


def scaled_norm(
  leaves: list[jax.Array], others: Sequence[tuple[str, ...]]
) -> tuple[jax.Array, jax.Array]:
  """Returns a power of two by which no square overflows, and the l2 norm times it."""
  wide = [leaf.astype(jnp.float32) for leaf in leaves]
  top = jnp.zeros([], jnp.float32)
  for leaf, axes in zip(wide, others, strict=True):
    own = jnp.max(jnp.abs(leaf), initial=0.0)
    top = jnp.maximum(top, largest(own, axes) if axes else own)
  exponent = jnp.clip(lax.bitcast_convert_type(top, jnp.int32) >> 23, 1, 253)
  down = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
  total = jnp.zeros([], jnp.float32)
  for leaf, axes in zip(wide, others, strict=True):
    square = jnp.sum(jnp.square(leaf * down))
    total = total + (psum(square, axes) if axes else square)
  return down, jnp.sqrt(total)


def _own_norm(grads: list[jax.Array], others: Sequence[Any]) -> jax.Array:
  """Returns the norm over these leaves, and over the shards of other axes."""
  down, scaled = scaled_norm(grads, others)
  return scaled / down
