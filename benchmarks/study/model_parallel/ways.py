"""Trains by vmap: a net of dense layers, whole on all workers or cut over them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common.trainer import first_kept, of_workers, own
from examples.lib import cut_layers
from gradcomp import codecs, parallel

AXIS = "worker"
WORKERS = 4
LAST = 2  # the number of the last layer
TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")  # that Dettmers compares
ARMS = {"f32": codecs.Dense()} | {x: codecs.EightBit(dtype=x) for x in TYPES}


def with_offset(exponent: int) -> dict[str, codecs.Codec]:
  """Returns the types that Dettmers' section 3.1 scales by ``10**exponent``.

  It divides the other two, whose exponents are dynamic or none, by the largest element.
  """
  return {
    f"{name}_paper": codecs.EightBit(dtype=name, exponent_offset=exponent)
    for name in ("mantissa", "static_tree")
  }


class Images(NamedTuple):
  """Pixels from 0 to 1, ``float32[count, pixels]``, and labels ``int32[count]``."""

  x: jax.Array
  labels: jax.Array


def gathered(
  y: jax.Array, codec: codecs.Codec, key: jax.Array | None, last: bool
) -> jax.Array:
  """Puts the activations of all workers side by side, each rounded by its worker.

  Errors are added up where their inputs were computed. Those of the last layer are the
  same on all workers, who need not send them.
  """
  to = "invarying" if last else "varying"
  return parallel.all_gather(
    y, axis_name=AXIS, codec=codec, axis=y.ndim - 1, own="coded", to=to, key=key
  )


def columns(layers: cut_layers.Layers) -> cut_layers.Layers:
  """Cuts the outputs of all layers, ``[workers, ..., n / workers]``."""
  return jax.tree.map(lambda x: jnp.stack(jnp.split(x, WORKERS, axis=-1)), layers)


def joined(cut: cut_layers.Layers) -> cut_layers.Layers:
  return jax.tree.map(lambda x: jnp.concatenate([*x], axis=-1), cut)


class Way(NamedTuple):
  """A way to train, in functions that are traced."""

  start: Callable[[jax.Array], Any]  # from a key to a state, with parameters first
  step: Callable[[Any, Images, jax.Array], tuple[Any, jax.Array]]  # and the loss
  predict: Callable[[Any, jax.Array, jax.Array], jax.Array]  # logits
  sent: Callable[[Images], int]  # bytes of a worker in a step with such images


def by_data(
  codec: codecs.Codec, net: Callable[..., jax.Array], init: Any, rmsprop: Any
) -> Way:
  """Sends gradients: each worker has all layers and its own samples."""
  exchange = exchanged(codec)

  def start(key: jax.Array) -> Any:
    layers = init(key)
    return layers, first_kept(exchange, layers, WORKERS, AXIS), rmsprop.init(layers)

  def step(state: Any, images: Images, key: jax.Array) -> Any:
    layers, kept, moments = state
    axes = own(kept)

    def worker(kept: Any, images: Images, key: jax.Array) -> Any:
      found, grads = jax.value_and_grad(loss)(layers, net, images, key=key, own_key=key)
      return found, *exchange.update(grads, kept, layers)

    losses, mean, kept = jax.vmap(
      worker, in_axes=(axes, 0, 0), out_axes=(0, None, axes), axis_name=AXIS
    )(kept, of_workers(images, WORKERS), jax.random.split(key, WORKERS))
    updates, moments = rmsprop.update(mean, moments)
    return (optax.apply_updates(layers, updates), kept, moments), losses.mean()

  def sent(images: Images) -> int:
    del images
    layers = jax.eval_shape(init, jax.random.key(0))
    return gradcomp.explain(exchange, layers, workers=WORKERS).bytes_sent

  return Way(start, step, lambda state, x, key: net(state[0], x), sent)


def exchanged(codec: codecs.Codec) -> Any:
  """Returns the exchange of gradients of weights that all workers have."""
  return gradcomp.compress(
    codec, axis_name=AXIS, exchange="all_gather", feedback=None, min_leaf_size=0
  )


def by_model(
  codec: codecs.Codec, net: Callable[..., jax.Array], init: Any, rmsprop: Any
) -> Way:
  """Sends activations and errors: each worker has columns of every layer."""

  def start(key: jax.Array) -> Any:
    layers = columns(init(key))
    return layers, rmsprop.init(layers)

  def gather(y: jax.Array, layer: int, key: jax.Array) -> jax.Array:
    key = jax.random.fold_in(key, layer)
    return gathered(y, codec, key, layer == LAST)

  def step(state: Any, images: Images, key: jax.Array) -> Any:
    layers, moments = state

    def worker(layers: cut_layers.Layers, own_key: jax.Array) -> Any:
      send = functools.partial(gather, key=jax.random.fold_in(key, WORKERS))
      keys = {"key": key, "own_key": own_key}
      return jax.value_and_grad(loss)(layers, net, images, gather=send, **keys)

    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(WORKERS))
    losses, grads = jax.vmap(worker, axis_name=AXIS)(layers, keys)
    updates, moments = rmsprop.update(grads, moments)
    return (optax.apply_updates(layers, updates), moments), losses.mean()

  def predict(state: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    send = functools.partial(gather, key=key)
    worker = lambda layers: net(layers, x, gather=send, dropout=())
    return jax.vmap(worker, axis_name=AXIS)(state[0])[0]

  def sent(images: Images) -> int:
    def of_one(layers: cut_layers.Layers) -> jax.Array:
      send = functools.partial(gather, key=jax.random.key(0))
      return loss(layers, net, jax.tree.map(jnp.zeros_like, images), gather=send)

    return sent_by_one(of_one, jax.eval_shape(start, jax.random.key(0))[0])

  return Way(start, step, predict, sent)


def sent_by_one(loss: Callable[..., jax.Array], *stacked: Any) -> int:
  """Returns the bytes for the loss of a worker's part of ``stacked``, and gradient."""
  of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
  return gradcomp.explain(loss, *of_one, workers={AXIS: WORKERS}).bytes_sent


def loss(
  layers: cut_layers.Layers, net: Callable[..., jax.Array], images: Images, **options
) -> jax.Array:
  logits = net(layers, images.x, dropout=cut_layers.DROPOUT, **options)
  return optax.softmax_cross_entropy_with_integer_labels(logits, images.labels).mean()


def rmsprop(rate: optax.ScalarOrSchedule, updates: int = 1) -> Any:
  """Returns the optimizer of layers that a step updates so many times, at one rate."""
  of_step = lambda count: rate(count // updates)
  return optax.rmsprop(of_step if callable(rate) else rate)
