"""A task to train on: the functions of a network, its loss, its test and its step."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding

import gradcomp

AXIS = "data"
Batch = tuple[np.ndarray, np.ndarray]  # inputs and labels: a Split, or Tokens
REPLICATED = jax.P()
_SCORED = 8192  # labels that are tested at once
Model = Callable[..., nnx.Module] | linen.Module


def takes_dropout(model: Any) -> bool:
  """Returns whether a class of networks has the option ``dropout``."""
  return "dropout" in inspect.signature(model.__init__).parameters


class Functions(NamedTuple):
  """The functions of a network, each of its parameters."""

  init: Callable[..., Any]  # key -> params
  # params, inputs, key for dropout or None, scan= where blocks are a loop -> logits
  train: Callable[..., jax.Array]
  # params, inputs -> what batch norms normalize by; None where there are none.
  statistics: Callable[..., Any] | None
  test: Callable[..., jax.Array]  # params, statistics, inputs -> logits
  drops: bool  # whether it draws while it trains, as dropout does
  scans: bool = False  # whether blocks are a loop over stacked parameters


def functions(model: Model, inputs: np.ndarray) -> Functions:
  """Returns the functions of a network of flax nnx, made from ``rngs``, or of linen."""
  return _of_linen(model, inputs) if isinstance(model, linen.Module) else _of_nnx(model)


def _of_linen(model: linen.Module, inputs: np.ndarray) -> Functions:
  drops = getattr(model, "dropout", 0.0) > 0

  def train(params: Any, inputs: jax.Array, key: Any, **loop: Any) -> jax.Array:
    rngs = {} if key is None else {"dropout": key}
    loop |= {"train": True, "rngs": rngs} if drops else {}
    return model.apply({"params": params}, inputs, **loop)

  return Functions(
    init=lambda key: model.init(key, inputs)["params"],
    train=train,
    statistics=None,
    test=lambda params, _, inputs: model.apply({"params": params}, inputs),
    drops=drops,
    scans=getattr(model, "stacked", False),
  )


def _of_nnx(model: Callable[..., nnx.Module]) -> Functions:
  shapes = nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0)))
  parts = [part for _, part in nnx.iter_modules(shapes)]
  # Those that draw can be deterministic; dropout of the rate 0 draws nothing.
  draws = lambda part: hasattr(part, "deterministic") and getattr(part, "rate", 1) > 0
  drops = any(map(draws, parts))

  def graph(**modes: bool) -> Any:
    """Returns the network without its arrays, in other modes than it was made in."""
    shapes.set_attributes(**modes, raise_if_not_found=False)
    definition, _, kept = nnx.split(shapes, nnx.Param, nnx.BatchStat)
    return definition, kept

  training, kept = graph(deterministic=False, use_running_average=False)
  looking, _ = graph(deterministic=True, use_running_average=False)
  testing, _ = graph(deterministic=True, use_running_average=True)

  # Statistics that are not read before they are set.
  blank = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)

  def train(params: Any, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
    rngs = {"rngs": nnx.Rngs(dropout=key)} if drops and key is not None else {}
    return nnx.merge(training, params, blank())(inputs, **rngs)

  def statistics(params: Any, inputs: jax.Array) -> Any:
    network = nnx.merge(looking, params, blank())
    network(inputs)
    return nnx.state(network, nnx.BatchStat)

  def test(params: Any, statistics: Any, inputs: jax.Array) -> jax.Array:
    found = kept if statistics is None else statistics
    return nnx.merge(testing, params, found)(inputs)

  return Functions(
    init=lambda key: nnx.state(model(rngs=nnx.Rngs(key)), nnx.Param),
    train=train,
    statistics=statistics if jax.tree.leaves(kept) else None,
    test=test,
    drops=drops,
  )


class Task:
  """A model and a test set on a mesh, which all runs of a comparison share.

  ``loss_fn`` is the mean loss of ``(params, batch)``. Networks with dropout also need
  ``rng``, a key, and those with a loop over their blocks ``scan``. A batch norm
  normalizes in tests by the statistics of the ``known`` inputs.
  """

  def __init__(
    self, model: Model, test: Batch, mesh: Mesh, spec: jax.P = REPLICATED, known=None
  ):
    network = functions(model, test[0][:1])
    if network.statistics and known is None:
      raise ValueError("`known` must be inputs to train on, for batch norm, got None.")

    def loss_fn(params: Any, batch: Batch, rng: Any = None, **loop: Any) -> jax.Array:
      inputs, labels = batch
      logits = network.train(params, inputs, rng, **loop)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def scanned(params: Any, batch: Batch, rng: Any = None, *, scan: Any) -> jax.Array:
      return loss_fn(params, batch, rng, scan=scan)

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
    replicated = NamedSharding(mesh, jax.P())
    # Jitted, so that every process places the same parameters on its own devices.
    self._init = jax.jit(network.init, out_shardings=NamedSharding(mesh, spec))
    self._whole = jax.jit(lambda x: x, out_shardings=replicated)
    key_of = lambda seed, step: jax.random.fold_in(jax.random.key(seed), step)
    self._key = jax.jit(key_of, out_shardings=replicated)

  def init_params(self, seed: int) -> Any:
    """Draws parameters on all devices; equal seeds give equal parameters."""
    # The initializers compile in a second with this generator, in six with the default.
    return self._init(jax.random.key(seed, impl="rbg"))

  def options(self, seed: int, step: int) -> dict[str, jax.Array]:
    """Returns the further arguments of a train step: a key for dropout, or none."""
    return {"rng": self._key(seed, step)} if self.drops else {}

  def place(self, batch: Batch) -> Batch:
    """Places a batch on the workers, from the part that each process holds."""
    cut = NamedSharding(self.mesh, jax.P(AXIS))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(cut, x), batch)

  def evaluate(self, params: Any) -> tuple[float, float]:
    """Computes mean loss and accuracy on the test set."""
    # All workers hold the same bits, so one device's copy serves, and no process waits
    # for another, unless parameters are cut.
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
    return tuple((totals / labels.size).tolist())


def compile_step(
  task: Task, optimizer: Any, batch: Batch, step: Any = None, *, inspect: bool = False
) -> tuple[Callable[..., Any], Any]:
  """Compiles a train step, which may inspect itself; returns its bytes, too."""
  over = {"axis_name": AXIS, "mesh": task.mesh}
  step = step or gradcomp.make_train_step(task.loss_fn, optimizer, **over)
  params = task.init_params(0)
  args = params, init_state(task, optimizer, params), task.place(batch)
  own = {"inspect": True} if inspect else {}
  compiled = step.lower(*args, **own, **task.options(0, 0)).compile()
  return compiled, gradcomp.wire_report(compiled)


def init_state(task: Task, optimizer: optax.GradientTransformation, params: Any) -> Any:
  """Makes the optimizer's state, with residuals spread over the workers."""
  with jax.set_mesh(task.mesh):
    return optimizer.init(params)
