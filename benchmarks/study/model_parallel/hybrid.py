"""Trains nets in both ways: convolutions by data, and the layers behind them by model.

Each worker convolves its own samples. Their features are gathered by sub-batches, and
each worker computes its outputs of the other layers for all samples. These layers may
be updated behind each sub-batch, and convolutions are behind the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common.trainer import first_kept, of_workers, own
from benchmarks.study.model_parallel import ways
from benchmarks.study.model_parallel.convolutions import Net
from benchmarks.study.model_parallel.ways import AXIS, WORKERS
from examples.lib import cut_layers

_DROPPED = 0.5


def by_both(
  arm: ways.Arm, net: Net, classes: int, rule: Callable[[int], Any]
) -> ways.Way:
  """Sends features, activations, all errors, and the gradients of convolutions.

  A step updates the layers that are cut ``net.updates`` times, each time by the mean
  loss of its sub-batches (Dettmers 2016, section 2.4). It updates the convolutions
  once, behind all sub-batches, by the mean loss of the batch.
  """
  exchange = ways.exchanged(arm)
  of_fronts, of_cuts = rule(1), rule(net.updates)
  passes = net.passes // net.updates  # of an update

  def start(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    front = net.init_front(first)
    cut = ways.columns(net.init_layers(second, classes))
    moments = of_fronts.init(front), of_cuts.init(cut)
    return (front, cut), first_kept(exchange, front, WORKERS, AXIS), moments

  def logits(cut: Any, features: jax.Array, passes: int, first=0, own_key=None) -> Any:
    """Returns ``[passes, B / passes, classes]``; ``first`` numbers the first pass."""

    def one_pass(batch: jax.Array, number: jax.Array) -> jax.Array:
      gather = lambda y, layer: ways.gathered(y, arm.codec, None, layer == net.last)

      def drop(y: jax.Array, layer: int) -> jax.Array:
        key = cut_layers.folded(cut_layers.folded(own_key, first + number), layer)
        return cut_layers.dropped(y, _DROPPED, key)

      return net.apply(cut, batch, gather, drop)[:, :classes]

    return cut_layers.sub_batches(
      one_pass, features, axis_name=AXIS, passes=passes, codec=arm.codec, own="coded"
    )

  def loss(cut: Any, features: jax.Array, labels: jax.Array, first=0, own_key=None):
    """Returns the mean loss of an update, with labels ``[passes, B / passes]``."""
    found = logits(cut, features, passes, first, own_key)
    return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

  def step(state: Any, images: ways.Images, key: jax.Array) -> Any:
    (front, cut), kept, (front_moments, moments) = state
    axes, of_moments = own(kept), own(moments)
    labels = cut_layers.in_passes(images.labels, WORKERS, net.passes)
    of_updates = labels.reshape(net.updates, passes, -1)

    def worker(cut: Any, kept: Any, moments: Any, x: jax.Array, own_key: jax.Array):
      def update(carry: Any, given: Any) -> Any:
        cut, moments = carry
        found, (of_cut, error) = jax.value_and_grad(loss, (0, 1))(cut, *given, own_key)
        changes, moments = of_cuts.update(of_cut, moments)
        return (optax.apply_updates(cut, changes), moments), (found, error)

      features, back = jax.vjp(lambda front: net.features(front, square(x)), front)
      parts = features.reshape(net.updates, -1, *features.shape[1:])
      given = parts, of_updates, jnp.arange(net.updates) * passes
      carry, (losses, errors) = jax.lax.scan(update, (cut, moments), given)
      (of_front,) = back(errors.reshape(features.shape) / net.updates)
      # The loss is that of all samples, so the workers' gradients are to be added up.
      addends = jax.tree.map(lambda g: g * WORKERS, of_front)
      mean, kept = exchange.update(addends, kept, front)
      return losses.mean(), mean, kept, *carry

    given, made = (0, axes, of_moments, 0, 0), (0, None, axes, 0, of_moments)
    of_all = jax.vmap(worker, given, made, axis_name=AXIS)
    x, keys = of_workers(images.x, WORKERS), jax.random.split(key, WORKERS)
    losses, mean, kept, cut, moments = of_all(cut, kept, moments, x, keys)
    changes, front_moments = of_fronts.update(mean, front_moments)
    front = optax.apply_updates(front, changes)
    return ((front, cut), kept, (front_moments, moments)), losses.mean()

  def predict(state: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    front, cut = state[0]
    filled = jnp.pad(x, ((0, -len(x) % WORKERS), (0, 0)))
    worker = lambda cut, x: logits(cut, net.features(front, square(x)), 1)
    found = jax.vmap(worker, axis_name=AXIS)(cut, of_workers(filled, WORKERS))
    return found[0, 0, : len(x)]

  def sent(images: ways.Images) -> int:
    front, cut = jax.eval_shape(start, jax.random.key(0))[0]
    count = images.labels.shape[0] // net.updates
    made = lambda front, x: of_workers(net.features(front, square(x[:count])), WORKERS)
    features = jax.eval_shape(made, front, images.x)
    shape = passes, count // passes
    of_one = lambda cut, features: loss(cut, features, jnp.zeros(shape, jnp.int32))
    plan = gradcomp.explain(exchange, front, workers=WORKERS)
    return plan.bytes_sent + net.updates * ways.sent_by_one(of_one, cut, features)

  return ways.Way(start, step, predict, sent)


def square(x: jax.Array) -> jax.Array:
  """Returns images ``[b, side, side, 1]`` of as many pixels as there are."""
  side = round(x.shape[1] ** 0.5)
  return x.reshape(-1, side, side, 1)
