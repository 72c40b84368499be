"""``compress_in_scan``: layers in a loop that exchanges their gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import agreement
from gradcomp._src.core.feedback import (
  ErrorFeedback,
  Feedback,
  FeedbackName,
  NoFeedback,
  as_feedback,
)
from gradcomp._src.core.inputs import any_tree
from gradcomp._src.core.state import CompressState, ScanState, check_type, seed_words
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh import study, types
from gradcomp._src.mesh.axes import (
  AxisName,
  as_axis_name,
  axis_names,
  bound_size,
  mesh_size,
  require_size,
)
from gradcomp._src.parallel.scan import scan, scan_residual
from gradcomp._src.parallel.scan_layer import Kept


def compress_in_scan(
  codec: LeafCodec,
  *,
  axis_name: AxisName,
  exchange: ExchangeName | Auto | Exchange = "auto",
  feedback: FeedbackName | Feedback | None = "auto",
  policy: Callable[..., bool] | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """Takes the place of :func:`gradcomp.compress` for layers in a loop.

  Give it the stacked layers alone, by ``optax.partition``, and all other parameters
  to :func:`gradcomp.compress` or a recipe. The loss has an argument ``scan``, and
  calls it once as ``scan(body, carry, layers)``. In :func:`gradcomp.make_train_step`
  that is :func:`scan` with these options. So the layers' gradients reach the optimizer
  as means, and it returns them as they are. Elsewhere the loss takes
  ``jax.lax.scan``.

  Args:
    codec, axis_name, exchange: as for :func:`scan`.
    feedback: None, ``"error"``, or ``"auto"``: error feedback for biased codecs. With
      None owners keep nothing either, as with ``TwoShot(feedback=False)``.
    policy: as for :func:`scan`.
    key: a seed, or a key, that all workers share. Each step folds in its number.

  Returns:
    A gradient transformation; its state is a :class:`gradcomp.state.ScanState`. Call
    ``init`` inside the map, or under ``jax.set_mesh(mesh)``.

  Raises:
    ValueError: an option is bad; in ``init``, those of :func:`scan_residual`; in
      ``update``, a gradient differs between workers, because it comes from no scan.
    TypeError: ``codec`` is no codec, or layers have no real floats.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> def loss_fn(params, x, scan):
    ...   layer = lambda x, w: (w * x, None)
    ...   x, _ = scan(layer, x * params["scale"], params["layers"])
    ...   return jnp.mean(x)
    >>> parts = {
    ...   "layers": compress_in_scan(gradcomp.codecs.Dense(), axis_name="data"),
    ...   "scale": gradcomp.dense(axis_name="data")}
    >>> labels = {"layers": "layers", "scale": "scale"}
    >>> optimizer = optax.chain(optax.partition(parts, labels), optax.sgd(0.5))
    >>> step = gradcomp.make_train_step(
    ...   loss_fn, optimizer, axis_name="data", mesh=mesh)
    >>> params = {"layers": jnp.array([2.0, 3.0]), "scale": jnp.float32(1.0)}
    >>> with jax.set_mesh(mesh):
    ...   opt_state = optimizer.init(params)
    >>> params, _, metrics = step(params, opt_state, jnp.ones(1))
    >>> metrics["loss"], params["layers"]
    (Array(6., dtype=float32), Array([0.5, 2. ], dtype=float32))
  """
  told = dict(locals())
  names = axis_names(axis_name)
  rule = as_feedback(feedback, codec)
  if rule not in (NoFeedback(), ErrorFeedback()):
    raise ValueError(
      '`feedback` must be None, "auto" or "error" for layers in a scan, whose '
      f"residuals are float32, got {feedback!r}; put momentum behind the exchange."
    )
  options = ScanOptions(codec, as_axis_name(names), exchange, rule.keeps, policy)

  def init_fn(params: Any) -> ScanState:
    study.note(options, *jax.tree.leaves(params))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    kept = {"residual": None, "server_residual": None} | _first(options, shapes)
    return ScanState(CompressState(jnp.zeros([], jnp.int32), seed_words(key), **kept))

  def update_fn(
    updates: Any,
    state: ScanState,
    params: Any = None,
    *,
    scan_residual: Kept | None = None,
    **extra_args: Any,
  ) -> tuple[Any, ScanState]:
    del params, extra_args
    check_type(state, ScanState)
    if study.is_followed():
      return updates, state
    if study.is_study():
      return _studied(options, updates, state.layers), state
    what = "gradcomp.parallel.compress_in_scan"
    agreement.require_agreement(what, told, updates, options.axis_name)
    _check_means(updates, options)
    kept: dict[str, Any] = {"count": optax.safe_increment(state.layers.count)}
    if options.keeps:
      if scan_residual is None:
        raise ValueError(
          "`scan_residual` must be the new residual of the scan with "
          f"{options.codec}, got None; take the step by gradcomp.make_train_step, and "
          "let transformations around this one pass on extra arguments."
        )
      kept |= _as_fields(scan_residual, updates)
    return updates, ScanState(state.layers._replace(**kept))

  return any_tree(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class ScanOptions:
  """The options of layers in a scan."""

  codec: LeafCodec
  axis_name: AxisName
  exchange: ExchangeName | Auto | Exchange
  keeps: bool  # whether there is a residual
  policy: Callable[..., bool] | None

  def scan(
    self,
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    layers: Any,
    *,
    residual: Kept | None,
    key: jax.Array,
  ) -> tuple[Any, Any]:
    """Scans over the layers of a step, which has its own key."""
    return scan(
      body,
      carry,
      layers,
      axis_name=self.axis_name,
      codec=self.codec,
      exchange=self.exchange,
      residual=residual,
      policy=self.policy,
      key=key,
    )


def kept_by(state: ScanState) -> Kept | None:
  """Returns the residual of a worker's state, as the scan takes it."""
  if state.layers.residual is None:
    return None
  leaves = jax.tree.leaves(state.layers.residual)
  return Kept(leaves, state.layers.server_residual or {})


def _as_fields(kept: Kept, like: Any) -> dict[str, Any]:
  """Returns the two fields of a state that are the residual of the scan."""
  residual = jax.tree.unflatten(jax.tree.structure(like), kept.leaves)
  return {"residual": residual, "server_residual": kept.owners or None}


def _first(options: ScanOptions, shapes: Any) -> dict[str, Any]:
  """Makes the first residual: of this worker, or of all outside of the map."""
  axes = options.axis_name
  if not options.keeps:
    return {}

  def first() -> dict[str, Any]:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    way: dict[str, Any] = dict(codec=options.codec, exchange=options.exchange)
    kept = scan_residual(zeros, axis_name=axes, **way)
    return _as_fields(kept, shapes)

  if bound_size(study.studied_axes(axes) or axes) is not None:
    return first()
  if mesh_size(axes) is None:
    require_size(axes)  # raises
  mapped = jax.shard_map(
    first, in_specs=(), out_specs=P(axes), axis_names=set(axis_names(axes))
  )
  return jax.jit(mapped)()


def _studied(options: ScanOptions, updates: Any, state: CompressState) -> Any:
  """Exchanges layer after layer, as the scan does, for the readers of a study."""
  length = len(jax.tree.leaves(updates)[0])
  study.note(study.Options((("layers", (length,)),)))
  one = compress(
    options.codec,
    axis_name=options.axis_name,
    exchange=options.exchange,
    feedback="error" if options.keeps else None,
    message_bytes=None,
  )

  def exchanged(given: Any) -> Any:
    grads, residual, owners = given
    own: Any = state._replace(residual=residual, server_residual=owners)
    return one.update(grads, own)[0]

  return lax.map(exchanged, (updates, state.residual, state.server_residual))


def _check_means(updates: Any, options: ScanOptions) -> None:
  """Raises ValueError for a gradient that is typed as differing between workers."""
  names = axis_names(options.axis_name)
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    if own := types.varying_axes(leaf).intersection(names):
      raise ValueError(
        f"`updates`{jax.tree_util.keystr(path)} must be a mean that the scan of its "
        f"layer has made, but it differs between the workers of {sorted(own)}; take "
        "the step by gradcomp.make_train_step, with a loss that calls its scan=."
      )
