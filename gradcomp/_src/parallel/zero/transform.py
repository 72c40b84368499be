"""``zero``: each worker runs the optimizer on an Nth of the parameters (ZeRO)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gradcomp._src import checks, public
from gradcomp._src.codecs import protocol
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core import border, compression, specs, transform
from gradcomp._src.core import feedback as feedbacks
from gradcomp._src.core import state as states
from gradcomp._src.exchange import schedules, step
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.mesh import agreement, shard_maps, study, trees, types
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.parallel.zero import inner as inners
from gradcomp._src.parallel.zero import leaf_rows

_BYTES = checks.optional(checks.integer("a number of bytes, 0 or more, or None", 0))


class ZeroState(NamedTuple):
  """The state of :func:`gradcomp.parallel.zero`: plain arrays, for any checkpointer.

  Attributes:
    gradients: the residual and the key of their exchange, and the count of steps.
    unsent: a worker's own rows minus the parameters, ``float32``, per worker: a tree
      like the parameters, each with ``arrays``, stacked rows by their axes.
    inner_state: of the optimizer; arrays like a parameter are such rows, too.
  """

  gradients: states.CompressState
  unsent: Any
  inner_state: Any


def zero(  # noqa: PLR0913, PLR0915 - options of users; closures over them
  inner: optax.GradientTransformation,
  *,
  axis_name: mesh_axes.AxisName,
  grads: protocol.LeafCodec,
  params: protocol.LeafCodec,
  feedback: feedbacks.FeedbackName | feedbacks.Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
  key: ArrayLike = 0,
  dither: compression.Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""Returns an optimizer that runs on an Nth of the parameters a worker (ZeRO).

  It takes the place of an exchange and the optimizer after it. Worker :math:`i` has the
  gradient :math:`g_i`, the residual :math:`e_i` (zero without feedback) and the unsent
  part :math:`r` of its own rows, in float32. All workers have the parameters :math:`p`.
  The owner of some rows computes

  .. math::
     \bar g = \tfrac{1}{N} \sum_i Q_g(g_i + e_i), \qquad m = p + r, \qquad
     m' = m + \mathrm{inner}(\bar g, m), \qquad d = Q_p(m' - p)

  and all workers add the decoded :math:`d` to :math:`p`: all have the same bits.
  :math:`Q_g` is ``grads``, and :math:`Q_p` is ``params``, which rounds to nearest. The
  owner sends :math:`r = m' - (p + d)` later, at most half a step of :math:`Q_p` plus
  the rounding of bfloat16 parameters.

  A worker sends ``(N-1)/N (c_g + c_p)`` bytes, with c bytes for the payloads of all
  parameters: 8.1 bits a parameter and step at 4 and 4 bits. Its
  :class:`gradcomp.state.ZeroState` has the state of ``inner`` and :math:`r` for an Nth
  of the parameters, and the residuals of its gradients, if any. Call ``init`` as for
  :func:`gradcomp.compress`; ``update`` needs the parameters.

  JAX traces ``inner`` with the shapes of the parameters, in float32, and its operations
  are applied to rows. So it must treat each element by itself, as ``optax.adamw``,
  ``optax.lion`` and ``optax.sgd`` do; norms and random numbers are refused by name. A
  non-finite gradient makes its bucket of the updates NaN on every worker, and the state
  keeps its old values there: put :func:`gradcomp.skip_nonfinite` around this, or NaN
  stays in the parameters.

  Args:
    inner: an optax transformation that treats each element by itself, and each part of
      a complex one.
    axis_name: the axis of the workers, or a tuple of axes.
    grads: the codec of gradients, which owners add in float32. (APS adds in its own
      format: choose ``accumulate="float32"``.)
    params: the codec of updates of the parameters, with scales of its own.
    feedback, min_leaf_size: options of the gradients' exchange, see
      :class:`gradcomp.CompressOptions`. Small leaves are sent in float32 in both
      directions, in the same two messages.
    message_bytes: the largest payload of gradients that leaves share. Each such group
      of leaves has a message of its own in each direction.
    key, dither: options of the gradients' exchange, too.

  Raises:
    TypeError: ``grads`` or ``params`` is no codec; in ``update``, a gradient is not
      floating point.
    ValueError: an option is bad; a codec is sparse, or of low rank; or ``params`` has
      no scale of its own, or always draws. In ``init``: the number of workers is
      unknown; ``inner`` mixes elements, or draws; or parameters are sharded over the
      axis. In ``update``: no parameters; another state; or reduced gradients.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4)
    >>> tx = zero(optax.adam(1e-3), grads=codec, params=codec, axis_name="data")
    >>> params = {"w": jnp.ones((4, 4096))}
    >>> with jax.set_mesh(jax.make_mesh((4,), ("data",))):
    ...   state = tx.init(params)
    >>> state.inner_state[0].mu["w"].arrays[("data",)].sharding.shard_shape((4, 8, 512))
    (1, 8, 512)

  References:
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020, section 5; Jia
    et al., `SDP4Bit <https://arxiv.org/abs/2410.15526>`_, 2024, section 3.1
  """
  told = dict(locals())
  _check_codecs(grads, params)
  axes = mesh_axes.as_axis_name(mesh_axes.axis_names(axis_name))
  exchange = schedules.TwoShot(feedback=False)
  size = _BYTES.check("message_bytes", message_bytes)  # none is "auto"
  keeper = feedbacks.as_feedback(feedback, grads, "grads")
  if keeper.estimates:
    raise ValueError(
      '`feedback` must be None, "auto", "error" or "momentum" in zero, where workers '
      f"share no estimate of the means, got {feedback!r}."
    )
  options = axes, exchange, keeper, min_leaf_size, size, key, dither
  parts, of_updates = compression.Compression(grads, *options), params
  inner = shard_maps.optimizer_with_note(inner)

  def shared(like: Any, across: types.Place) -> leaf_rows.LeafRows:
    plan = parts.plan(like, across)
    return leaf_rows.share_rows(plan, of_updates, parts.min_leaf_size)

  def init_fn(tree: Any) -> ZeroState:
    gradients = parts.init(tree)
    tree = trees.unboxed(tree)
    if not jax.tree.leaves(tree):
      return ZeroState(gradients, tree, inner.init(tree))
    others = [types.other_axes(x, axes) for x in jax.tree.leaves(tree)]

    def first(tree: Any) -> tuple[Any, Any]:
      """Returns a worker's first unsent rows, zeros, and the first inner state."""
      wide = lambda x: jnp.asarray(border.pairs(x)).astype(jnp.float32)
      reals = jax.tree.map(wide, tree)
      across = types.Place(axes, mesh_axes.bound_size(axes) or 1, others=others)
      rows = shared(reals, across)
      master = rows.owned(jax.tree.leaves(reals))
      zeros = [inners.alike(jnp.float32(0), x)[0] for x in master]
      seen = inners.Inner(inner, tree, rows.axes)
      return rows.as_state(tree, zeros), seen.first(master)

    unknown = "which Nth of the parameters a worker owns"
    placed = jax.tree.map(types.typed_spec, tree)
    rows = specs.make_own(first, tree, axes, unknown, placed)
    return ZeroState(gradients, *rows)

  @public.cites("rajbhandari2020zero", "jia2024sdp4bit")
  def core(
    across: types.Place, updates: Any, state: Any, params: Any, extra_args: Any
  ) -> tuple[Any, ZeroState]:
    states.check_type(state, ZeroState)
    if params is None:
      raise ValueError(
        "`params` must be given to update, because zero sends differences from them, "
        "got None; call optimizer.update(grads, state, params)."
      )
    updates = border.not_differentiated(updates)
    parts.check(across, updates, state.gradients)
    record = "gradcomp.parallel.zero", told, updates, across.axes
    agreement.require_agreement(*record, inner_state=state.inner_state)
    study.note(("params", of_updates))
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    leaves = jax.tree.leaves(jax.tree.map(border.pairs, params))
    rows = shared(wide, across)
    seen = inners.Inner(inner, params, rows.axes, extra_args)
    waits = rows.of_state(state.unsent, params)

    def take(of: tuple[Any, Any]) -> tuple[Any, ZeroState]:
      rows = leaf_rows.LeafRows(*of)

      def finish(reduced: list[step.Reduced]) -> tuple[list[step.Reduced], Any]:
        """Runs the optimizer on the means of this worker; sends the changes."""
        before = rows.owned([x.astype(jnp.float32) for x in leaves])
        shares: list[Any] = [x.share for x in reduced]
        given = shares, state.inner_state, before, waits
        master, inner_state, lacking = seen.step(rows, *given)
        lacks, own = rows.to_all(lacking)
        sent = list(map(fitted, lacks, across.dtypes))
        dtypes = [(p.dtype, u.dtype) for p, u in zip(leaves, sent, strict=True)]
        columns = dtypes, rows.elements, master, before, own, waits
        left = [inners.still_lacking(*x) for x in zip(*columns, strict=True)]
        # No worker has the mean of a leaf. Where it is not finite, nor is the update.
        updated = [x._replace(mean=y) for x, y in zip(reduced, sent, strict=True)]
        return updated, (inner_state, (lacking, own, left))

      given = wide, state.gradients, finish, rows.plan, schedules.ReduceScatter()
      sent, kept, (inner_state, changes) = transform.take_step(parts, *given)
      kept = inners.measured_zero(kept, rows, *changes)
      return sent, ZeroState(kept, rows.as_state(params, changes[-1]), inner_state)

    of = rows.plan, rows.codecs
    return transform.otherwise(take(of), take, of, across.axes)

  return border.on_workers(init_fn, core, axis_name, reads=True)


def _check_codecs(grads: Any, params: Any) -> None:
  """Raises TypeError or ValueError for codecs that zero cannot use."""
  leaf = Leaf((1024, 1024))  # so large that every codec saves bytes
  for name, given in {"grads": grads, "params": params}.items():
    if not protocol.is_codec(given):
      raise TypeError(f"`{name}` must be an instance of a codec, got {given!r}.")
    if given.facts.drops:
      raise ValueError(
        f"`{name}` must send all elements, got the sparse codec {given}; use a "
        "quantizer like gradcomp.codecs.QSGD(bits=4)."
      )
  if refusal := grads.facts.naming(grads).refusals.get("owned"):
    raise ValueError(
      f"`grads` must be a codec that owners of rows can add, not {refusal}"
    )
  last = params.bind(leaf).to_nearest()
  if last.needs_key:
    raise ValueError(
      f"`params` must be a codec that rounds to nearest, because owners keep its "
      f"errors, got {params}, which always draws; use 2 bits or more."
    )
  like = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
  if jax.eval_shape(last.agree, like) is not None:
    raise ValueError(
      f"`params` must be a codec whose rows can be decoded alone, got {params}, whose "
      "workers agree on a scale; give it scales of its own (share_scale=False)."
    )
  protocol.require_contraction("params", last, "params=gradcomp.codecs.Dense()")
