"""``scan``: layers in a loop, with gradients that travel while others are computed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from gradcomp._src.codecs.protocol import LeafCodec, is_codec, require_contraction
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback, NoFeedback
from gradcomp._src.exchange.auto import Auto, ExchangeName, as_exchange
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size
from gradcomp._src.mesh.trees import is_trainable, trainable
from gradcomp._src.mesh.types import mark_varying, varying_axes
from gradcomp._src.parallel.scan_backward import Given, LayerScan, Whole
from gradcomp._src.parallel.scan_jit import (
  check_whole,
  in_plain_jit,
  on_parts,
  scan_parts,
)
from gradcomp._src.parallel.scan_layer import Kept, LayerExchange, layer_exchange


def scan(  # noqa: PLR0913 - options of users, by keyword
  body: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  layers: Any,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  exchange: ExchangeName | Auto | Exchange = "auto",
  residual: Any = None,
  policy: Callable[..., bool] | None = None,
  key: jax.Array | None = None,
) -> tuple[Any, Any]:
  r"""Scans over layers as ``lax.scan``; their gradients come out averaged over workers.

  The backward pass computes layer after layer, from the last one on. While it computes
  layer l, the message of layer l+1 is on its way to the owners, and the means of layer
  l+2 are on theirs to all workers. An exchange of one stage has one message under way.
  So only those of the first layers wait behind the loop. With worker i's gradient
  :math:`g_{il}` of layer l, and its residual :math:`e_{il}`, the gradient of ``layers``
  is, as :func:`gradcomp.compress` has it with a message for each layer,

  .. math::
     \bar{g}_l = \frac{1}{N} \sum_i Q(g_{il} + e_{il}), \qquad
     e_{il}' = g_{il} + e_{il} - Q(g_{il} + e_{il})

  ``two_shot`` encodes the mean once more. Every worker gets the same bits: give them to
  an optimizer as they are, and exchange those of other parameters by
  :func:`gradcomp.compress`.

  In plain ``jax.jit`` under Explicit axes, a ``jax.shard_map`` over the axis runs the
  layers, on arguments sharded by their types: ``body`` sees a worker's rows of the
  carry, and those of ``ys`` are joined, ``[L, N rows, ...]``. There the loss is that of
  the whole batch, so that :math:`g_{il}` is worker i's addend, and :math:`\bar g_l` the
  sum. ``body`` must not close over arrays of the mesh, but may be a
  ``jax.tree_util.Partial``, whose arrays become arguments.

  **The new residual comes back as the cotangent of** ``residual``. So take the gradient
  with respect to the layers and the residuals together, and scan each stack once::

    means, residual = jax.grad(loss_fn, (0, 1))(layers, residual, batch)

  The forward pass saves what each layer takes from the one before it, and what
  ``policy`` says. The backward pass computes the rest again, as ``jax.checkpoint``.
  Layers in flight take the memory of their messages. A residual takes as much as the
  layers in ``float32``.

  A worker sends as many bytes as behind the loop. Whether they hide behind a layer is
  up to the compiler: see :func:`gradcomp.overlap_report`. Codecs whose workers agree on
  statistics, like ``FloatCast`` and ``Ternary``, wait for these in each layer.

  Put ``jax.vmap`` over examples inside ``body``: around a scan, each example would be
  exchanged by itself, and take the residual once more, which is an error.

  A gradient that is not finite makes at least its bucket NaN on every worker. The
  residual keeps its old value there.

  Args:
    body: ``(carry, layer) -> (carry, y)``, as for ``lax.scan``. Gradients of arrays
      that it closes over are as JAX has them: per worker, if they are typed so.
    carry: the input of the first layer, each worker's own: a tree of arrays.
    layers: a tree of arrays that stack all layers on their first axes, ``[L, ...]``,
      equal on all workers. Floats are averaged; others, like keys, have no gradient.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the gradients. Sparse codecs and ``OneBit`` need a residual.
    exchange: as of :class:`gradcomp.CompressOptions`, but for ``"local"``.
    residual: the rounding errors of earlier steps: zeros at first, see
      :func:`scan_residual`. Without one, they are dropped.
    policy: of ``jax.checkpoint``; None saves nothing but the inputs of layers.
    key: a key that all workers share, another one for each step, if the codec draws
      random numbers. Layer l folds in l.

  Returns:
    ``(carry, ys)``: the output of the last layer, and the stacked outputs of all.

  Raises:
    ValueError: the axis is neither bound nor Explicit; the codec keeps a memory, or
      needs a residual or a key that is not given; the exchange sends nothing, or the
      codec's sums refuse it; ``layers`` do not stack as many each, one or more, or are
      typed as differing between workers; the residual is another one's; a gradient is
      taken through ``jax.vmap`` over examples; or in plain ``jax.jit`` layers are
      sharded, the carry is not, or an output has no rows.
    TypeError: ``codec`` is no codec, ``body`` returns no pair, or ``layers`` have no
      real floats.

  Example:
    >>> def loss(layers, x):
    ...   layer = lambda x, w: (w * x, None)
    ...   x, _ = gradcomp.parallel.scan(
    ...     layer, x, layers, axis_name="data", codec=gradcomp.codecs.Dense())
    ...   return x
    >>> layers, x = jnp.array([2.0, 3.0]), jnp.array([1.0, 5.0])
    >>> grad = jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="data")
    >>> jax.jit(grad)(layers, x)
    Array([[9., 6.],
           [9., 6.]], dtype=float32)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """
  carry, layers = jax.tree.map(jnp.asarray, (carry, layers))
  words = jnp.zeros(2, jnp.uint32) if key is None else key_words(key)
  plain = in_plain_jit((carry, layers), axis_name)

  def of_worker(body: Any, carry: Any, given: Given) -> tuple[Any, Any]:
    options = _options(axis_name, codec, exchange, keeps=given.kept is not None)
    _check_key(codec, key)
    length, layer = first_layer("layers", given.layers, axis_name)
    _check_equal(given.layers, axis_name)
    plan = layer_exchange(options, trainable(layer), is_sum=plain)
    if given.kept is not None:
      _check_residual(given.kept, plan, length)
    function, closed = with_closed(body, carry, layer)
    given = given._replace(closed=closed)
    return LayerScan(function, policy, Whole(axis_name), plan, length)(carry, given)

  given = Given(None, layers, residual, words)
  if plain:
    return scan_parts(of_worker, body, carry, given, axis_name)
  return of_worker(body, carry, given)


def scan_residual(
  layers: Any,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  exchange: ExchangeName | Auto | Exchange = "auto",
) -> Any:
  """Returns the first residual of layers for :func:`scan`: zeros.

  Call it where the axis is bound, in a map with ``out_specs=P(axis_name)``, or in plain
  ``jax.jit``: stacked on the first axis, the residuals of all workers are global
  arrays, ``[N L, ...]``.

  Args:
    layers, axis_name, codec, exchange: as for :func:`scan`.

  Returns:
    A tree of ``float32`` arrays ``[L, ...]``: of each leaf, and of the rows of means
    that the worker owns, where the exchange has owners.

  Raises:
    ValueError, TypeError: as for :func:`scan`.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4)
    >>> zeros = lambda w: gradcomp.parallel.scan_residual(
    ...   w, axis_name="data", codec=codec, exchange="all_gather")
    >>> residuals = jax.vmap(zeros, axis_name="data")(jnp.ones((2, 3, 8, 64)))
    >>> residuals.leaves[0].shape
    (2, 3, 8, 64)
  """
  layers = jax.tree.map(jnp.asarray, layers)

  def of_worker(layers: Any) -> Kept:
    options = _options(axis_name, codec, exchange, keeps=True)
    length, layer = first_layer("layers", layers, axis_name)
    zeros = layer_exchange(options, trainable(layer)).first()
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), zeros)

  if not in_plain_jit(layers, axis_name):
    return of_worker(layers)
  check_whole(layers)
  return on_parts(of_worker, (layers,), axis_name, PartitionSpec(axis_name))


def _options(
  axis_name: AxisName, codec: Any, exchange: Any, *, keeps: bool
) -> Compression:
  """Returns the options of the exchange of a layer; an error for bad ones."""
  require_size(axis_name)
  if not is_codec(codec):
    raise TypeError(
      f"`codec` must be a codec of gradcomp.codecs, got {codec!r}; "
      "gradcomp.codecs.Dense() sends float32."
    )
  if not keeps and (codec.facts.needs_feedback or codec.facts.drops):
    raise ValueError(
      "`codec` must send every element, and work without error feedback, where "
      f"`residual` is None, got {codec}; start with gradcomp.parallel.scan_residual."
    )
  if keeps:
    require_contraction("codec", codec, "`residual=None`")
  way = as_exchange(exchange)
  if not way.sends:
    raise ValueError(
      "`exchange` must send gradients, or there is nothing to hide, got "
      f"{way.name!r}; use lax.scan, and gradcomp.compress behind it."
    )
  feedback = ErrorFeedback() if keeps else NoFeedback()
  return Compression(codec, axis_name, way, feedback, None, None, 0, "shared")


def _check_key(codec: LeafCodec, key: jax.Array | None) -> None:
  if codec.needs_key and key is None:
    raise ValueError(
      f"`key` must be given for {codec}, which draws random numbers: pass a "
      "jax.random.key that all workers share, another one for each step."
    )


def first_layer(name: str, layers: Any, axis_name: AxisName) -> tuple[int, Any]:
  """Returns the number of layers, and one, typed as differing between workers."""
  leaves = jax.tree.leaves(layers)
  lengths = {x.shape[0] if x.ndim else 0 for x in leaves}
  if len(lengths) != 1 or not max(lengths):
    raise ValueError(
      f"`{name}` must stack one layer or more on the first axis, the same number in "
      f"each array, got {sorted(lengths)}; stack them by jnp.stack, and leave the scan "
      "out where there are no layers."
    )
  if not any(map(is_trainable, leaves)) or any(map(jnp.iscomplexobj, leaves)):
    raise TypeError(
      f"`{name}` must have arrays of real floats, and none of complex ones, got "
      f"{sorted({str(x.dtype) for x in leaves})}."
    )
  layer = jax.tree.map(lambda x: x[0], layers)
  return max(lengths), mark_varying(layer, axis_name)


def _check_equal(layers: Any, axis_name: AxisName) -> None:
  """Raises ValueError for layers that are typed as differing between workers."""
  names = set(axis_names(axis_name))
  for x in jax.tree.leaves(trainable(layers)):
    if own := names & varying_axes(x):
      raise ValueError(
        "`layers` must be typed as equal on all workers, or compress would exchange "
        f"their means once more, got {jax.typeof(x).str_short(True)}, which differs "
        f"over {sorted(own)}; leave them out of gradcomp.defer_reduction and "
        "gradcomp.value_and_grad, and take their gradient by jax.grad."
      )


def _check_residual(residual: Any, plan: LayerExchange, length: int) -> None:
  """Raises ValueError for a residual that cannot get the new one as its cotangent."""
  want: Any = jax.eval_shape(plan.first)
  structure: Any = jax.tree.structure
  shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
  stacked = [(length, *shape) for shape in shapes(want)]
  cure = (
    "start with gradcomp.parallel.scan_residual(layers, ...) of the same options, "
    "in the map if there is one."
  )
  same = structure(residual) == structure(want)
  if not isinstance(residual, Kept) or not same or shapes(residual) != stacked:
    raise ValueError(
      f"`residual` must have arrays of the shapes {stacked} here, got "
      f"{shapes(residual)}; {cure}"
    )
  for x, y in zip(
    jax.tree.leaves(residual), jax.tree.leaves(plan.first()), strict=True
  ):
    missing = varying_axes(y) - varying_axes(x)
    if missing or x.dtype != jnp.float32:
      raise ValueError(
        "`residual` must be float32, and differ between the workers of "
        f"{sorted(varying_axes(y))}, got {x.dtype} that is typed as equal over "
        f"{sorted(missing)}; {cure} Pass it with in_specs=P(axes)."
      )


def with_closed(
  body: Callable[[Any, Any], Any], carry: Any, layer: Any
) -> tuple[Callable[..., Any], list[Any]]:
  """Returns the body as a function also of the arrays that it closes over."""
  trace, result = jax.make_jaxpr(body, return_shape=True)(carry, layer)
  if not isinstance(result, tuple) or len(result) != 2:
    raise TypeError(
      f"`body` must return a pair (carry, y), as for lax.scan, got {result}."
    )
  treedef = jax.tree.structure(result)

  def of_all(closed: Any, carry: Any, layer: Any) -> Any:
    run = jaxpr_as_fun(ClosedJaxpr(trace.jaxpr, closed))
    return jax.tree.unflatten(treedef, run(*jax.tree.leaves((carry, layer))))

  return of_all, trace.consts
