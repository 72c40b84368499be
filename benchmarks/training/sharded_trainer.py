"""Trains by vmap with parameters that are whole on each worker, or cut over them."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp
from benchmarks.common.trainer import Emulated, Plan, point
from examples.lib.data import text
from examples.lib.sharded.fsdp import Fsdp
from examples.lib.training import AXIS, Task
from gradcomp import parallel
from gradcomp.codecs import QSGD, Codec, Dense

WORKERS = 4
POINTS = 3  # of a curve
Way = Literal["data", "zero", "fsdp"]


class Arm(NamedTuple):
  """Says what workers send, in which codecs, and whether they keep what is lost."""

  way: Way
  grads: Codec = Dense()
  weights: Codec = Dense()  # with ZeRO, of what changes in them
  feedback: Literal["error"] | None = None  # of gradients


class Setting(NamedTuple):
  """The settings that all arms share."""

  task: Task
  train: Any  # the text
  steps: int
  rate: float
  batch: int  # sequences of all workers
  length: int


# zero's state of it has the rows of the parameters that a worker owns.
KEEPS_PARAMETERS = optax.GradientTransformation(
  lambda params: params, lambda updates, state, _: (updates, state)
)


def adam_of(setting: Setting) -> optax.GradientTransformation:
  """Returns Adam, whose rate rises in a twentieth of the steps and falls to zero."""
  rate = optax.warmup_cosine_decay_schedule(
    0.0, setting.rate, setting.steps // 20, setting.steps
  )
  return optax.adam(rate)


def optimizer_of(arm: Arm, adam: optax.GradientTransformation) -> Any:
  """Returns what exchanges and optimizes, where all workers have all parameters."""
  if arm.way == "zero":
    return parallel.zero(
      adam,
      grads=arm.grads,
      params=arm.weights,
      axis_name=AXIS,
      feedback=arm.feedback,
    )
  exchange = gradcomp.compress(arm.grads, axis_name=AXIS, feedback=arm.feedback)
  return optax.chain(exchange, adam)


def fsdp_of(arm: Arm, adam: optax.GradientTransformation, loss_fn: Any) -> Fsdp:
  """Returns what takes steps with parameters that are cut."""
  return Fsdp(
    loss_fn=loss_fn,
    optimizer=adam,
    weights=arm.weights,
    grads=arm.grads,
    feedback=arm.feedback is not None,
  )


def whole(arm: Arm, adam: optax.GradientTransformation, loss_fn: Any) -> Plan:
  """Has the same parameters on all workers."""
  optimizer = optimizer_of(arm, adam)

  def step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, kept = optimizer.update(grads, state, params)
    after = optax.apply_updates(params, updates)
    found = {}
    if arm.way == "zero":
      keeps = optimizer_of(arm, KEEPS_PARAMETERS)
      rows = lambda params: keeps.init(params).inner_state
      owned = optax.tree.add(rows(after), kept.unsent)
      found = behind(owned, rows(params), rows(after), arm.weights)
      equal = lambda x: jnp.all(lax.pmax(x, AXIS) == lax.pmin(x, AXIS))
      found["equal"] = jnp.all(jnp.stack([*map(equal, jax.tree.leaves(after))]))
    return after, kept, loss, found

  init = lambda params: (params, optimizer.init(params))
  return Plan(init, step)


@jax.jit
def first(stacked: Any) -> Any:
  """Returns the parameters of the first of workers that have the same."""
  return jax.tree.map(lambda x: x[0], stacked)


def behind(master: Any, before: Any, after: Any, codec: Codec) -> dict[str, jax.Array]:
  """Returns how far an owner's rows are from what all workers have, at most.

  ``"halves"``: in halves of the codec's step in a bucket's differences of this step.
  """
  distances, halves = [jnp.float32(0)], [jnp.float32(0)]
  for m, p, q in zip(*map(jax.tree.leaves, (master, before, after)), strict=True):
    distance = jnp.abs(m - q)
    distances.append(jnp.max(distance))
    if isinstance(codec, QSGD) and m.shape[-1] == codec.bucket_size:
      levels = 2 ** (codec.bits - 1) - 1
      half = jnp.max(jnp.abs(m - p), axis=-1) / levels / 2
      # The sums m - p and p + d are rounded, by half a unit in the last place each.
      half += jnp.finfo(jnp.float32).eps * jnp.max(jnp.abs(m), axis=-1)
      # Both are 0 where nothing but zeros fill a bucket up.
      halves.append(jnp.max(jnp.max(distance, axis=-1) / jnp.maximum(half, 1e-30)))
  return {"distance": jnp.stack(distances).max(), "halves": jnp.stack(halves).max()}


def cut(arm: Arm, adam: optax.GradientTransformation, loss_fn: Any) -> Plan:
  """Has an Nth of the parameters on each worker."""
  fsdp = fsdp_of(arm, adam, loss_fn)

  def init(params: Any) -> Any:
    i = lax.axis_index(AXIS)
    rows = lambda x: lax.dynamic_slice_in_dim(
      x, i * (len(x) // WORKERS), len(x) // WORKERS
    )
    shards = jax.tree.map(rows, params)
    return shards, fsdp.init(shards)

  def step(shards: Any, state: Any, batch: Any) -> Any:
    shards, state, metrics = fsdp.step(shards, state, batch)
    return shards, state, metrics["loss"], {}

  return Plan(init, step)


@jax.jit
def concatenated(stacked: Any) -> Any:
  """Joins the shards of all workers."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


def compiled(setting: Setting, arm: Arm) -> Callable[[int], dict[str, Any]]:
  """Returns what trains an arm from a seed: the curve, and what was checked."""
  make, joined = (cut, concatenated) if arm.way == "fsdp" else (whole, first)
  workers = Emulated(make(arm, adam_of(setting), setting.task.loss_fn), WORKERS)
  steps = setting.steps // POINTS

  def train(seed: int) -> dict[str, Any]:
    params = jax.device_get(setting.task.init_params(seed))
    batches = text.batches(setting.train, setting.batch, setting.length, seed=seed)
    points, checked = [], []
    for part in workers.parts(params, batches, POINTS, steps):
      checked.append(part.found)
      evaluated = setting.task.evaluate(joined(part.carry[0]))
      reached = point(len(checked) * steps, float(part.losses.mean()), evaluated)
      reached["perplexity"] = math.exp(min(reached["test_loss"], 50.0))
      points.append(reached | {"step_ms": 1000 * part.seconds / steps})
    return {"points": points, **_summary(checked)}

  return train


def _summary(checked: list[dict[str, Any]]) -> dict[str, Any]:
  """Sums up what all steps found."""
  if not checked[0]:
    return {}
  return {
    "always_equal": all(bool(x["equal"].all()) for x in checked),
    "largest_distance": max(float(x["distance"].max()) for x in checked),
    "largest_in_half_steps": max(float(x["halves"].max()) for x in checked),
  }
