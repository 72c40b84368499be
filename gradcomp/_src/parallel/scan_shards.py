"""``scan_shards``: layers of FSDP in a loop, each gathered while another computes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.policy import stateless
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.tiles import sum_in_order
from gradcomp._src.exchange.collectives import scatter
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size
from gradcomp._src.mesh.trees import combine, split, trainable
from gradcomp._src.mesh.types import is_typed, mark_varying, varying_axes
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import Key, Wire
from gradcomp._src.parallel.scan import first_layer, with_closed
from gradcomp._src.parallel.scan_backward import Given, LayerScan, like
from gradcomp._src.parallel.scan_layer import Kept, Leaves


def scan_shards(  # noqa: PLR0913 - options of users, by keyword
  body: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  shards: Any,
  *,
  axis_name: AxisName,
  params: LeafCodec | None,
  grads: LeafCodec | None,
  residual: Any = None,
  axis: int = 0,
  policy: Callable[..., bool] | None = None,
  key: jax.Array | None = None,
) -> tuple[Any, Any]:
  """Scans over layers of FSDP; each is gathered while the one before it computes.

  It is ``lax.scan`` with :func:`gather` of each array in a ``jax.checkpoint`` of the
  body, and has its values and gradients. But while layer l computes, the encoded shards
  of layer l+1 come, and in the backward pass those of layer l-1, while the gradient of
  layer l+1 goes to its owners. A layer under way takes the memory of its payloads.

  The backward pass starts with the layer that the forward pass ended with, and does not
  gather it again: of L layers, ``2 L - 1`` are sent. Whether these hide behind a layer
  is up to the compiler: see :func:`gradcomp.overlap_report`.

  **The new residual comes back as the cotangent of** ``residual``, as with
  :func:`gather`. The gradients are sums over the workers, too: divide the loss of each
  worker by N for means.

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
    axis: the array axis of a layer along which each array is sharded.
    policy: of ``jax.checkpoint``; None saves nothing but the inputs of layers.
    key: a key that all workers share, another one for each step, if a codec draws
      random numbers. Layer l folds in l, and then its arrays their numbers.

  Returns:
    ``(carry, ys)``: the output of the last layer, and the stacked outputs of all.

  Raises:
    ValueError: as :func:`gather`; or ``shards`` do not stack as many layers each.
    TypeError: ``body`` returns no pair, ``shards`` have no real floats, or a codec is
      none.

  Example:
    >>> def loss(shards, x):
    ...   layer = lambda x, w: (jnp.dot(w, x) * x, None)
    ...   x, _ = gradcomp.parallel.scan_shards(
    ...     layer, x, shards, axis_name="data", params=None, grads=None)
    ...   return jnp.sum(x)
    >>> shards, x = jnp.ones((2, 3, 1)), jnp.array([[1.0, 2.0], [0.0, 1.0]])
    >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, x).shape
    (2, 3, 1)

  References:
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023, section 3.3
  """
  size = require_size(axis_name)
  forward = Dense() if params is None else stateless("params", params)
  corrected = residual is not None
  back = Dense() if grads is None else stateless("grads", grads, corrected=corrected)
  wire = Wire(axis_name, forward, back, "coded", size)
  words = options.checked_key(key, forward, back)
  carry, shards = jax.tree.map(jnp.asarray, (carry, shards))
  length, layer = first_layer("shards", shards, axis_name)
  leaves = jax.tree.leaves(trainable(layer))
  source = Shards(wire, axis, [x.shape for x in leaves], [x.dtype for x in leaves])
  kept = None if residual is None else _kept(residual, source, length)
  function, closed = with_closed(body, carry, source.like(layer))
  words = jnp.zeros(2, jnp.uint32) if words is None else words
  shards = mark_varying(shards, axis_name)
  given = Given(closed, shards, kept, words)
  return LayerScan(function, policy, source, source, length)(carry, given)


class Parts(NamedTuple):
  """The parts of a gradient on their way to the owners."""

  lines: jax.Array  # as they are sent, or have come
  own: jax.Array  # the part that stays, float32


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
  """The source and the exchange of layers that are sharded over the workers.

  ``shapes`` and ``dtypes`` are those of the shards, leaf by leaf.
  """

  wire: Wire
  axis: int
  shapes: Sequence[tuple[int, ...]]
  dtypes: Sequence[Any]

  ahead: ClassVar[int] = 1

  @property
  def axis_name(self) -> AxisName:
    return self.wire.axis_name

  @property
  def depth(self) -> int:
    return 1

  def ask(self, given: Any, key: jax.Array) -> list[jax.Array]:
    leaves = jax.tree.leaves(trainable(given))
    pairs = zip(leaves, self._keys(key), strict=True)
    return [transport.gather_lines(x, self.wire, own) for x, own in pairs]

  def layer(self, given: Any, asked: Sequence[jax.Array]) -> Any:
    mine, others = split(given)
    shards, treedef = jax.tree.flatten(mine)
    pairs = zip(asked, shards, strict=True)
    whole = [transport.joined(x, self.wire, y, self._axis(y)) for x, y in pairs]
    return combine(jax.tree.unflatten(treedef, whole), others)

  def begin(
    self, grads: Leaves, kept: Kept | None, key: jax.Array
  ) -> tuple[list[Parts], Leaves]:
    begun, lost = [], []
    worker = lax.axis_index(self.wire.axis_name)
    for i, (grad, own) in enumerate(zip(grads, self._keys(key), strict=True)):
      sent = grad.astype(jnp.float32)
      if kept is not None:
        sent = sent + kept.leaves[i]
      own = options.folded(own, 1)
      parts = transport.split_parts(sent, self._axis(grad), self.wire.size)
      lines = transport.to_lines(parts, self._back, own)
      begun.append(Parts(lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        unsent = transport.loss_of(parts, self._back, own)
        lost.append(transport.concat(unsent, self._axis(grad)))
    return begun, lost

  def advance(self, messages: Sequence[Parts], age: int) -> list[Parts]:
    send = lambda x: scatter(x.lines, self.wire.axis_name, self.wire.size * x.own.size)
    return [x._replace(lines=send(x)) for x in messages]

  def finish(
    self, messages: Sequence[Parts], lost: Leaves, old: Kept | None
  ) -> tuple[Leaves, Kept | None]:
    sums, kept = [], []
    for i, ((lines, own), dtype) in enumerate(zip(messages, self.dtypes, strict=True)):
      came = transport.arrived(lines, self._back, own)
      total = sum_in_order(lambda part: part, came)
      if old is None:
        sums.append(total.astype(dtype))
        continue
      axis = self._axis(total)
      unsent = transport.split_parts(lost[i], axis, self.wire.size)
      narrow, unsent = transport.narrowed_parts(total, unsent, dtype, self._back, axis)
      sums.append(narrow)
      kept.append(jnp.where(jnp.isfinite(unsent), unsent, old.leaves[i]))
    return sums, None if old is None else Kept(kept, {})

  def like(self, given: Any) -> Any:
    """Returns zeros in place of a whole layer, of its shapes and types."""
    mine, others = split(given)
    zeros = lambda x: like(jnp.zeros(self.whole(x.shape), x.dtype), x)
    return combine(jax.tree.map(zeros, mine), others)

  def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array of a layer, by the shape of its shard."""
    axis = options.checked_axis("axis", self.axis, len(shape))
    return (*shape[:axis], shape[axis] * self.wire.size, *shape[axis + 1 :])

  @property
  def _back(self) -> Wire:
    return dataclasses.replace(self.wire.reversed, own="exact")

  def _keys(self, key: jax.Array) -> list[Key]:
    return [fold_key(key, i) for i in range(len(self.shapes))]

  def _axis(self, x: jax.Array) -> int:
    return options.checked_axis("axis", self.axis, x.ndim)


def _kept(residual: Any, source: Shards, length: int) -> Kept:
  """Returns the residuals of all layers; ValueError if they fit other layers."""
  leaves = jax.tree.leaves(residual)
  want = [(length, *source.whole(shape)) for shape in source.shapes]
  names = set(axis_names(source.wire.axis_name))
  typed = is_typed(source.wire.axis_name)
  apart = all(varying_axes(x) >= names for x in leaves) or not typed
  good = all(x.dtype == jnp.float32 for x in leaves) and apart
  if [x.shape for x in leaves] != want or not good:
    raise ValueError(
      f"`residual` must have float32 arrays of the shapes {want}, which differ between "
      f"workers, got {[jax.typeof(x).str_short() for x in leaves]}; start with "
      "gradcomp.parallel.gather_residual of each array, with axis=axis + 1, and pass "
      "them with in_specs=P(axes)."
    )
  return Kept(leaves, {})
