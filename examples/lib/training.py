"""Training: compiles a step, counts its bytes, and follows the curve of one seed."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradcomp
from examples.lib.averaging import averaged
from examples.lib.calling import Model, functions
from examples.lib.checkpoints import Saved
from examples.lib.plateau import observe
from examples.lib.progress import Progress
from examples.lib.telemetry import Log

AXIS = "data"
Batch = tuple[np.ndarray, np.ndarray]  # inputs and labels: a Split, or Tokens
REPLICATED = PartitionSpec()
NOWHERE = Saved()
_SCORED = 8192  # labels that are tested at once


class Point(NamedTuple):
  """A point of a curve."""

  step: int
  bytes_sent: int  # by each worker, in all steps so far
  train_loss: float  # mean over the steps since the point before
  test_loss: float
  test_accuracy: float


class Run(NamedTuple):
  """The results of one codec with one seed."""

  codec: str
  seed: int
  bytes_a_step: int  # sent by each worker, read from the compiled step
  f32_bytes_a_step: int  # what a plain float32 mean of the same gradient sends
  step_ms: float  # median
  points: list[Point]


class Task:
  """A model and a test set on a mesh, which all runs of a comparison share.

  Args:
    model: makes the network of flax nnx from ``rngs``, or is one of flax linen.
    test: evaluated whole, on one device of each process.
    mesh: all devices, on the axis ``AXIS``.
    spec: how parameters lie on the mesh; by default all devices have all of them.
    known: inputs to train on, by whose statistics a batch norm normalizes in tests.

  Attributes:
    loss_fn: the mean loss of ``(params, batch)``. Networks with dropout also need
      ``rng``, a key, and those with a loop over their blocks ``scan``.
    drops: whether the network has dropout.
  """

  def __init__(
    self,
    model: Model,
    test: Batch,
    mesh: Mesh,
    spec: PartitionSpec = REPLICATED,
    known: np.ndarray | None = None,
  ):
    network = functions(model, test[0][:1])
    if network.statistics and known is None:
      raise ValueError(
        "`known` must be inputs to train on, for a network with batch norm, got None."
      )

    def loss_of(params: Any, batch: Batch, rng: Any, **loop: Any) -> jax.Array:
      inputs, labels = batch
      logits = network.train(params, inputs, rng, **loop)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss_fn(params: Any, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
      return loss_of(params, batch, rng)

    def scanned(
      params: Any, batch: Batch, rng: jax.Array | None = None, *, scan: Any
    ) -> jax.Array:
      return loss_of(params, batch, rng, scan=scan)

    def scores(params: Any, statistics: Any, batch: Batch) -> jax.Array:
      inputs, labels = batch
      logits = network.test(params, statistics, inputs)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return jnp.array([losses.sum(), (logits.argmax(axis=-1) == labels).sum()])

    self.mesh = mesh
    self.loss_fn: Any = scanned if network.scans else loss_fn
    self.drops = network.drops
    self._scores = jax.jit(scores)
    self._statistics = network.statistics and jax.jit(network.statistics)
    self._test, self._known = test, known
    replicated = NamedSharding(mesh, REPLICATED)
    # Jitted, so that every process places the same parameters on its own devices.
    self._init = jax.jit(network.init, out_shardings=NamedSharding(mesh, spec))
    self._whole = jax.jit(lambda x: x, out_shardings=replicated)
    self._key = jax.jit(
      lambda seed, step: jax.random.fold_in(jax.random.key(seed), step),
      out_shardings=replicated,
    )

  def init_params(self, seed: int) -> Any:
    """Draws parameters on all devices; equal seeds give equal parameters."""
    # The initializers compile in a second with this generator, in six with the default.
    return self._init(jax.random.key(seed, impl="rbg"))

  def options(self, seed: int, step: int) -> dict[str, jax.Array]:
    """Returns the further arguments of a train step: a key for dropout, or none."""
    return {"rng": self._key(seed, step)} if self.drops else {}

  def place(self, batch: Batch) -> Batch:
    """Places a batch on the workers, from the part that each process holds."""
    cut = NamedSharding(self.mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(cut, x), batch)

  def evaluate(self, params: Any) -> tuple[float, float]:
    """Computes mean loss and accuracy on the test set.

    Every worker holds the same parameters, to the bit, so one device's copy serves and
    no process has to wait for another, unless parameters are cut.
    """
    if not all(x.is_fully_replicated for x in jax.tree.leaves(params)):
      params = self._whole(params)
    local = jax.tree.map(lambda x: x.addressable_data(0), params)
    statistics = self._statistics and self._statistics(local, self._known)
    _, labels = self._test
    totals = np.zeros(2)
    # Of texts fewer at once, for each of their labels has logits of its own.
    count = min(1000, max(1, _SCORED * len(labels) // labels.size))
    for start in range(0, len(labels), count):
      part = tuple(x[start : start + count] for x in self._test)
      totals += jax.device_get(self._scores(local, statistics, part))
    loss, accuracy = (totals / labels.size).tolist()
    return loss, accuracy


def compile_step(
  task: Task,
  optimizer: optax.GradientTransformation,
  batch: Batch,
  *,
  inspect: bool = False,
) -> tuple[Callable[..., Any], Any]:
  """Compiles a train step, and returns it with the report of the bytes it sends.

  With ``inspect`` the step inspects the compression of each leaf, too.
  """
  step = gradcomp.make_train_step(
    task.loss_fn, optimizer, axis_name=AXIS, mesh=task.mesh
  )
  params = task.init_params(0)
  args = params, init_state(task, optimizer, params), task.place(batch)
  own = {"inspect": True} if inspect else {}
  compiled = step.lower(*args, **own, **task.options(0, 0)).compile()
  return compiled, gradcomp.wire_report(compiled)


def init_state(task: Task, optimizer: optax.GradientTransformation, params: Any) -> Any:
  """Makes the optimizer's state, with residuals spread over the workers."""
  with jax.set_mesh(task.mesh):
    return optimizer.init(params)


def mean_here(loss: jax.Array) -> float:
  """Averages over the workers of this process, where each has a loss of its own."""
  return float(np.mean([x.data for x in loss.addressable_shards], dtype=np.float64))


def train(
  task: Task,
  step: Callable[..., Any],
  params: Any,
  opt_state: Any,
  batches: Iterator[Batch],
  *,
  steps: int,
  evaluate_every: int,
  bytes_a_step: int,
  progress: Progress,
  options: Callable[[int], dict[str, Any]] = lambda step: {},
  saved: Saved = NOWHERE,
  log: Log | None = None,
) -> tuple[list[Point], float]:
  """Runs steps up to number ``steps``, counting the steps of earlier runs.

  Args:
    options: returns the further arguments of the step with a number.
    saved: where the run goes on from, and what keeps it.
    log: takes some steps of its own, and keeps what they show.

  Returns:
    The curve, and the median time of a step in milliseconds, NaN if all steps had been
    done before.
  """
  log = Log() if log is None else log
  first, (params, opt_state), curve = saved.restore(
    (params, opt_state), batches, {"points": [], "losses": []}
  )
  points, losses = [Point(*point) for point in curve["points"]], curve["losses"]
  seconds: list[float] = []
  progress.skip(first)
  for done in range(first + 1, steps + 1):
    batch = task.place(next(batches))
    start = time.perf_counter()
    run = log.step if log.takes(done) else step
    params, opt_state, metrics = jax.block_until_ready(
      run(params, opt_state, batch, **options(done))
    )
    seconds.append(time.perf_counter() - start)
    losses.append(mean_here(metrics["loss"]))
    log.keep(done, metrics)
    facts = {}
    if done % evaluate_every == 0 or done == steps:
      test_loss, accuracy = task.evaluate(averaged(opt_state, params))
      train_loss = statistics.fmean(losses)
      points.append(Point(done, done * bytes_a_step, train_loss, test_loss, accuracy))
      losses.clear()
      facts = {"loss": f"{train_loss:.4f}", "accuracy": f"{accuracy:.2%}"}
      opt_state = observe(opt_state, train_loss)
    saved.save(done, (params, opt_state), {"points": points, "losses": losses})
    progress.step(**facts)
  return points, 1000 * statistics.median(seconds or [math.nan])
