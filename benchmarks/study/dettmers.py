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
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common.trainer import point
from benchmarks.study import curve
from benchmarks.study.settings import Setting
from benchmarks.training.model_parallel import convolutions, hybrid, layer_errors
from benchmarks.training.model_parallel.data_types import ARMS, with_offset
from benchmarks.training.model_parallel.trainer import (
  WORKERS,
  Arm,
  Images,
  Way,
  cut_layers,
  data,
  dense_layers,
  joined,
  rmsprop,
)
from examples.lib.checkpoints import Saved
from examples.lib.optimizers import make_schedule
from examples.lib.training import NOWHERE

HIDDEN = 1024  # units of both hidden layers of the dense nets
UNITS: dict[str, cut_layers.Unit] = {"dense-relu": "relu", "dense-logistic": "logistic"}
# The filters of convolutions, and the units of dense layers behind them.
_FILTERS, _BEHIND = 16, 128
_LIKE_ALEXNET = functools.partial(convolutions.three_dense, _FILTERS, _BEHIND)
# From the side of an image to a net.
NETS: dict[str, Callable[[int], convolutions.Net]] = {
  "local": functools.partial(convolutions.locally_connected, _FILTERS),
  "three-dense": _LIKE_ALEXNET,
  "three-dense-updates": functools.partial(_LIKE_ALEXNET, updates=4),
}
_PARTS = 4 * WORKERS  # of a batch that has four sub-batches
# With -paper those types that the paper scales by a power of ten: gradients by 10, and
# activations and errors by 100, the least that it finds "desirable" for these.
CODECS = {
  way: {
    name.replace("_", "-"): codec for name, codec in (ARMS | with_offset(k)).items()
  }
  for way, k in {"data": 1, "model": 2}.items()
}
_TESTED = 1000  # images that are tested at once


class Trainer:
  """Trains a setting, with programs that are compiled once for all seeds.

  Args:
    images: square grey ones, to train on and to test on.
    setting: the settings.

  Raises:
    ValueError: the setting or the images are not as above.
  """

  def __init__(self, images: data.ImageSet, setting: Setting):
    _check(images, setting)
    self._setting, self._classes = setting, images.classes
    self._train, self._test = (_flat(x) for x in images[:2])
    self._side = images.train.images.shape[1]
    way = self._way(setting.codec)

    def step(state: Any, images: Images, indices: jax.Array, key: jax.Array) -> Any:
      return way.step(state, _scaled(jax.tree.map(lambda x: x[indices], images)), key)

    def score(state: Any, images: Images, key: jax.Array) -> jax.Array:
      x, labels = _scaled(images)
      logits = way.predict(state, x, key)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return jnp.stack([losses.sum(), (logits.argmax(axis=-1) == labels).sum()])

    self._start = jax.jit(way.start)
    self._step = jax.jit(step, donate_argnums=0)
    self._score = jax.jit(score)

  def _way(self, codec: str) -> Way:
    setting = self._setting
    way = cast(Literal["data", "model"], setting.way)
    arm = Arm(way, CODECS[way][codec])
    rule = functools.partial(rmsprop, make_schedule(setting))
    if setting.network in UNITS:
      sizes = self._side**2, HIDDEN, HIDDEN, self._classes
      return dense_layers(arm, UNITS[setting.network], sizes, rule())
    net = NETS[setting.network](self._side)
    return hybrid.by_both(arm, net, self._classes, rule)

  def recorded(self) -> None:
    """Returns what a saved state belongs to: nothing, for no state is a codec's."""

  def bytes(self) -> dict[str, Any]:
    r"""Returns what a worker sends in a step, and the ratio to float32's of this way.

    With N workers, B samples of a step and c(x) bytes of the payload of an array,

    .. math:: (N-1) \sum_w c(w), \qquad
      (N-1) \left( \sum_y c(y) + \sum_e c(e) \right)

    are those of data and of model parallelism. w are the weights and biases, which
    travel in float32 where that is less. y are a worker's columns ``[B, n / N]`` of
    each layer's outputs, and e the errors of the same shapes, but for those of the last
    layer, which all workers have. Nets with convolutions send the gradients of these as
    w, and in each sub-batch their features ``[B / (4 N), n]``, the columns behind them,
    and the errors of both.
    """
    shapes = Images(
      jax.ShapeDtypeStruct((self._setting.batch, self._side**2), jnp.float32),
      jax.ShapeDtypeStruct((self._setting.batch,), jnp.int32),
    )
    sent, plain = (self._way(x).sent(shapes) for x in (self._setting.codec, "f32"))
    return {"bytes_a_step": float(sent), "ratio": sent / plain, "exchanges": []}

  def train(
    self,
    seed: int,
    stepped: Callable[[], None] = lambda: None,
    saved: Saved = NOWHERE,
  ) -> dict[str, Any]:
    """Trains from one seed, to the end or until the loss is no number any more.

    Args:
      seed: of parameters, batches, dropout and rounding.
      stepped: called behind each step.
      saved: where the training goes on from, and what keeps it.

    Returns:
      What ``curve.ended`` returns. The first point and the last of a dense net
      that is cut and trains in float32 also have what :meth:`layer_errors` finds:
      gradients become ever smaller beside the largest.
    """
    setting = self._setting
    key = jax.random.key(seed)
    ends = min(setting.evaluated), setting.steps
    order = np.arange(len(self._train.labels), dtype=np.int32)

    def step(state: Any, batch: data.Split, number: int) -> Any:
      of_step = jax.random.fold_in(key, number)
      return self._step(state, self._train, batch.images, of_step)

    def test(state: Any, number: int, loss: float) -> Any:
      evaluated = self._evaluate(state, jax.random.fold_in(key, number))
      reached = point(number, loss, evaluated)
      if self._measures and number in ends:
        reached["layer_errors"] = self.layer_errors(state[0], seed)
      return reached, state

    return curve.follow(
      setting,
      self._start(jax.random.fold_in(key, 0)),
      data.batches(data.Split(order, order), setting.batch, seed=seed),
      step,
      test,
      stepped,
      saved,
    )

  @property
  def _measures(self) -> bool:
    setting = self._setting
    cut = setting.way == "model" and setting.network in UNITS
    return cut and setting.codec == "f32"

  def layer_errors(
    self, cut: cut_layers.Layers, seed: int
  ) -> dict[str, dict[str, list[float]]]:
    """Measures how the types round the arrays of a dense net (table 2's bottom).

    Args:
      cut: the columns of all workers.
      seed: of the dropout.

    Returns:
      For ``"activations"``, ``"gradients"`` and ``"errors"``, and for each type, the
      mean relative error in percent of each layer: see ``layer_errors.errors_of``.
    """
    unit = UNITS[self._setting.network]
    net = functools.partial(cut_layers.apply, classes=self._classes, unit=unit)
    batch = _scaled(jax.tree.map(lambda x: x[: self._setting.batch], self._train))
    return layer_errors.errors_of(net, joined(cut), batch, jax.random.key(seed))

  def _evaluate(self, state: Any, key: jax.Array) -> tuple[float, float]:
    count = len(self._test.labels)
    totals = np.zeros(2)
    for start in range(0, count, _TESTED):
      part = jax.tree.map(lambda x, start=start: x[start : start + _TESTED], self._test)
      totals += jax.device_get(self._score(state, part, key))
    loss, accuracy = (totals / count).tolist()
    return loss, accuracy


def _check(images: data.ImageSet, setting: Setting) -> None:
  _, height, width, channels = images.train.images.shape
  if height != width or channels != 1:
    raise ValueError(
      "`images` must be square and grey, [count, side, side, 1], got "
      f"{images.train.images.shape}."
    )
  if setting.workers != WORKERS:
    raise ValueError(f"`workers` must be {WORKERS}, got {setting.workers}.")
  if setting.batch % _PARTS:
    raise ValueError(f"`batch` must be a multiple of {_PARTS}, got {setting.batch}.")
  networks = {"data": [*UNITS], "model": [*UNITS, *NETS]}
  if setting.way not in networks:
    raise ValueError(f"`way` must be one of {[*networks]}, got {setting.way!r}.")
  if setting.network not in networks[setting.way]:
    raise ValueError(
      f"`network` must be one of {networks[setting.way]} in the way {setting.way!r}, "
      f"got {setting.network!r}."
    )
  codecs = [*CODECS[setting.way]]
  if setting.codec not in codecs:
    raise ValueError(f"`codec` must be one of {codecs}, got {setting.codec!r}.")


def _flat(split: data.Split) -> Images:
  """Puts images on the device as bytes, ``uint8[count, pixels]``."""
  pixels = split.images.reshape(len(split.images), -1)
  return Images(jnp.asarray(pixels), jnp.asarray(split.labels))


def _scaled(images: Images) -> Images:
  """Returns images with pixels from 0 to 1."""
  return images._replace(x=images.x.astype(jnp.float32) / 255)
