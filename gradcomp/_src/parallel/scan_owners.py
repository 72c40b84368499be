"""The exchange of a layer's gradient that ends at the owners of its shards."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums.tiles import sum_in_order
from gradcomp._src.exchange.collectives import scatter
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan_layer import Kept, Leaves


class Parts(NamedTuple):
  """The parts of a gradient on their way to the owners."""

  lines: jax.Array  # as they are sent, or have come
  own: jax.Array  # the part that stays, float32


@dataclasses.dataclass(frozen=True, eq=False)
class Owners:
  """The exchange of gradients of layers that sends each shard to its owner.

  ``wire`` is that of gradients, on which a worker's own part stays exact. ``dtypes``
  are those of the shards, leaf by leaf.
  """

  wire: Wire
  axis: int
  dtypes: Sequence[Any]

  @property
  def depth(self) -> int:
    return 1

  def begin(
    self, grads: Leaves, kept: Kept | None, key: jax.Array
  ) -> tuple[list[Parts], Leaves]:
    begun, lost = [], []
    worker = lax.axis_index(self.wire.axis_name)
    for i, grad in enumerate(grads):
      sent = grad.astype(jnp.float32)
      if kept is not None:
        sent = sent + kept.leaves[i]
      own = options.folded(fold_key(key, i), 1)  # as the backward pass of a gather
      parts = transport.split_parts(sent, self._axis(grad), self.wire.size)
      lines = transport.to_lines(parts, self.wire, own)
      begun.append(Parts(lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        unsent = transport.loss_of(parts, self.wire, own)
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
      came = transport.arrived(lines, self.wire, own)
      total = sum_in_order(lambda part: part, came)
      if old is None:
        sums.append(fitted(total, dtype))
        continue
      axis = self._axis(total)
      unsent = transport.split_parts(lost[i], axis, self.wire.size)
      narrow, unsent = transport.narrowed_parts(total, unsent, dtype, self.wire, axis)
      sums.append(narrow)
      kept.append(jnp.where(jnp.isfinite(unsent), unsent, old.leaves[i]))
    return sums, None if old is None else Kept(kept, {})

  def _axis(self, x: jax.Array) -> int:
    return options.checked_axis("axis", self.axis, x.ndim)
