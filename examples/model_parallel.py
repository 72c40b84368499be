"""Trains a net whose dense layers are cut over workers, which send activations.

    python examples/model_parallel.py --codec linear
    python examples/model_parallel.py --compare f32 linear qsgd-4 --seeds 3
    python examples/model_parallel.py --channels 32 --passes 4 --checkpoints saved

The net is Dettmers' (2016): two hidden layers with dropout, trained by RMSProp. Each
layer is cut by its outputs. Workers gather activations after the unit, and scatter the
errors of their inputs, both in the codec. With ``--channels``, a convolution stands in
front. It is whole on every worker, each convolves its own samples, and its gradients
are averaged in float32. Without accelerators it emulates eight devices on the CPU.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cut_layers
import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import report
from image_classification import CODECS, footnote, positive
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from progress import Progress
from training import Batch, Run, train

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import Codec

AXIS = "model"
# All codecs but the sparse ones, and those that need error feedback or a memory.
NAMES = (
  "f32",
  "bf16",
  "dynamic-tree",
  "dynamic-map",
  "static-tree",
  "linear",
  "mantissa",
  "qsgd-8",
  "qsgd-4",
  "qsgd-2",
  "terngrad",
  "aps-5-2",
  "aps-4-3",
)
COMPARED = ("f32", "dynamic-tree", "static-tree", "linear", "mantissa")


class Task:
  """A net that is cut over a mesh: how it starts, takes a step, and is tested.

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
          AXIS,
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
      return parallel.sub_batches(
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
    marked = params | {"front": gradcomp.defer_reduction(params["front"], AXIS)}

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


class Saved:
  """Keeps the state of a run in a folder, or nothing where there is no folder."""

  def __init__(self, folder: Path | None, every: int):
    self._manager = None
    if folder is not None:
      options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
      self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

  def restore(self, state: Any) -> tuple[int, Any]:
    """Returns the steps done and the state after them, or ``state`` as it is."""
    step = self._manager.latest_step() if self._manager else None
    if step is None:
      return 0, state
    return step, self._manager.restore(step, args=ocp.args.StandardRestore(state))

  def save(self, step: int, state: Any) -> None:
    """Saves, if it is time to."""
    if self._manager:
      self._manager.save(step, args=ocp.args.StandardSave(state))
      # The next step takes the memory of these arrays.
      self._manager.wait_until_finished()

  def close(self) -> None:
    if self._manager:
      self._manager.close()


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parser.parse_args(argv)
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
  if args.batch_size % (mesh.size * args.passes):
    parser.error(
      f"--batch-size must be a multiple of {mesh.size} workers x {args.passes} passes"
    )
  if args.hidden % mesh.size:
    parser.error(f"--hidden must be a multiple of the {mesh.size} workers")
  images = data.load(args.dataset, args.data_dir)
  names = [args.codec] if args.compare is None else args.compare or COMPARED
  runs = []
  for name in names:
    runs += run_codec(name, Task(images, CODECS[name], args, mesh), images, args)
  print(report.table(runs))
  print(footnote(mesh.size).replace("mean", "exchange"))
  title = f"dense layers cut over {mesh.size} workers, {args.dataset}"
  print("wrote", *report.write(runs, args.output, title=title))


def run_codec(
  name: str, task: Task, images: data.ImageSet, args: argparse.Namespace
) -> list[Run]:
  """Compiles the step once for all seeds, and trains from each."""
  batches = functools.partial(data.batches, images.train, args.batch_size)
  batch = task.place(next(batches(seed=0)))
  step = task.step.lower(*task.start(0), batch).compile()
  wire = gradcomp.wire_report(step)
  runs = []
  for seed in range(args.seed, args.seed + args.seeds):
    folder = args.checkpoints and args.checkpoints / f"{name}-{seed}"
    saved = Saved(folder, args.save_every)
    first, state = saved.restore(task.start(seed))
    if first >= args.steps:
      raise SystemExit(
        f"{folder} has all {first} steps: choose more, or another folder"
      )
    drawn = batches(seed=seed)
    for _ in range(first):
      next(drawn)
    with Progress(f"{name} seed {seed}", args.steps - first) as progress:
      points, step_ms = train(
        task,
        step,
        *state,
        drawn,
        steps=args.steps,
        evaluate_every=args.evaluate_every,
        bytes_a_step=wire.bytes_sent,
        progress=progress,
        first=first,
        after=saved.save,
      )
    saved.close()
    runs.append(Run(name, seed, wire.bytes_sent, wire.dense_bytes, step_ms, points))
  return runs


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument_group("task").add_argument
  add(
    "--dataset",
    choices=("digits", "mnist", "fashion_mnist", "cifar10"),
    default="digits",
    help="digits (default) is embedded, the others download once",
  )
  add("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  add("--hidden", type=positive, default=1024, help="units of a layer; default: 1024")
  add("--unit", choices=tuple(cut_layers.UNITS), default="relu", help="default: relu")
  add("--channels", type=int, default=0, help="of a convolution; default: 0, no such")
  add("--learning-rate", type=float, default=0.003, help="at first; default: 0.003")
  add("--batch-size", type=positive, default=128, help="of all workers; default: 128")
  add("--steps", type=positive, default=200, help="default: 200")
  add("--seed", type=int, default=0, help="of parameters, batches and dropout")

  add = parser.add_argument_group("exchange").add_argument
  add(
    "--codec",
    choices=NAMES,
    default="dynamic-tree",
    metavar="CODEC",
    help=f"one of {', '.join(NAMES)}; default: dynamic-tree",
  )
  add(
    "--own",
    choices=("exact", "coded"),
    default="exact",
    help="whether a worker takes its own part as it is (default) or rounded, too",
  )
  add("--passes", type=positive, default=1, help="sub-batches of a batch; default: 1")

  add = parser.add_argument_group("comparison").add_argument
  add(
    "--compare",
    nargs="*",
    choices=NAMES,
    metavar="CODEC",
    help=f"train several from one initialisation; without names: {' '.join(COMPARED)}",
  )
  add("--seeds", type=positive, default=1, help="as many seeds; default: 1")
  add(
    "--evaluate-every",
    type=positive,
    default=10,
    help="steps between two points of the curves; default: 10",
  )
  add(
    "--output",
    type=Path,
    default=Path("results"),
    help="folder of summary.csv, curves.csv and curves.png; default: results",
  )

  add = parser.add_argument_group("devices and checkpoints").add_argument
  add(
    "--devices",
    type=positive,
    default=8,
    help="CPU devices to emulate, where there are no accelerators; default: 8",
  )
  add("--checkpoints", type=Path, help="folder to save to, and to go on from")
  add("--save-every", type=positive, default=50, help="steps; default: 50")
  return parser


if __name__ == "__main__":
  main()
