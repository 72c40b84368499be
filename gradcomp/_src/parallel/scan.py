"""``scan``: layers in a loop, with gradients that travel while others are computed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

from gradcomp._src.codecs import policy as codec_policy
from gradcomp._src.codecs import protocol as codecs
from gradcomp._src.core import border, specs, transform
from gradcomp._src.core import feedback as feedbacks
from gradcomp._src.core import state as states
from gradcomp._src.exchange import auto, protocol
from gradcomp._src.mesh import axes, shard_maps, study, trees, types
from gradcomp._src.mesh.agreement import require_agreement
from gradcomp._src.parallel import scan_loop, wires

_FIRST_OF_SHARDS = (
  "start with gradcomp.parallel.gather_residual of each array, with axis=axis + 1."
)


def scan(  # noqa: C901, PLR0913, PLR0915 - options of users; closures over them
  body: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  layers: Any,
  *,
  axis_name: axes.AxisName,
  codec: codecs.LeafCodec,
  exchange: auto.ExchangeName | auto.Auto | protocol.Exchange = "auto",
  axis: int | None = None,
  params: codecs.LeafCodec | None = None,
  whole: Any = None,
  backward_axis_name: axes.AxisName | None = None,
  residual: Any = None,
  policy: Callable[..., bool] | None = None,
  key: jax.Array | None = None,
) -> tuple[Any, Any]:
  r"""Returns ``(carry, ys)`` as ``lax.scan``; exchanges gradients in the loop.

  While the backward pass computes layer l, the message of layer l+1 is on its way to
  the owners, and the means of layer l+2 on theirs to all workers. With worker i's
  gradient :math:`g_{il}` of layer l and its residual :math:`e_{il}`, the gradient of
  ``layers`` is that of :func:`gradcomp.compress` with a message for each layer,

  .. math::
     \bar{g}_l = \frac{1}{N} \sum_i Q(g_{il} + e_{il}), \qquad
     e_{il}' = g_{il} + e_{il} - Q(g_{il} + e_{il})

  Give it to an optimizer as it is, and exchange other gradients by
  :func:`gradcomp.compress`; :func:`compress_in_scan` does this in a train step. **The
  new residual is the cotangent of** ``residual``. Take the gradient with respect to
  both, and scan each stack once::

    means, residual = jax.grad(loss_fn, (0, 1))(layers, residual, batch)

  The backward pass computes again what ``policy`` does not save, as ``jax.checkpoint``.
  Whether layers hide messages is up to the compiler: see
  :func:`gradcomp.overlap_report`. ``FloatCast`` and ``Ternary`` agree on statistics in
  each layer. A non-finite gradient makes at least its bucket NaN on every worker, and
  residuals keep their old values there.

  In plain ``jax.jit`` under Explicit axes, a ``jax.shard_map`` over the axis runs the
  layers: ``body`` sees a worker's rows of the carry, and ``ys`` are joined, ``[L, N
  rows, ...]``. The loss is that of the whole batch there, and :math:`\bar g_l` the sum
  of addends. ``body`` must not close over arrays of the mesh; those of a
  ``jax.tree_util.Partial`` are arguments.

  **Layers in shards** (FSDP), with ``axis``: ``layers`` are the shards :math:`w_{ld}`
  of this worker d, and the body gets whole layers, as by :func:`gather`. Gradients are
  sums: divide the loss of each worker by N for means,

  .. math::
     w_l = [Q_w(w_{l0}), \ldots, Q_w(w_{l,N-1})], \qquad
     \bar{w}_{ld} = \sum_{i=0}^{N-1} Q((g_{il} + e_{il})[d])

  The shards of the next layer come while one computes. Of L layers a worker sends ``(2
  L - 1) (N-1) c_w`` bytes of shards and ``L (N-1) c_g`` of gradients, with c bytes for
  the payload of a shard. With ``backward_axis_name`` (hpZ of ZeRO++), the n chips of a
  host keep the words of each layer, ``(L-1) N c_w / n`` bytes each, and the backward
  pass gathers these inside the host. With ``whole`` (ZeRO 1 and 2), nothing is
  gathered, and only the gradients of the shards travel.

  Args:
    body: ``(carry, layer) -> (carry, y)``, as for ``lax.scan``. Put ``jax.vmap`` over
      examples inside of it.
    carry: the input of the first layer, each worker's own.
    layers: a tree of arrays that stack layers on first axes, ``[L, ...]``, equal on all
      workers, or this worker's shards. Only floats have gradients and shards.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the gradients. Sparse codecs and ``OneBit`` need a residual, and
      sparse ones do not send shards.
    exchange: as of :class:`gradcomp.CompressOptions`, except ``"local"``; left out for
      shards.
    axis: the array axis of a layer along which each array is sharded; None where each
      worker has whole layers. The following three are for shards.
    params: the codec of the shards; None sends them as they are.
    whole: whole layers, ``[L, ...]``, a tree like ``layers``, which the body reads as
      constants; ``params`` is None then.
    backward_axis_name: some of the axes of ``axis_name``, along which the workers of
      one host differ.
    residual: the rounding errors of earlier steps, in ``float32``; None drops them. The
      first one is ``compress_in_scan(..., feedback="error").init(layers).residual``, or
      ``gather_residual(w, axis_name=axis_name, axis=axis + 1)`` of each shard.
    policy: of ``jax.checkpoint``; None saves only the inputs of layers.
    key: a key that all workers share, another one for each step, if a codec draws
      random numbers. Layer l folds in l, and in shards its arrays then their numbers.

  Raises:
    ValueError: an argument is not as above; the axis is neither bound nor Explicit; the
      codec keeps a memory, or lacks a residual or a key; ``jax.vmap`` over examples is
      around it; or in plain ``jax.jit`` layers are sharded, the carry is not, or an
      output has no rows.
    TypeError: a codec is none, ``body`` returns no pair, or ``layers`` have no real
      floats.

  Example:
    >>> def loss(layers, x, **options):
    ...   layer = lambda x, w: (w * x, None)
    ...   x, _ = gradcomp.parallel.scan(
    ...     layer, x, layers, axis_name="data", codec=gradcomp.codecs.Dense(),
    ...     **options)
    ...   return jnp.sum(x)
    >>> layers, x = jnp.array([2.0, 3.0]), jnp.array([1.0, 5.0])
    >>> grad = jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="data")
    >>> jax.jit(grad)(layers, x).tolist()
    [[9.0, 6.0], [9.0, 6.0]]

  References:
    Grubic et al., `2018 <https://doi.org/10.3929/ethz-b-000319485>`_, section 2.4.1;
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023, section 3.3;
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020, section 5;
    Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023, section 3.2
  """
  keeps, inner = residual is not None, backward_axis_name
  gathering: dict[str, Any] = {"params": params, "backward_axis_name": inner}
  if axis is None:
    gathering["whole"] = None if whole is None else jax.tree.structure(whole)
  for name, value in gathering.items():
    if value is not None and axis is None:
      raise ValueError(
        f"`{name}` must be None where each worker has whole layers, got {value!r}; say "
        "by axis=0 along which axis of a layer its arrays are sharded."
      )
    if value is not None and whole is not None:
      raise ValueError(
        f"`{name}` must be None with `whole`, which gathers nothing, got {value!r}; "
        "encode the layers where you gather them, by gradcomp.parallel.all_gather."
      )
  if axis is None:
    sending = scan_loop.layer_options(axis_name, codec, exchange, keeps=keeps)
    words = wires.checked_key(key, codec, each="step")
    if isinstance(residual, states.Kept):
      residual = states.Kept(jax.tree.leaves(residual.leaves), residual.owners)
  else:
    forward = wires.codec_of("params", params)
    back = codec_policy.stateless("codec", codec, corrected=keeps)
    _check_shards(back, exchange, axis_name, inner)
    words = wires.checked_key(key, forward, back)
    residual = states.Kept(jax.tree.leaves(residual), {}) if keeps else None
  carry, layers, whole = jax.tree.map(jnp.asarray, (carry, layers, whole))
  words = jnp.zeros(2, jnp.uint32) if words is None else words
  # In plain jax.jit a map over the workers is made here.
  mesh, kind = types.around((carry, layers), axis_name)
  plain = axis is None and kind == AxisType.Explicit

  def of_worker(body: Any, carry: Any, given: scan_loop.Given) -> tuple[Any, Any]:
    size = axes.require_size(axis_name)
    length, layer = first_layer("layers", given.layers, axis_name)
    if axis is None:
      floats, mine = map(trees.trainable, (given.layers, layer))
      for _, own, got in types.leaves_cut(floats, axis_name, types.varying_axes):
        raise ValueError(
          "`layers` must be typed as equal on all workers, or compress would exchange "
          f"their means once more, got {got.str_short(True)}, which differs over "
          f"{own}; leave them out of gradcomp.defer_reduction and "
          "gradcomp.value_and_grad, and take their gradient by jax.grad."
        )
      source = scan_loop.whole_layers(axis_name)
      sends = scan_loop.mean_exchange(sending, mine, is_sum=plain)
    else:
      given = given._replace(layers=types.mark_varying(given.layers, axis_name))
      wire = wires.Wire(axis_name, forward, back, "coded", size)
      source = scan_loop.gathered_layers(wire, axis, inner)
      sends = scan_loop.owner_exchange(wire, axis, layer)
      layer = scan_loop.zeros_of_whole(layer, axis, size)
    if whole is not None:
      floats, wanted = map(trees.trainable, (whole, layer))
      _, layer = first_layer("whole", whole, axis_name)
      source = scan_loop.whole_layers(axis_name)
      want = [(length, *x.shape) for x in jax.tree.leaves(wanted)]
      got = [x.shape for x in jax.tree.leaves(floats)]
      structure: Any = jax.tree.structure
      if structure(floats) != structure(wanted) or got != want:
        raise ValueError(
          "`whole` must be a tree like `layers`, with floats of the shapes "
          f"{want}, got {got}; gather each array by gradcomp.parallel.all_gather, with "
          "axis=axis + 1."
        )
    if given.kept is not None:
      cure = scan_loop.FIRST_OF_WHOLE if axis is None else _FIRST_OF_SHARDS
      _check_residual(given.kept, sends.first(), length, cure)
    trace, result = jax.make_jaxpr(body, return_shape=True)(carry, layer)
    if not isinstance(result, tuple) or len(result) != 2:
      raise TypeError(
        f"`body` must return a pair (carry, y), as for lax.scan, got {result}."
      )
    treedef = jax.tree.structure(result)

    def with_closed(closed: Any, carry: Any, layer: Any) -> Any:
      """Runs the body as a function also of the arrays that it closes over."""
      run = jaxpr_as_fun(ClosedJaxpr(trace.jaxpr, closed))
      return jax.tree.unflatten(treedef, run(*jax.tree.leaves((carry, layer))))

    loop = scan_loop.layer_scan(with_closed, policy, axis_name, source, sends, length)
    return loop(carry, given._replace(closed=trace.consts))

  given = scan_loop.Given(None, layers, residual, words, whole)
  if plain:
    return _of_parts(of_worker, (body, carry, given), axis_name, mesh)
  return of_worker(body, carry, given)


def compress_in_scan(
  codec: codecs.LeafCodec,
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
  keeps = rule.keeps
  given: Any = {"axis_name": axis_name, "codec": codec, "exchange": exchange}
  about = LayerScan(scan, policy=policy, **given)

  def init_fn(params: Any) -> states.ScanState:
    study.note(about, *jax.tree.leaves(params))

    def first(nothing: states.CompressState) -> states.CompressState:
      way = scan_loop.layer_options(axis_name, codec, exchange, keeps=True)
      zeros = scan_loop.zeros_of(params)  # whose values do not matter
      length, layer = first_layer("layers", zeros, axis_name)
      kept = scan_loop.mean_exchange(way, layer, is_sum=False).first()
      stacked = lambda x: jnp.broadcast_to(x, (length, *x.shape))
      return _with_kept(nothing, jax.tree.map(stacked, kept), params)

    kept: Any = states.CompressState(*[None] * 4)  # type: ignore[arg-type]
    if keeps:
      unknown = "how many workers keep a residual"
      kept = specs.make_own(first, kept, axis_name, unknown)
    count = jnp.zeros([], jnp.int32)
    return states.ScanState(kept._replace(count=count, key=states.seed_words(key)))

  def update_fn(
    updates: Any, state: Any, params: Any = None, *, scan_residual: Any = None, **_: Any
  ) -> tuple[Any, states.ScanState]:
    del params
    states.check_type(state, states.ScanState)
    if study.is_followed():
      return updates, state
    if study.is_study():
      # Layer after layer, as the scan exchanges them.
      study.note(("layers", (len(jax.tree.leaves(updates)[0]),)))
      way = scan_loop.layer_options(axis_name, codec, exchange, keeps=keeps)
      tx = transform.transformation(way)

      def exchanged(given: Any) -> Any:
        grads, residual, owners = given
        own = state.layers._replace(residual=residual, server_residual=owners)
        return tx.update(grads, own)[0]

      old = state.layers.residual, state.layers.server_residual
      return lax.map(exchanged, (updates, *old)), state
    what = "gradcomp.parallel.compress_in_scan"
    require_agreement(what, told, updates, axis_name)
    for path, own, _ in types.leaves_cut(updates, axis_name, types.varying_axes):
      raise ValueError(
        f"`updates`{path} must be the mean that a scan makes, but it differs between "
        f"the workers of {own}; take the step by gradcomp.make_train_step, with a loss "
        "that calls its scan=."
      )
    if keeps and scan_residual is None:
      raise ValueError(
        "`scan_residual` must be the new residual of the scan with "
        f"{codec}, got None; take the step by gradcomp.make_train_step, and "
        "let transformations around this one pass on extra arguments."
      )
    kept = scan_residual if keeps else None
    counted = state.layers._replace(count=optax.safe_increment(state.layers.count))
    return updates, states.ScanState(_with_kept(counted, kept, updates))

  return border.any_tree(init_fn, update_fn)


class LayerScan(functools.partial[tuple[Any, Any]]):
  """:func:`scan` with its options for layers; each step has a residual and a key."""


def _with_kept(
  state: states.CompressState, kept: states.Kept | None, like: Any
) -> states.CompressState:
  """Returns a state with the residual of a scan over layers like these."""
  if kept is None:
    return state._replace(residual=None, server_residual=None)
  residual = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(kept.leaves))
  return state._replace(residual=residual, server_residual=kept.owners or None)


def _check_shards(back: Any, way: Any, axis_name: axes.AxisName, inner: Any) -> None:
  """Raises ValueError for options with which shards are not sent."""
  scan_loop.refuse_repeats(back, back, "gradient", "")
  if way != "auto":
    raise ValueError(
      "`exchange` must be left out for layers in shards, whose gradients go to their "
      f"owners, got {way!r}; leave out axis= where each worker has whole layers."
    )
  every = axes.axis_names(axis_name)
  names = inner if isinstance(inner, tuple) else (inner,)
  known = all(x in every for x in names) and len(set(names)) == len(names)
  if inner is not None and not (known and 0 < len(names) < len(every)):
    raise ValueError(
      f"`backward_axis_name` must be some of the axes {every} of `axis_name`, and not "
      f"all, got {inner!r}; name those along which the workers of one host differ, or "
      "leave it out, to gather from all workers in the backward pass, too."
    )


def first_layer(name: str, layers: Any, axis_name: axes.AxisName) -> tuple[int, Any]:
  """Returns the number of layers, and one, typed as differing between workers."""
  leaves = jax.tree.leaves(layers)
  lengths = {x.shape[0] if x.ndim else 0 for x in leaves}
  if len(lengths) != 1 or not max(lengths):
    raise ValueError(
      f"`{name}` must stack one layer or more on the first axis, the same number in "
      f"each array, got {sorted(lengths)}; stack them by jnp.stack, and leave the scan "
      "out where there are no layers."
    )
  if not any(map(trees.is_trainable, leaves)) or any(map(jnp.iscomplexobj, leaves)):
    raise TypeError(
      f"`{name}` must have arrays of real floats, and none of complex ones, got "
      f"{sorted({str(x.dtype) for x in leaves})}."
    )
  layer = jax.tree.map(lambda x: x[0], layers)
  return max(lengths), types.mark_varying(layer, axis_name)


def _check_residual(residual: Any, first: states.Kept, length: int, cure: str) -> None:
  """Raises ValueError for a residual that cannot get the new one as its cotangent."""
  want, got = jax.tree.leaves(first), jax.tree.leaves(residual)
  shapes = [(length, *x.shape) for x in want]
  same = jax.tree.structure(residual) == jax.tree.structure(first)  # type: ignore
  floats = all(x.dtype == jnp.float32 for x in got)
  if not same or not floats or [x.shape for x in got] != shapes:
    raise ValueError(
      f"`residual` must have float32 arrays of the shapes {shapes} here, got "
      f"{[jax.typeof(x).str_short() for x in got]}; {cure}"
    )
  for x, y in zip(got, want, strict=True):
    if missing := types.varying_axes(y) - types.varying_axes(x):
      raise ValueError(
        f"`residual` must differ between the workers of {sorted(missing)}, got one "
        f"typed as equal on all of them, which JAX would add up; {cure} Pass it with "
        "in_specs=P(axes)."
      )


def _of_parts(
  run: Callable[..., tuple[Any, Any]], parts: Any, axis_name: Any, mesh: Any
) -> tuple[Any, Any]:
  """Maps ``run(body, carry, given)`` over workers; ``ys`` are [L, all rows, ...]."""
  _, carry, given = parts
  names = axes.axis_names(axis_name)
  if not types.sharded_over(carry).issuperset(names):
    raise ValueError(
      f"`carry` must have an array that is sharded over {axis_name!r}, or every worker "
      f"would compute the same, got {jax.tree.map(jax.typeof, carry)}; put the batch "
      "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )
  for x in jax.tree.leaves(given.layers):
    spec = types.typed_spec(x)
    if any(axes.entries(spec)) or spec.reduced or spec.unreduced:
      raise ValueError(
        "`layers` must be typed as whole on each device in plain jax.jit, got "
        f"{jax.typeof(x).str_short(True)}; give it layers without "
        "gradcomp.defer_reduction, or shards, with axis=, in a jax.shard_map over all "
        "axes of the mesh."
      )
  arrays, with_arrays = shard_maps.arrays_of(parts)

  def own(*own: jax.Array) -> tuple[Any, Any]:
    body, carry, given = with_arrays(own)
    body = shard_maps.with_note(body, shard_maps.OF_BODY, mesh, names)
    carry, ys = run(body, carry, given)
    for y in jax.tree.leaves(ys):
      if jnp.ndim(y) < 2:
        raise ValueError(
          "`body` must return outputs y with a first axis in plain jax.jit, where "
          f"those of all workers are joined, got {jax.typeof(y[0]).str_short()}; "
          "return y[None]."
        )
    return carry, types.mark_varying(ys, axis_name)

  return jax.shard_map(
    own,
    mesh=mesh,
    in_specs=tuple(types.typed_specs(arrays, axis_name)),
    out_specs=(types.typed_specs(carry, axis_name), PartitionSpec(None, axis_name)),
    axis_names=set(names),
  )(*arrays)
