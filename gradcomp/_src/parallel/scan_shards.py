"""``scan_shards``: layers of FSDP in a loop, each gathered while another computes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.policy import stateless
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size
from gradcomp._src.mesh.trees import trainable
from gradcomp._src.mesh.types import is_typed, mark_varying, varying_axes
from gradcomp._src.parallel import options
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan import first_layer, with_closed
from gradcomp._src.parallel.scan_backward import Given, LayerScan, Source, Whole
from gradcomp._src.parallel.scan_gathered import Gathered, whole_shape
from gradcomp._src.parallel.scan_layer import Kept
from gradcomp._src.parallel.scan_owners import Owners

Shape = tuple[int, ...]


def scan_shards(  # noqa: PLR0913 - options of users, by keyword
  body: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  shards: Any,
  *,
  axis_name: AxisName,
  params: LeafCodec | None,
  grads: LeafCodec | None,
  residual: Any = None,
  whole: Any = None,
  backward_axis_name: AxisName | None = None,
  axis: int = 0,
  policy: Callable[..., bool] | None = None,
  key: jax.Array | None = None,
) -> tuple[Any, Any]:
  r"""Scans over layers of FSDP; each is gathered while the one before it computes.

  It is ``lax.scan`` with :func:`gather` of each array in a ``jax.checkpoint`` of the
  body, and has its values and gradients. Worker d has the shard :math:`w_{ld}` of layer
  l. The body gets the whole layer, and worker i its gradient :math:`g_{il}`, of which
  part d goes to worker d. With its residual :math:`e_{il}`,

  .. math::
     w_l = [Q_w(w_{l0}), \ldots, Q_w(w_{l,N-1})], \qquad
     \bar{w}_{ld} = \sum_{i=0}^{N-1} Q_g((g_{il} + e_{il})[d])

  While layer l computes, the encoded shards of layer l+1 come. In the backward pass
  those of layer l-1 come, while the gradient of layer l+1 goes to its owners. A layer
  under way takes the memory of its payloads. The backward pass starts with the layer
  that the forward pass ended with, and does not gather it again. So of L layers a
  worker sends ``(2 L - 1) (N-1) c_w`` bytes of shards and ``L (N-1) c_g`` of gradients,
  where c are the bytes of the payload of a shard. Whether these hide behind a layer is
  up to the compiler: see :func:`gradcomp.overlap_report`.

  **The new residual comes back as the cotangent of** ``residual``, as with
  :func:`gather`. The gradients are sums over the workers, too: divide the loss of each
  worker by N for means.

  **Hosts with several chips** (hpZ of ZeRO++). With ``backward_axis_name``, the n chips
  of a host keep the words of each layer that came, an nth each, and the backward pass
  gathers these inside the host: it sends no weights between hosts. They are the words
  that the forward pass decoded, so that gradients keep their bits, where ZeRO++ encodes
  once more. The copy takes ``(L-1) N c_w / n`` bytes of a worker until its backward
  pass is over.

  **Workers that have all layers** (ZeRO 1 and 2). With ``whole``, nobody gathers: the
  body reads these layers, and only gradients travel, ``L (N-1) c_g`` bytes. They are
  the gradients of ``shards``, whose values are not read. ``whole`` counts as constant:
  its own gradient is zero.

  Put ``jax.vmap`` over examples inside ``body``: around a scan, each example would be
  exchanged by itself, and take the residual once more, which is an error.

  Args:
    body: ``(carry, layer) -> (carry, y)``, as for ``lax.scan``, of whole layers.
    carry: the input of the first layer, each worker's own: a tree of arrays.
    shards: a tree of this worker's shards, which stack all layers on their first axes,
      ``[L, ...]``. Arrays without floats, like keys, are no shards, but given whole.
    axis_name, params, grads: as for :func:`gather`.
    residual: a tree like the floats of ``shards``: zeros at first, of each array
      ``gather_residual(w, axis_name=axis_name, axis=axis + 1)``, or a negative axis.
    whole: a tree like ``shards`` of whole layers, ``[L, ...]``, perhaps of another
      float dtype, which this worker has already; ``params`` is None then.
    backward_axis_name: some of the axes of ``axis_name``, and not all: along them the
      workers of one host differ.
    axis: the array axis of a layer along which each array is sharded.
    policy: of ``jax.checkpoint``; None saves nothing but the inputs of layers.
    key: a key that all workers share, another one for each step, if a codec draws
      random numbers. Layer l folds in l, and then its arrays their numbers.

  Returns:
    ``(carry, ys)``: the output of the last layer, and the stacked outputs of all.

  Raises:
    ValueError: as :func:`gather`; or ``shards`` do not stack as many layers each, or
      ``whole`` or ``backward_axis_name`` is not as above.
    TypeError: ``body`` returns no pair, ``shards`` have no real floats, or a codec is
      none.

  Example:
    >>> def loss(shards, x):
    ...   layer = lambda x, w: (jnp.dot(w, x) * x, None)
    ...   x, _ = gradcomp.parallel.scan_shards(
    ...     layer, x, shards, axis_name="data", params=None, grads=None)
    ...   return jnp.sum(x)
    >>> shards, x = jnp.ones((2, 3, 1)), jnp.array([[1.0, 2.0], [0.0, 1.0]])
    >>> jax.jit(jax.vmap(jax.grad(loss), axis_name="data"))(shards, x).shape
    (2, 3, 1)

  References:
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023, section 3.3;
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020, section 5;
    Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023, section 3.2
  """
  size = require_size(axis_name)
  forward = Dense() if params is None else stateless("params", params)
  corrected = residual is not None
  back = Dense() if grads is None else stateless("grads", grads, corrected=corrected)
  if back.fallback is not None:
    raise ValueError(
      "`grads` must send any numbers at once, because a scan sends no gradient again, "
      f"got {back}; choose Dense(dtype=jnp.bfloat16)."
    )
  words = options.checked_key(key, forward, back)
  carry, shards = jax.tree.map(jnp.asarray, (carry, shards))
  length, layer = first_layer("shards", shards, axis_name)
  leaves = jax.tree.leaves(trainable(layer))
  shapes = [whole_shape(x.shape, axis, size) for x in leaves]
  kept = None if residual is None else _kept(residual, shards, shapes, axis_name)
  wire = Wire(axis_name, forward, back, "coded", size)
  source: Source
  if whole is None:
    _check_inner(backward_axis_name, axis_name)
    source = Gathered(wire, axis, backward_axis_name)
    first = source.like(layer)
  else:
    _check_nothing_gathered(params, backward_axis_name)
    whole = jax.tree.map(jnp.asarray, whole)
    first = _first_whole(whole, shards, shapes, axis_name)
    source = Whole(axis_name)
  function, closed = with_closed(body, carry, first)
  words = jnp.zeros(2, jnp.uint32) if words is None else words
  given = Given(closed, mark_varying(shards, axis_name), kept, words, whole)
  back_wire = Wire(axis_name, back, forward, "exact", size)
  owners = Owners(back_wire, axis, [x.dtype for x in leaves])
  return LayerScan(function, policy, source, owners, length)(carry, given)


def _check_inner(inner: AxisName | None, axis_name: AxisName) -> None:
  """Raises ValueError unless the axes are some of the workers' axes, or None."""
  if inner is None:
    return
  every, names = axis_names(axis_name), inner if isinstance(inner, tuple) else (inner,)
  known = all(x in every for x in names) and len(set(names)) == len(names)
  if not known or not 0 < len(names) < len(every):
    raise ValueError(
      f"`backward_axis_name` must be some of the axes {every} of `axis_name`, and not "
      f"all, got {inner!r}; name those along which the workers of one host differ, or "
      "leave it out, to gather from all workers in the backward pass, too."
    )


def _check_nothing_gathered(params: Any, inner: AxisName | None) -> None:
  """Raises ValueError for options that say how layers are gathered."""
  given = {"params": params, "backward_axis_name": inner}
  for name, value in given.items():
    if value is not None:
      raise ValueError(
        f"`{name}` must be None with `whole`, of which nothing is gathered, got "
        f"{value!r}; encode the layers where you gather them, by "
        "gradcomp.parallel.all_gather."
      )


def _first_whole(
  whole: Any, shards: Any, shapes: Sequence[Shape], axis_name: AxisName
) -> Any:
  """Returns the first of whole layers; ValueError if they do not fit the shards."""
  _, first = first_layer("whole", whole, axis_name)
  of_shards, mine = trainable(shards), trainable(whole)
  want = [(len(jax.tree.leaves(of_shards)[0]), *shape) for shape in shapes]
  got = [x.shape for x in jax.tree.leaves(mine)]
  structure: Any = jax.tree.structure
  if structure(mine) != structure(of_shards) or got != want:
    raise ValueError(
      f"`whole` must be a tree like `shards`, with floats of the shapes {want}, got "
      f"{got}; gather each array by gradcomp.parallel.all_gather, with axis=axis + 1."
    )
  return first


def _kept(
  residual: Any, shards: Any, shapes: Sequence[Shape], axis_name: AxisName
) -> Kept:
  """Returns the residuals of all layers; ValueError if they fit other layers."""
  leaves, mine = jax.tree.leaves(residual), jax.tree.leaves(trainable(shards))
  want = [(len(x), *shape) for x, shape in zip(mine, shapes, strict=True)]
  cure = (
    "start with gradcomp.parallel.gather_residual of each array, with axis=axis + 1."
  )
  if [x.shape for x in leaves] != want or any(x.dtype != jnp.float32 for x in leaves):
    raise ValueError(
      f"`residual` must have float32 arrays of the shapes {want}, got "
      f"{[jax.typeof(x).str_short() for x in leaves]}; {cure}"
    )
  own = axis_names(axis_name) if is_typed(axis_name) else ()
  for x, shard in zip(leaves, mine, strict=True):
    missing = varying_axes(shard).union(own) - varying_axes(x)
    if missing:
      raise ValueError(
        f"`residual` must differ between the workers of {sorted(missing)}, or JAX adds "
        "up what they keep, got an array that is typed as equal on all of them; "
        f"{cure} Pass it with in_specs=P(axes)."
      )
  return Kept(leaves, {})
