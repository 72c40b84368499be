"""Nets whose convolutions every worker has, and whose other layers are cut.

Each worker convolves its own samples. Their features are gathered by sub-batches, and
each worker computes its outputs of the other layers for all samples. These layers may
be updated behind each sub-batch, and convolutions are behind the last.

The nets are those of Dettmers (2016), section 3.4, made smaller for images of 8 x 8 or
so, as the docstrings say. Convolutions are products of patches: gradients of a
convolution by vmap would be grouped convolutions, which are slow on a CPU.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common.trainer import first_kept, of_workers, own
from benchmarks.study.model_parallel import ways
from benchmarks.study.model_parallel.ways import AXIS, WORKERS
from examples.lib import cut_layers
from gradcomp import codecs

_DROPPED = 0.5
Gather = Callable[[jax.Array, int], jax.Array]


class Net(NamedTuple):
  """A net in two parts."""

  init_front: Callable[[jax.Array], Any]  # draws the convolutions from a key
  # Computes what stands before the layers that are cut, from these and from images
  # ``[b, side, side, 1]``.
  features: Callable[[Any, jax.Array], jax.Array]
  # Draws the layers that are cut, whole, from a key and the number of classes. Their
  # last axis is that of the outputs.
  init_layers: Callable[[jax.Array, int], Any]
  # Computes the outputs of the last of them, ``apply(layers, x, gather, drop)``.
  # ``gather`` takes the outputs of a layer and its number, and ``drop`` the outputs of
  # one that dropout follows.
  apply: Callable[[Any, jax.Array, Gather, Callable[..., jax.Array]], jax.Array]
  last: int  # the number of the last layer
  passes: int  # the sub-batches of a batch
  # How often a batch updates the layers that are cut, after as many sub-batches each.
  updates: int = 1


def patches(x: jax.Array, size: int) -> jax.Array:
  """Returns around each place its square of inputs, ``[b, h, w, size * size * c]``."""
  reach = size // 2
  padded = jnp.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
  height, width = x.shape[1:3]
  shifted = [
    padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)
  ]
  return jnp.concatenate(shifted, axis=-1)


def drawn(key: jax.Array, *shapes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
  """Draws layers: weights ``[..., inputs, outputs]`` of variance 2 / inputs; biases."""
  keys = jax.random.split(key, len(shapes))
  return [
    {
      "w": jax.random.normal(own, shape) * (2 / shape[-2]) ** 0.5,
      "b": jnp.zeros((*shape[:-2], shape[-1])),
    }
    for own, shape in zip(keys, shapes, strict=True)
  ]


def convolved(layer: dict[str, jax.Array], x: jax.Array, size: int) -> jax.Array:
  """Convolves with the same weights in all places, and cuts off what is negative."""
  return jax.nn.relu(patches(x, size) @ layer["w"] + layer["b"])


def local(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """Does the same with weights of each place, ``[h, w, 9 c, outputs]``."""
  y = jnp.einsum("bhwi,hwio->bhwo", patches(x, 3), layer["w"])
  return jax.nn.relu(y + layer["b"])


def pooled(x: jax.Array, size: int, stride: int) -> jax.Array:
  """Returns the largest numbers of windows, which may reach over the edge."""
  window, strides = (1, size, size, 1), (1, stride, stride, 1)
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def normalized(x: jax.Array) -> jax.Array:
  """Divides by the activity of nine channels (Krizhevsky's response normalization)."""
  squares = jax.lax.reduce_window(
    jnp.square(x), 0.0, jax.lax.add, (1, 1, 1, 9), (1, 1, 1, 1), "SAME"
  )
  return x * (1 + 1e-3 / 9 * squares) ** -0.75


def locally_connected(filters: int, side: int = 8) -> Net:
  """Returns the net with two locally connected layers.

  It has a convolution of 5 x 5, a pool of 3 x 3 with the stride 2, a normalization, a
  convolution of 3 x 3, a pool, a normalization, two locally connected layers of 3 x 3,
  the second with half as many filters, and a softmax. Images have ``side * side``
  pixels. The second pool has the stride 1: the local layers have 4 x 4 places for 8 x 8
  pixels and 7 x 7 for 14 x 14, where the paper's have 6 x 6 for 24 x 24.
  """
  places = -(-side // 2)
  init_front = lambda key: tuple(drawn(key, (25, filters), (9 * filters, filters)))

  def features(front: Any, images: jax.Array) -> jax.Array:
    x = normalized(pooled(convolved(front[0], images, 5), 3, 2))
    return normalized(pooled(convolved(front[1], x, 3), 3, 1))

  def init_layers(key: jax.Array, classes: int) -> Any:
    each, outputs = (places, places, 9 * filters), cut_layers.padded(classes, WORKERS)
    last = places**2 * (filters // 2), outputs
    return drawn(key, (*each, filters), (*each, filters // 2), last)

  def apply(layers: Any, x: jax.Array, gather: Gather, drop: Any) -> jax.Array:
    del drop
    x = gather(local(layers[0], x), 0)
    x = gather(local(layers[1], x), 1)
    return gather(x.reshape(x.shape[0], -1) @ layers[2]["w"] + layers[2]["b"], 2)

  return Net(init_front, features, init_layers, apply, last=2, passes=1)


def three_dense(filters: int, hidden: int, side: int = 8, updates: int = 1) -> Net:
  """Returns a net like AlexNet: convolutions, and three dense layers that are cut.

  Dropout of a half follows the first two. A batch is taken in four sub-batches, and
  updates the dense layers once, or after each (section 2.4). There are two convolutions
  of 3 x 3, each with a pool of 3 x 3 with the stride 2 and a normalization, where
  AlexNet has five convolutions and three pools.
  """
  places = -(-side // 4)  # as two pools that round up leave
  init_front = lambda key: tuple(drawn(key, (9, filters), (9 * filters, 2 * filters)))

  def features(front: Any, x: jax.Array) -> jax.Array:
    for layer in front:
      x = normalized(pooled(convolved(layer, x, 3), 3, 2))
    return x.reshape(x.shape[0], -1)

  def init_layers(key: jax.Array, classes: int) -> Any:
    outputs = cut_layers.padded(classes, WORKERS)
    sizes = places**2 * 2 * filters, hidden, hidden, outputs
    return drawn(key, *itertools.pairwise(sizes))

  def apply(layers: Any, x: jax.Array, gather: Gather, drop: Any) -> jax.Array:
    for number, layer in enumerate(layers[:2]):
      x = gather(drop(jax.nn.relu(x @ layer["w"] + layer["b"]), number), number)
    return gather(x @ layers[2]["w"] + layers[2]["b"], 2)

  return Net(init_front, features, init_layers, apply, 2, passes=4, updates=updates)


def by_both(
  codec: codecs.Codec, net: Net, classes: int, rule: Callable[[int], Any]
) -> ways.Way:
  """Sends features, activations, all errors, and the gradients of convolutions.

  A step updates the layers that are cut ``net.updates`` times, each time by the mean
  loss of its sub-batches (Dettmers 2016, section 2.4). It updates the convolutions
  once, behind all sub-batches, by the mean loss of the batch.
  """
  exchange = ways.exchanged(codec)
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
      gather = lambda y, layer: ways.gathered(y, codec, None, layer == net.last)

      def drop(y: jax.Array, layer: int) -> jax.Array:
        key = cut_layers.folded(cut_layers.folded(own_key, first + number), layer)
        return cut_layers.dropped(y, _DROPPED, key)

      return net.apply(cut, batch, gather, drop)[:, :classes]

    return cut_layers.sub_batches(
      one_pass, features, axis_name=AXIS, passes=passes, codec=codec, own="coded"
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
