"""Trains Dettmers' nets in both kinds of parallelism, one training for each setting.

``way`` of a setting is ``"data"`` or ``"model"``, and ``network`` one of these of
Dettmers (2016), section 3.4:

  dense-relu, dense-logistic   784-1024-1024-10 on 28 x 28 pixels, in both ways.
  local, three-dense           of model_parallel/convolutions.py, ``"model"`` alone.
  three-dense-updates          The same, with dense layers that are updated behind each
                               sub-batch (section 2.4).

Four workers are a vmap on one device. They train by RMSProp. All that is sent has the
data type of the codec, a worker's own part, too: gradients once and without feedback,
features, activations and errors. Tests in model parallelism use the cut net and the
same type.

The keys of a step are those of its seed and number, so that a training that goes on
from a saved state has the bits of one that nobody stopped.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common.trainer import Trainer, point
from benchmarks.study.model_parallel import convolutions, ways
from benchmarks.study.settings import Setting
from examples.lib import cut_layers
from examples.lib import images as data
from examples.lib.methods import make_schedule
from gradcomp.codecs import EightBit

HIDDEN = 1024  # units of both hidden layers of the dense nets
UNITS = {"dense-relu": "relu", "dense-logistic": "logistic"}
# The filters of convolutions, and the units of dense layers behind them.
_FILTERS, _BEHIND = 16, 128
_LIKE_ALEXNET = functools.partial(convolutions.three_dense, _FILTERS, _BEHIND)
# From the side of an image to a net.
NETS: dict[str, Callable[[int], convolutions.Net]] = {
  "local": functools.partial(convolutions.locally_connected, _FILTERS),
  "three-dense": _LIKE_ALEXNET,
  "three-dense-updates": functools.partial(_LIKE_ALEXNET, updates=4),
}
_PARTS = 4 * ways.WORKERS  # of a batch that has four sub-batches
# With -paper those types that the paper scales by a power of ten: gradients by 10, and
# activations and errors by 100, the least that it finds "desirable" for these.
CODECS = {
  way: {
    name.replace("_", "-"): codec
    for name, codec in (ways.ARMS | ways.with_offset(k)).items()
  }
  for way, k in {"data": 1, "model": 2}.items()
}
_TESTED = 1000  # images that are tested at once


def trainer(images: data.ImageSet, setting: Setting) -> Trainer:
  r"""Makes what trains a setting on square gray images.

  The first point and the last of a dense net that is cut and trains in float32 also
  have what :func:`errors_of_layers` finds: gradients become ever smaller beside the
  largest.

  With N workers, B samples of a step and c(x) bytes of the payload of an array,

  .. math:: (N-1) \sum_w c(w), \qquad
    (N-1) \left( \sum_y c(y) + \sum_e c(e) \right)

  are the bytes of data and of model parallelism. w are the weights and biases, which
  travel in float32 where that is less. y are a worker's columns ``[B, n / N]`` of each
  layer's outputs, and e the errors of the same shapes, but for those of the last layer,
  which all workers have. Nets with convolutions send the gradients of these as w, and
  in each sub-batch their features ``[B / (4 N), n]``, the columns behind them, and the
  errors of both.
  """
  _check(images, setting)
  given, tested = (_on_device(x) for x in images[:2])
  side, classes = images.train.images.shape[1], images.classes
  way = _way(setting, setting.codec, side, classes)
  ends = min(setting.evaluated), setting.steps
  dense = setting.way == "model" and setting.network in UNITS
  count = len(tested.labels)

  @functools.partial(jax.jit, donate_argnums=0)
  def update(state: Any, images: ways.Images, indices: jax.Array, key: jax.Array):
    return way.step(state, _scaled(jax.tree.map(lambda x: x[indices], images)), key)

  @jax.jit
  def score(state: Any, images: ways.Images, key: jax.Array) -> jax.Array:
    x, labels = _scaled(images)
    logits = way.predict(state, x, key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.stack([losses.sum(), (logits.argmax(axis=-1) == labels).sum()])

  first = jax.jit(way.start)
  start = lambda seed: first(key_of(seed, 0))
  key_of = lambda seed, number: jax.random.fold_in(jax.random.key(seed), number)

  def batches(seed: int) -> Iterator[data.Split]:
    order = np.arange(len(given.labels), dtype=np.int32)
    return data.batches(data.Split(order, order), setting.batch, seed=seed)

  def step(seed: int, state: Any, batch: data.Split, number: int) -> Any:
    return update(state, given, batch.images, key_of(seed, number))

  def test(seed: int, state: Any, number: int, loss: float) -> Any:
    totals = np.zeros(2)
    for start in range(0, count, _TESTED):
      part = jax.tree.map(lambda x, start=start: x[start : start + _TESTED], tested)
      totals += jax.device_get(score(state, part, key_of(seed, number)))
    reached = point(number, loss, tuple((totals / count).tolist()))
    if dense and setting.codec == "f32" and number in ends:
      reached["layer_errors"] = errors_of_layers(images, setting, state[0], seed)
    return reached, state

  def sent() -> dict[str, Any]:
    of_batch = lambda split: jax.tree.map(lambda x: x[: setting.batch], split)
    shapes = jax.eval_shape(lambda split: _scaled(of_batch(split)), given)
    of = lambda codec: _way(setting, codec, side, classes).sent(shapes)
    own, plain = of(setting.codec), of("f32")
    return {"bytes_a_step": float(own), "ratio": own / plain, "exchanges": []}

  return Trainer(setting.steps, setting.evaluated, start, batches, step, test, sent)


def _way(setting: Setting, codec: str, side: int, classes: int) -> ways.Way:
  sent = CODECS[setting.way][codec]
  rule = functools.partial(ways.rmsprop, make_schedule(setting))
  if setting.network in UNITS:
    sizes = side**2, HIDDEN, HIDDEN, cut_layers.padded(classes, ways.WORKERS)
    init = functools.partial(cut_layers.init, sizes=sizes, unit=UNITS[setting.network])
    make = ways.by_data if setting.way == "data" else ways.by_model
    return make(sent, _dense(setting, classes), init, rule())
  return convolutions.by_both(sent, NETS[setting.network](side), classes, rule)


def _dense(setting: Setting, classes: int) -> Callable[..., jax.Array]:
  unit = UNITS[setting.network]
  return functools.partial(cut_layers.apply, classes=classes, unit=unit)


def errors_of_layers(
  images: data.ImageSet, setting: Setting, cut: cut_layers.Layers, seed: int
) -> dict[str, dict[str, list[float]]]:
  """Measures how types round a dense net's arrays of a batch (table 2's bottom).

  Returns mean relative errors in percent by kinds, types and layers, without zeros.
  Activations begin with the inputs and end with the logits; gradients are those of
  weights; errors are those of activations. Types that end in ``_paper`` are scaled by
  10, as in the paper's table, and the others by the largest element.
  """
  net = _dense(setting, images.classes)
  first = _scaled(_on_device(data.Split(*(x[: setting.batch] for x in images.train))))
  codecs = {name: EightBit(dtype=name) for name in ways.TYPES} | ways.with_offset(1)
  found = lambda codec, each: [float(_percent(codec, x)) for x in each]
  arrays = _arrays(net, ways.joined(cut), first, jax.random.key(seed))
  return {
    kind: {name: found(codec, each) for name, codec in codecs.items()}
    for kind, each in arrays.items()
  }


@functools.partial(jax.jit, static_argnums=0)
def _arrays(
  net: Any, layers: cut_layers.Layers, images: ways.Images, key: jax.Array
) -> dict[str, list[jax.Array]]:
  """Returns what workers would send of a batch, layer by layer."""

  def with_sums(layers: Any, added: Any) -> Any:
    seen = []

    def gather(y: jax.Array, layer: int) -> jax.Array:
      seen.append(y)
      return y + added[layer]  # its gradient is the error of these activations

    keys = {"key": key, "own_key": key}
    return ways.loss(layers, net, images, gather=gather, **keys), seen

  zeros = [jnp.zeros((len(images.x), layer["b"].size)) for layer in layers]
  (grads, errors), seen = jax.grad(with_sums, (0, 1), has_aux=True)(layers, zeros)
  inputs = cut_layers.dropped(images.x, cut_layers.DROPOUT[0], key)
  weights = [layer["w"] for layer in grads]
  return {"activations": [inputs, *seen], "gradients": weights, "errors": errors}


@functools.partial(jax.jit, static_argnums=0)
def _percent(codec: Any, x: jax.Array) -> jax.Array:
  distance = jnp.abs(codec.decode(codec.encode(x), like=x) - x)
  ratio = jnp.where(x == 0, 0.0, distance / jnp.where(x == 0, 1.0, jnp.abs(x)))
  return 100 * ratio.sum() / (x != 0).sum()


def _check(images: data.ImageSet, setting: Setting) -> None:
  _, height, width, channels = shape = images.train.images.shape
  if height != width or channels != 1:
    raise ValueError(
      f"`images` must be square and gray, [count, side, side, 1], got {shape}."
    )
  if setting.workers != ways.WORKERS:
    raise ValueError(f"`workers` must be {ways.WORKERS}, got {setting.workers}.")
  if setting.batch % _PARTS:
    raise ValueError(f"`batch` must be a multiple of {_PARTS}, got {setting.batch}.")
  networks = {"data": [*UNITS], "model": [*UNITS, *NETS]}
  if setting.way not in networks:
    raise ValueError(f"`way` must be one of {[*networks]}, got {setting.way!r}.")
  known = {"network": networks[setting.way], "codec": [*CODECS[setting.way]]}
  for name, choices in known.items():
    if (value := getattr(setting, name)) not in choices:
      where = f"in the way {setting.way!r}"
      raise ValueError(f"`{name}` must be one of {choices} {where}, got {value!r}.")


def _on_device(split: data.Split) -> ways.Images:
  """Puts images on the device as bytes, ``uint8[count, pixels]``."""
  pixels = split.images.reshape(len(split.images), -1)
  return ways.Images(jnp.asarray(pixels), jnp.asarray(split.labels))


def _scaled(images: ways.Images) -> ways.Images:
  return images._replace(x=images.x.astype(jnp.float32) / 255)
