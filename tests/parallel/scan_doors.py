"""A scan over layers by each door of ``table_scans``, and with its exchanges in turn.

Functions take a row of the table, and the arrays of one worker.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.kernels.common.threefry import fold_key, key_words
from gradcomp.codecs import Dense
from tests.support.cases.scan import KEY, body, layers_of, loss_of


class Result(NamedTuple):
  """What a scan has; of all workers ``[N, ...]``."""

  values: Any  # the last carry, and the outputs of all layers
  x: Any  # the gradient of the first carry
  layers: Any  # the means of layers, or the sums of a worker's rows
  kept: list[Any]  # the new residuals of the leaves
  owners: Any = ()


def layers_at(row):
  """The layers that a worker has: over the axis "model" others, where it has one."""
  layers = jax.tree.map(jnp.asarray, layers_of(row.length, row.dtype))
  if "model" not in dict(row.axes):
    return layers
  return jax.tree.map(lambda x: x * (1 + lax.axis_index("model")), layers)


def old_of(row, shards):
  """Residuals that are not zero, of numbers that sums do not round."""
  if not row.keeps:
    return None
  if row.door == "scan":
    zeros = parallel.scan_residual(layers_at(row), **row.options)
  else:
    one = lambda w: parallel.gather_residual(w, axis_name=row.axis_name, axis=1)
    zeros = jax.tree.map(one, shards)
  own = lax.axis_index(row.axis_name)
  wave = lambda x: (jnp.arange(x.size) * (3 + own) % 17 - 8).reshape(x.shape) / 64
  return jax.tree.map(lambda x: x + wave(x).astype(jnp.float32), zeros)


def by_gradient(scan, x, weights, given, old):
  """The result of a scan whose backward pass exchanges."""

  def loss(x, given, old):
    values = scan(x, given, old)
    return loss_of(values, weights), values

  (of_x, means, new), values = jax.grad(loss, (0, 1, 2), has_aux=True)(x, given, old)
  if isinstance(new, tuple):  # of workers, and of owners
    return Result(values, of_x, means, new.leaves, new.owners)
  return Result(values, of_x, means, jax.tree.leaves(new))


def door_of(row, x, weights, shards, old):
  given = dict(key=KEY, **row.options)
  if row.door == "scan":
    scan = lambda x, w, e: parallel.scan(body, x, w, residual=e, **given)
    return by_gradient(scan, x, weights, layers_at(row), old)
  if row.door == "copy":
    given |= dict(backward_axis_name=row.inner)
  if row.door == "whole":
    given |= dict(whole=layers_at(row))
  scan = lambda x, w, e: parallel.scan_shards(body, x, w, residual=e, **given)
  return by_gradient(scan, x, weights, shards, old)


def plain(row, x, weights):
  """Values and gradients of each worker by ``lax.scan``, which nothing encodes."""
  own = gradcomp.defer_reduction(layers_at(row), axis_name=row.axis_name)

  def loss(x, own):
    values = lax.scan(body, x, own)
    return loss_of(values, weights), values

  return jax.grad(loss, (0, 1), has_aux=True)(x, own)


def turn_of(row, x, weights, shards):
  """The same with an exchange of each layer in turn."""
  old = old_of(row, shards)
  (of_x, grads), values = plain(row, x, weights)
  match row.door:
    case "scan":
      result = Result(values, of_x, *averaged(row, grads, old))
    case "whole":
      result = Result(values, of_x, *scattered(row, grads, shards, old))
    case "shards":
      result = by_gradient(gathering(row), x, weights, shards, old)
    case "copy":
      given = dict(key=KEY, **row.options)
      scan = lambda x, w, e: parallel.scan_shards(body, x, w, residual=e, **given)
      result = by_gradient(scan, x, weights, shards, old)
  return result, grads, old


def numbered(row):
  return jnp.arange(row.length, dtype=jnp.int32)


def averaged(row, grads, residual):
  """``(means, residuals of leaves, of owners)`` by a message for each layer."""
  options = row.options
  if not row.keeps:  # nor do owners keep anything
    exchange = as_exchange(options["exchange"])
    if exchange.keeps:
      exchange = dataclasses.replace(exchange, feedback=False)
    options |= dict(exchange=exchange)
  feedback = "error" if row.keeps else None
  one = gradcomp.compress(message_bytes=None, feedback=feedback, **options)

  def exchanged(given):
    number, grads, residual = given
    state = one.init(grads)._replace(key=fold_key(key_words(KEY), number))
    if residual is not None:
      own = jax.tree.unflatten(jax.tree.structure(grads), residual.leaves)
      state = state._replace(residual=own, server_residual=residual.owners or None)
    means, state = one.update(grads, state)
    owners = state.server_residual or {}
    return means, jax.tree.leaves(state.residual), owners if row.keeps else ()

  return lax.map(exchanged, (numbered(row), grads, residual))


def wrapped(words):
  return jax.random.wrap_key_data(words, impl="threefry2x32")


def gathering(row):
  """A scan with a gather of each array in its loop."""

  @jax.checkpoint
  def layer(x, given):
    number, shards, residual = given
    own, every = fold_key(key_words(KEY), number), {}
    for i, name in enumerate(sorted(shards)):
      left = None if residual is None else residual[name]
      given = dict(residual=left, key=wrapped(fold_key(own, i)), **row.options)
      every[name] = parallel.gather(shards[name], **given)
    return body(x, every)

  return lambda x, shards, old: lax.scan(layer, x, (numbered(row), shards, old))


def scattered(row, grads, shards, residual):
  """A worker's rows of layers, and its residuals, by a reduction of each array."""
  axis_name, codec = row.axis_name, row.options["grads"]

  def rows_of(grad, shard, residual, words):
    if residual is None:
      own = dict(codec=codec or Dense(), key=wrapped(fold_key(words, 1)))
      return parallel.psum_scatter(grad, axis_name=axis_name, **own), ()
    given = dict(axis_name=axis_name, params=None, grads=codec, key=wrapped(words))
    gather = lambda w, e: parallel.gather(w, residual=e, **given)
    return jax.vjp(gather, shard, residual)[1](grad)

  def of_layer(given):
    number, grads, shards, residual = given
    words = fold_key(key_words(KEY), number)
    found = {}
    for i, name in enumerate(sorted(grads)):
      old = None if residual is None else residual[name]
      grad = grads[name].astype(jnp.float32)
      found[name] = rows_of(grad, shards[name], old, fold_key(words, i))
    new = [x for _, x in found.values()]
    return {name: x for name, (x, _) in found.items()}, new if row.keeps else []

  return lax.map(of_layer, (numbered(row), grads, shards, residual))


def explicit(row):
  """The door in plain jit: the loss is the mean of all workers', and so are addends."""
  share, many = 1 / row.workers, row.workers

  def of_rows(x, layer):
    h = x @ layer["w"] + layer["b"]
    x = jnp.where(h > 0, h, 0).astype(x.dtype)
    return x, jnp.sum(x, 1)

  def run(x, weights, old):
    layers = layers_at(row)
    zeros = old and parallel.scan_residual(layers, **row.options)
    if old is not None:  # owners have theirs in the units of means
      flat = lambda x: x.reshape(-1, *x.shape[2:], out_sharding=P("data"))
      old = jax.tree.map(lambda x, zero: flat(x) + zero, old, zeros)
      old = old._replace(leaves=[x * jnp.float32(share) for x in old.leaves])

    def loss(x, layers, old):
      given = dict(residual=old, key=KEY, **row.options)
      last, ys = parallel.scan(of_rows, x, layers, **given)
      ys = jnp.swapaxes(ys, 0, 1)
      own = weights.astype(x.dtype)
      return share * (jnp.sum(last[:, 0] * own[:, 0]) + jnp.sum(ys * own)), (last, ys)

    found = jax.grad(loss, (0, 1, 2), has_aux=True)(x, layers, old)
    return found

  def result(found):
    (of_x, means, new), values = jax.tree.map(np.asarray, found)
    means = jax.tree.map(lambda x: np.stack([x] * many), means)
    each = lambda x: x.reshape(many, row.length, *x.shape[1:])
    of_x = of_x * np.asarray(many, of_x.dtype)
    if new is None:
      return Result(values, of_x, means, [])
    kept = [each(x) * np.float32(many) for x in new.leaves]
    return Result(values, of_x, means, kept, jax.tree.map(each, new.owners))

  return run, result
