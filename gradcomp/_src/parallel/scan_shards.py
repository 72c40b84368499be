"""Layers in shards: their source, and the exchange that ends at their owners."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums import tiles
from gradcomp._src.core.state import Kept
from gradcomp._src.exchange import collectives
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import axes, trees
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan_loop import Exchange, Source, like

Leaves = Sequence[jax.Array]


def gathered_layers(wire: Wire, axis: int, inner: AxisName | None) -> Source:
  """The source of layers in shards; workers along ``inner`` keep a layer's words.

  So the backward pass asks nobody else; None keeps none, and asks all.
  """

  def ask(given: Any, key: jax.Array) -> list[jax.Array]:
    leaves = jax.tree.leaves(trees.trainable(given))
    send = lambda i, x: transport.gather_lines(x, wire, threefry.fold_key(key, i))
    return [send(i, x) for i, x in enumerate(leaves)]

  def keep(asked: Leaves) -> Leaves | None:
    if inner is None:
      return None
    count, worker = axes.require_size(inner), lax.axis_index(inner)
    shares = [x.reshape(count, -1, *x.shape[1:]) for x in asked]
    return [lax.dynamic_index_in_dim(x, worker, keepdims=False) for x in shares]

  def again(given: Any, kept: Leaves | None, key: jax.Array) -> Leaves:
    if inner is None or kept is None:
      return ask(given, key)
    result = []
    for share, shard in zip(kept, jax.tree.leaves(trees.trainable(given)), strict=True):
      name = collectives.as_floats(len(share) * shard.size, inner)
      shares = collectives.gather(share, inner, name, axis=1)
      result.append(shares.reshape(-1, *share.shape[1:]))
    return result

  def layer(given: Any, asked: Leaves) -> Any:
    mine, others = trees.split(given)
    shards, treedef = jax.tree.flatten(mine)
    at = lambda x: options.checked_axis("axis", axis, x.ndim)
    pairs = zip(asked, shards, strict=True)
    whole = [transport.joined(x, wire, y, at(y)) for x, y in pairs]
    return trees.combine(jax.tree.unflatten(treedef, whole), others)

  return Source(1, ask, keep, again, layer)


def zeros_of_whole(layer: Any, axis: int, size: int) -> Any:
  """Returns zeros in place of a whole layer, of its shapes and types, by its shards."""

  def zeros(x: jax.Array) -> jax.Array:
    at = options.checked_axis("axis", axis, x.ndim)
    shape = *x.shape[:at], x.shape[at] * size, *x.shape[at + 1 :]
    return like(jnp.zeros(shape, x.dtype), x)

  mine, others = trees.split(layer)
  return trees.combine(jax.tree.map(zeros, mine), others)


class Parts(NamedTuple):
  """The parts of a gradient on their way to the owners."""

  lines: jax.Array  # as they are sent, or have come
  own: jax.Array  # the part that stays, float32


def owner_exchange(wire: Wire, axis: int, layer: Any) -> Exchange:
  """The exchange that sends each part of a layer's gradient to its owner."""
  wire = dataclasses.replace(wire.reversed, own="exact")  # which is not sent
  shards = jax.tree.leaves(trees.trainable(layer))
  at = lambda x: options.checked_axis("axis", axis, x.ndim)

  def first() -> Kept:
    whole = zeros_of_whole(shards, axis, wire.size)
    return Kept([x.astype(jnp.float32) for x in whole], {})

  def begin(
    grads: Leaves, kept: Kept | None, key: jax.Array
  ) -> tuple[list[Parts], list[jax.Array]]:
    begun, lost = [], []
    worker = lax.axis_index(wire.axis_name)
    for i, grad in enumerate(grads):
      sent = grad.astype(jnp.float32)
      if kept is not None:
        sent = sent + kept.leaves[i]
      # As the backward pass of a gather.
      own = options.folded(threefry.fold_key(key, i), 1)
      parts = transport.split_parts(sent, at(grad), wire.size)
      lines = transport.to_lines(parts, wire, own)
      begun.append(Parts(lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        lost.append(transport.concat(transport.loss_of(parts, wire, own), at(grad)))
    return begun, lost

  def advance(messages: Sequence[Parts], age: int) -> list[Parts]:
    del age  # there is one stage
    send = lambda x: collectives.scatter(
      x.lines, wire.axis_name, wire.size * x.own.size
    )
    return [x._replace(lines=send(x)) for x in messages]

  def finish(
    messages: Sequence[Parts], lost: Leaves, old: Kept | None
  ) -> tuple[list[jax.Array], Kept | None]:
    sums, kept = [], []
    for i, ((lines, own), shard) in enumerate(zip(messages, shards, strict=True)):
      came = transport.arrived(lines, wire, own)
      total = tiles.sum_in_order(lambda part: part, came)
      if old is None:
        sums.append(fitted(total, shard.dtype))
        continue
      unsent = transport.split_parts(lost[i], at(total), wire.size)
      given = total, unsent, shard.dtype, wire, at(total)
      narrow, unsent = transport.narrowed_parts(*given)
      sums.append(narrow)
      kept.append(jnp.where(jnp.isfinite(unsent), unsent, old.leaves[i]))
    return sums, None if old is None else Kept(kept, {})

  return Exchange(1, first, begin, advance, finish)
