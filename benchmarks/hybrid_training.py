"""Trains nets in both ways: convolutions by data, and the layers behind them by model.

Each worker convolves its own samples. Their features are gathered by sub-batches, and
each worker computes its outputs of the other layers for all samples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from cut_convolutions import Net
from cut_training import (
  AXIS,
  WORKERS,
  Arm,
  Images,
  Trainer,
  Way,
  columns,
  cut_layers,
  exchanged,
  first_kept,
  of_workers,
  rmsprop,
)
from emulated import own

from gradcomp import parallel

_DROPPED = 0.5


def of_net(arm: Arm, net: Net, sets: Any, args: Any) -> Trainer:
  """Returns what trains a net with one codec for all that workers send."""
  return Trainer(by_both(arm, net, sets[2], rmsprop(args)), sets, args)


def by_both(
  arm: Arm, net: Net, classes: int, rule: optax.GradientTransformation
) -> Way:
  """Sends features, activations, all errors, and the gradients of convolutions."""
  exchange = exchanged(arm)

  def start(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    params = net.init_front(first), columns(net.init_layers(second, classes))
    return params, first_kept(exchange, params[0]), rule.init(params)

  def logits(
    params: Any, x: jax.Array, passes: int, own_key: jax.Array | None
  ) -> jax.Array:
    """Returns ``[passes, B / passes, classes]`` from a worker's own images."""
    front, layers = params
    features = net.features(front, square(x))

    def one_pass(batch: jax.Array, number: jax.Array) -> jax.Array:
      def gather(y: jax.Array, layer: int) -> jax.Array:
        return parallel.all_gather(
          y,
          AXIS,
          codec=arm.codec,
          axis=y.ndim - 1,
          own="coded",
          # All workers have the same errors of the logits, and need not send them.
          to="invarying" if layer == net.last else "varying",
        )

      def drop(y: jax.Array, layer: int) -> jax.Array:
        key = cut_layers.folded(cut_layers.folded(own_key, number), layer)
        return cut_layers.dropped(y, _DROPPED, key)

      return net.apply(layers, batch, gather, drop)[:, :classes]

    return parallel.sub_batches(
      one_pass, features, axis_name=AXIS, passes=passes, codec=arm.codec, own="coded"
    )

  def step(state: Any, images: Images, key: jax.Array) -> Any:
    (front, cut), kept, moments = state
    axes = own(kept)
    labels = cut_layers.in_passes(images.labels, WORKERS, net.passes)

    def worker(cut: Any, kept: Any, x: jax.Array, own_key: jax.Array) -> Any:
      def loss(params: Any) -> jax.Array:
        found = logits(params, x, net.passes, own_key)
        losses = optax.softmax_cross_entropy_with_integer_labels(found, labels)
        return losses.mean()

      of_front, of_cut = jax.grad(loss)((front, cut))
      # The loss is that of all samples, so the workers' gradients are to be added up.
      addends = jax.tree.map(lambda g: g * WORKERS, of_front)
      mean, kept = exchange.update(addends, kept, front)
      return mean, kept, of_cut

    mean, kept, of_cut = jax.vmap(
      worker, in_axes=(0, axes, 0, 0), out_axes=(None, axes, 0), axis_name=AXIS
    )(cut, kept, of_workers(images.x), jax.random.split(key, WORKERS))
    updates, moments = rule.update((mean, of_cut), moments)
    return optax.apply_updates((front, cut), updates), kept, moments

  def predict(state: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    front, cut = state[0]
    filled = jnp.pad(x, ((0, -len(x) % WORKERS), (0, 0)))
    worker = lambda cut, x: logits((front, cut), x, 1, None)
    found = jax.vmap(worker, axis_name=AXIS)(cut, of_workers(filled))
    return found[0, 0, : len(x)]

  return Way(start, step, predict)


def square(x: jax.Array) -> jax.Array:
  """Returns images ``[b, side, side, 1]`` of as many pixels as there are."""
  side = round(x.shape[1] ** 0.5)
  return x.reshape(-1, side, side, 1)
