"""A net of dense layers, whole or sharded over workers by outputs, and a convolution.

Dettmers (2016, section 2) cuts a dense layer by its outputs. The parts of an input's
error are added up where it was computed. Convolutions are whole on all workers.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import P, lax

from gradcomp import parallel

Layers = list[dict[str, jax.Array]]
Unit = Literal["relu", "logistic"]
UNITS = {"relu": jax.nn.relu, "logistic": jax.nn.sigmoid}
DROPOUT = (0.2, 0.3, 0.3)  # of the inputs and of two hidden layers, the paper's


def init(key: jax.Array, sizes: Sequence[int], unit: Unit = "relu") -> Layers:
  """Draws layers of the variance 2 / inputs; logistic units have a quarter's slope."""
  gain = {"relu": 2, "logistic": 16}[unit]
  layers = []
  for i, (m, n) in enumerate(itertools.pairwise(sizes)):
    w = jax.random.normal(jax.random.fold_in(key, i), (m, n)) * (gain / m) ** 0.5
    layers.append({"w": w, "b": jnp.zeros(n)})
  return layers


def padded(classes: int, workers: int) -> int:
  """Returns the outputs of the last layer: classes, up to a multiple of workers."""
  return -(-classes // workers) * workers


def apply(
  layers: Layers,
  x: jax.Array,
  classes: int,
  *,
  unit: Unit = "relu",
  gather: Callable[[jax.Array, int], jax.Array] = lambda y, i: y,
  dropout: Sequence[float] = (),
  key: jax.Array | None = None,
  own_key: jax.Array | None = None,
) -> jax.Array:
  """Computes logits ``[samples, classes]``, with a worker's columns or whole layers.

  Workers share ``key``, for dropout of inputs; ``own_key`` is for that of outputs.
  """
  rates = [*dropout, *[0.0] * len(layers)]
  x = dropped(x, rates[0], key)
  for i, layer in enumerate(layers[:-1]):
    y = UNITS[unit](x @ layer["w"] + layer["b"])
    x = gather(dropped(y, rates[i + 1], folded(own_key, i)), i)
  last = layers[-1]
  return gather(x @ last["w"] + last["b"], len(layers) - 1)[:, :classes]


def folded(key: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
  """Returns another key; None for none."""
  return None if key is None else jax.random.fold_in(key, number)


def dropped(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zeroes elements with a probability, and scales the others up."""
  if not rate or key is None:
    return x
  return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def features(params: Any, images: jax.Array) -> jax.Array:
  """Convolves, pools over 2 x 2 and flattens images, of numbers from 0 to 255."""
  x = images.astype(jnp.float32) / 255
  if params:
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", None, None, layout)
    x = jax.nn.relu(x + params["b"])
    window = (1, 2, 2, 1)
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
  return x.reshape(x.shape[0], -1)


def init_net(key: jax.Array, own: jax.Array, images: Any, args: Any) -> Any:
  """Draws a net for images: three dense layers behind a 3 x 3 convolution, or none."""
  height, width, inputs = images.train.images.shape[1:]
  first, front = height * width * inputs, {}
  if channels := args.channels:
    first = (height // 2) * (width // 2) * channels
    w = jax.random.normal(own, (3, 3, inputs, channels)) * (2 / (9 * inputs)) ** 0.5
    front = {"w": w, "b": jnp.zeros(channels)}
  sizes = first, args.hidden, args.hidden, padded(images.classes, jax.device_count())
  return {"front": front, "dense": init(key, sizes, args.unit)}


def specs(tree: Any, axis: str) -> Any:
  """Returns the specs of parameters or of their moments: columns of dense layers."""

  def spec_of(path: Any, leaf: Any) -> P:
    if "'dense'" not in jax.tree_util.keystr(path) or not leaf.ndim:
      return P()
    return P(None, axis) if leaf.ndim == 2 else P(axis)

  return jax.tree.map_with_path(spec_of, tree)


def in_passes(x: jax.Array, workers: int, passes: int) -> jax.Array:
  """Puts samples in the order of sub-batches, with an equal part of each worker's."""
  parts = x.reshape(workers, passes, -1, *x.shape[1:])
  return parts.swapaxes(0, 1).reshape(passes, -1, *x.shape[1:])


def sub_batches(
  fn: Callable[[jax.Array, jax.Array], Any],
  features: jax.Array,
  *,
  passes: int,
  prefetch: bool = True,
  key: jax.Array | None = None,
  **given: Any,
) -> Any:
  """Applies a layer that is sharded over the workers to a batch, in several passes.

  Each worker has the features of its own samples, ``[n, ...]``. In a pass, all workers
  take the same sub-batch, an equal part of each worker's samples: worker i's sample j
  comes in pass ``j // (n / passes)``. With ``prefetch``, the sub-batch of pass s + 1 is
  gathered before ``fn(sub_batch, s)``, which does not depend on it: XLA may send it
  meanwhile. The cotangents of a pass are scattered to the samples' owners. The results
  are stacked on a new first axis. (Dettmers, 2016, section 2; Krizhevsky, 2014.) What
  else is given are options of ``parallel.all_gather``.

  Example:
    >>> def layer(features):
    ...   return sub_batches(
    ...     lambda x, s: 10 * x, features, axis_name="model", passes=2,
    ...     codec=gradcomp.codecs.Dense())
    >>> jax.vmap(layer, axis_name="model")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))[0]
    Array([[10., 30.],
           [20., 40.]], dtype=float32)
  """
  size = features.shape[0]
  if passes < 1 or size % passes:
    raise ValueError(
      "`passes` must be a number of passes that divides the first axis of `features`, "
      f"got {passes} of {size}."
    )
  parts = features.reshape(passes, size // passes, *features.shape[1:])
  gather = lambda part, i: parallel.all_gather(part, key=folded(key, i), **given)
  numbers = jnp.arange(passes, dtype=jnp.int32)
  if not prefetch or passes == 1:
    return lax.map(lambda x: fn(gather(*x), x[1]), (parts, numbers))

  def ahead(current: jax.Array, after: tuple) -> tuple[jax.Array, Any]:
    following, number = after
    return gather(following, number + 1), fn(current, number)

  last, results = lax.scan(ahead, gather(parts[0], 0), (parts[1:], numbers[:-1]))
  result = fn(last, numbers[-1])
  return jax.tree.map(lambda *x: jnp.concatenate([x[0], x[1][None]]), results, result)
