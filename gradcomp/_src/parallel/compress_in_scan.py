"""``compress_in_scan``: layers in a loop that exchanges their gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import border, first_state, transform
from gradcomp._src.core import feedback as feedbacks
from gradcomp._src.core import state as states
from gradcomp._src.core.state import CompressState, Kept, ScanState
from gradcomp._src.exchange import auto, protocol
from gradcomp._src.mesh import agreement, axes, place, study, types
from gradcomp._src.parallel import scan_exchanges, scan_loop
from gradcomp._src.parallel.scan import first_layer


def compress_in_scan(
  codec: LeafCodec,
  *,
  axis_name: axes.AxisName,
  exchange: auto.ExchangeName | auto.Auto | protocol.Exchange = "auto",
  feedback: feedbacks.FeedbackName | feedbacks.Feedback | None = "auto",
  policy: Callable[..., bool] | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """Returns the exchange of layers in a loop, in place of :func:`gradcomp.compress`.

  Give it the stacked layers alone, by ``optax.partition``. The loss has an argument
  ``scan``, and calls it once as ``scan(body, carry, layers)``: in
  :func:`gradcomp.make_train_step` that is :func:`scan` with these options, elsewhere
  ``jax.lax.scan``. So the layers' gradients reach the optimizer as means, and it
  returns them as they are. Its state is a :class:`gradcomp.state.ScanState`; call
  ``init`` inside the map, or under ``jax.set_mesh(mesh)``.

  Args:
    codec, axis_name, exchange: as for :func:`scan`.
    feedback: None, ``"error"``, or ``"auto"``: error feedback for biased codecs. With
      None owners keep nothing either, as with ``TwoShot(feedback=False)``.
    policy: as for :func:`scan`.
    key: a seed, or a key, that all workers share. Each step folds in its number.

  Raises:
    ValueError: as for :func:`scan`; in ``update``, a gradient comes from no scan.
    TypeError: ``codec`` is no codec, or layers have no real floats.

  Example:
    >>> tx = compress_in_scan(gradcomp.codecs.Dense(), axis_name="data")
    >>> optimizer = optax.chain(tx, optax.sgd(0.5))
    >>> mesh, layers = jax.make_mesh((1,), ("data",)), jnp.array([2.0, 3.0])
    >>> loss_fn = lambda w, x, scan: scan(lambda x, w: (w * x, None), x[0], w)[0]
    >>> step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
    >>> layers, _, metrics = step(layers, optimizer.init(layers), jnp.ones(1))
    >>> metrics["loss"], layers
    (Array(6., dtype=float32), Array([0.5, 2. ], dtype=float32))
  """
  told = dict(locals())
  axis_name = axes.as_axis_name(axes.axis_names(axis_name))
  rule = feedbacks.as_feedback(feedback, codec)
  if rule not in (feedbacks.NoFeedback(), feedbacks.ErrorFeedback()):
    raise ValueError(
      '`feedback` must be None, "auto" or "error" for layers in a scan, whose '
      f"residuals are float32, got {feedback!r}; put momentum after the exchange."
    )
  options = ScanOptions(codec, axis_name, exchange, rule.keeps, policy)

  def init_fn(params: Any) -> ScanState:
    study.note(options, *jax.tree.leaves(params))

    def first(nothing: CompressState) -> CompressState:
      way = scan_exchanges.layer_options(axis_name, codec, exchange, keeps=True)
      zeros = scan_loop.zeros_of(params)  # whose values do not matter
      length, layer = first_layer("layers", zeros, axis_name)
      kept = scan_exchanges.mean_exchange(way, layer, is_sum=False).first()
      stacked = lambda x: jnp.broadcast_to(x, (length, *x.shape))
      return _with_kept(nothing, jax.tree.map(stacked, kept), params)

    kept: Any = CompressState(*[None] * 4)  # type: ignore[arg-type]
    if options.keeps:
      unknown = "how many workers keep a residual"
      kept = first_state.make_own(first, kept, axis_name, unknown)
    count = jnp.zeros([], jnp.int32)
    return ScanState(kept._replace(count=count, key=states.seed_words(key)))

  def update_fn(
    updates: Any, state: Any, params: Any = None, *, scan_residual: Any = None, **_: Any
  ) -> tuple[Any, ScanState]:
    del params
    states.check_type(state, ScanState)
    if study.is_followed():
      return updates, state
    if study.is_study():
      return _studied(options, updates, state.layers), state
    what = "gradcomp.parallel.compress_in_scan"
    agreement.require_agreement(what, told, updates, axis_name)
    for path, own, _ in place.leaves_cut(updates, axis_name, types.varying_axes):
      raise ValueError(
        f"`updates`{path} must be the mean that a scan makes, but it differs between "
        f"the workers of {own}; take the step by gradcomp.make_train_step, with a loss "
        "that calls its scan=."
      )
    if options.keeps and scan_residual is None:
      raise ValueError(
        "`scan_residual` must be the new residual of the scan with "
        f"{options.codec}, got None; take the step by gradcomp.make_train_step, and "
        "let transformations around this one pass on extra arguments."
      )
    kept = scan_residual if options.keeps else None
    counted = state.layers._replace(count=optax.safe_increment(state.layers.count))
    return updates, ScanState(_with_kept(counted, kept, updates))

  return border.any_tree(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class ScanOptions:
  """The options of :func:`scan` for layers, which has a key in each step."""

  codec: LeafCodec
  axis_name: axes.AxisName
  exchange: auto.ExchangeName | auto.Auto | protocol.Exchange
  keeps: bool  # whether there is a residual
  policy: Callable[..., bool] | None


def _with_kept(state: CompressState, kept: Kept | None, like: Any) -> CompressState:
  """Returns a state with the residual of a scan over layers like these."""
  if kept is None:
    return state._replace(residual=None, server_residual=None)
  residual = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(kept.leaves))
  return state._replace(residual=residual, server_residual=kept.owners or None)


def _studied(options: ScanOptions, updates: Any, state: CompressState) -> Any:
  """Exchanges layer after layer, as the scan does, for the readers of a study."""
  length = len(jax.tree.leaves(updates)[0])
  study.note(("layers", (length,)))
  given = options.axis_name, options.codec, options.exchange
  way = scan_exchanges.layer_options(*given, keeps=options.keeps)

  def exchanged(given: Any) -> Any:
    grads, residual, owners = given
    own: Any = state._replace(residual=residual, server_residual=owners)
    return transform.transformation(way).update(grads, own)[0]

  return lax.map(exchanged, (updates, state.residual, state.server_residual))
