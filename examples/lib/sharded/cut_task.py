"""A task with dense layers that are sharded over a mesh, and several passes a batch."""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib.data import images as data
from examples.lib.sharded import cut_layers
from examples.lib.sharded.sub_batches import sub_batches
from examples.lib.training import Batch
from gradcomp import parallel
from gradcomp.codecs import Codec

AXIS = "model"


class Task:
  """A net that is sharded over a mesh: its start, its step, and its test.

  Parameters are ``{"front": ..., "dense": [{"w": ..., "b": ...}, ...]}``.

  Args:
    images: the set.
    codec: of activations and errors.
    args: the options.
    mesh: the workers, on the axis ``AXIS``.
  """

  def __init__(
    self, images: data.ImageSet, codec: Codec, args: argparse.Namespace, mesh: Mesh
  ):
    self.mesh = mesh
    self._codec, self._args, self._images = codec, args, images
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    self._rmsprop = {
      "front": optax.chain(gradcomp.dense(axis_name=AXIS), optax.rmsprop(rate)),
      "dense": optax.rmsprop(rate),
    }
    self._specs = jax.tree.map_with_path(_spec, jax.eval_shape(self._start, 0))
    # Where the samples of a convolution lie; dense layers take the whole batch.
    self._samples = P(AXIS) if args.channels else P()
    batch = self._samples, P()
    cut = functools.partial(jax.shard_map, mesh=mesh)
    local_step = cut(
      self._local_step,
      in_specs=(*self._specs, batch),
      out_specs=(*self._specs, P()),
    )
    self.step = jax.jit(local_step, donate_argnums=(0, 1))
    local_scores = cut(
      self._local_scores, in_specs=(self._specs[0], batch), out_specs=P()
    )
    self._scores = jax.jit(local_scores)

  def start(self, seed: int) -> tuple[Any, Any]:
    """Draws parameters and makes the state; equal seeds give equal ones."""
    places = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._specs)
    return jax.jit(self._start, out_shardings=places)(seed)

  def recorded(self) -> dict[str, Any]:
    """Returns the arguments of a record: the optimizer with gradcomp in it."""
    params, _ = jax.eval_shape(self._start, 0)
    return {
      "optimizer": self._rmsprop["front"],
      "params": params["front"],
      "workers": self.mesh.size,
    }

  def place(self, batch: Batch) -> Batch:
    """Puts a batch where the step takes it: labels lie on all workers."""
    images, labels = batch
    place = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))
    return place(images, self._samples), place(labels, P())

  def evaluate(self, params: Any) -> tuple[float, float]:
    """Computes mean loss and accuracy on the test set, with coded activations.

    A last batch is filled up with images of the label -1, which count for nothing.
    """
    images, labels = self._images.test
    size = self._args.batch_size
    totals = np.zeros(2)
    for start in range(0, len(labels), size):
      part = images[start : start + size], labels[start : start + size]
      missing = size - len(part[1])
      full = (
        np.pad(part[0], [(0, missing), (0, 0), (0, 0), (0, 0)]),
        np.pad(part[1], (0, missing), constant_values=-1),
      )
      totals += jax.device_get(self._scores(params, self.place(full)))
    loss, accuracy = (totals / len(labels)).tolist()
    return loss, accuracy

  def _start(self, seed: jax.Array | int) -> tuple[Any, Any]:
    height, width, inputs = self._images.train.images.shape[1:]
    channels, hidden = self._args.channels, self._args.hidden
    first = (height // 2) * (width // 2) * channels or height * width * inputs
    outputs = cut_layers.padded(self._images.classes, self.mesh.size)
    key, own = jax.random.split(jax.random.key(seed))
    params = {
      "front": cut_layers.init_convolution(own, inputs, channels),
      "dense": cut_layers.init(key, (first, hidden, hidden, outputs), self._args.unit),
    }
    kept = {name: rule.init(params[name]) for name, rule in self._rmsprop.items()}
    return params, {
      "rmsprop": kept,
      "key": jax.random.key_data(key),
      "count": jnp.int32(0),
    }

  def _logits(self, params: Any, images: jax.Array, key: jax.Array, **options: Any):
    """Returns ``[passes, B / passes, classes]``, in the order of ``in_passes``."""
    args = self._args
    codec_key = key if self._codec.needs_key else None

    def dense(x: jax.Array, number: jax.Array) -> jax.Array:
      used = jax.random.fold_in(key, number)
      last = len(params["dense"]) - 1

      def gather(y: jax.Array, layer: int) -> jax.Array:
        return parallel.all_gather(
          y,
          axis_name=AXIS,
          codec=self._codec,
          axis=1,
          # The logits are equal on all workers, and so are their errors.
          own="coded" if layer == last else args.own,
          to="invarying" if layer == last else "varying",
          key=None if codec_key is None else jax.random.fold_in(used, layer),
        )

      return cut_layers.apply(
        params["dense"],
        x,
        self._images.classes,
        unit=args.unit,
        gather=gather,
        key=used,
        own_key=jax.random.fold_in(used, len(params["dense"]) + lax.axis_index(AXIS)),
        **options,
      )

    x = cut_layers.features(params["front"], images)
    if params["front"]:
      return sub_batches(
        dense,
        x,
        axis_name=AXIS,
        passes=args.passes,
        codec=self._codec,
        own=args.own,
        key=codec_key,
      )
    parts = cut_layers.in_passes(x, self.mesh.size, args.passes)
    return lax.map(lambda given: dense(*given), (parts, jnp.arange(args.passes)))

  def _losses(self, params: Any, batch: Batch, key: jax.Array, **options: Any):
    images, labels = batch
    labels = cut_layers.in_passes(labels, self.mesh.size, self._args.passes)
    logits = self._logits(params, images, key, **options)
    known = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, known)
    return losses, logits.argmax(axis=-1) == labels, labels >= 0

  def _local_step(self, params: Any, state: Any, batch: Batch) -> Any:
    key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["count"])
    # Each worker's own gradient of the front, which the exchange averages.
    marked = params | {
      "front": gradcomp.defer_reduction(params["front"], axis_name=AXIS)
    }

    def loss_fn(params: Any) -> jax.Array:
      return self._losses(params, batch, key, dropout=cut_layers.DROPOUT)[0].mean()

    loss, grads = jax.value_and_grad(loss_fn)(marked)
    # The loss is that of the whole batch, so workers' gradients are to be added up.
    grads["front"] = jax.tree.map(lambda g: g * self.mesh.size, grads["front"])
    kept, params = {}, dict(params)
    for name, rule in self._rmsprop.items():
      updates, kept[name] = rule.update(grads[name], state["rmsprop"][name])
      params[name] = optax.apply_updates(params[name], updates)
    state = {"rmsprop": kept, "key": state["key"], "count": state["count"] + 1}
    return params, state, {"loss": loss}

  def _local_scores(self, params: Any, batch: Batch) -> jax.Array:
    losses, right, counts = self._losses(params, batch, jax.random.key(0))
    return jnp.array([jnp.sum(x * counts) for x in (losses, right)])


def _spec(path: Any, leaf: Any) -> P:
  """Returns the spec of a parameter or of its moments: columns of dense layers."""
  if "'dense'" not in jax.tree_util.keystr(path) or not leaf.ndim:
    return P()
  return P(None, AXIS) if leaf.ndim == 2 else P(AXIS)
