"""Trains a transformer whose optimizer, or whose parameters, are cut over workers.

  python -m benchmarks.training.sharded [--arms NAME ...] [--seeds 3] [--quick]
    [--output FOLDER]

The decoder of the examples, with 410,240 parameters, reads Python's standard library in
1500 batches of 16 sequences of 64 bytes. All arms have Adam with the same rates, the
same initializations and the same batches. Nothing is clipped. The rate is the plain
mean's best of 0.001, 0.002 and 0.004 with one seed and 2000 steps.

  f32               The plain mean of gradients in float32.
  two_shot          The same in 4 bits each way, without residuals.
  ZeRO              Adam runs on a quarter of the parameters. Gradients travel to their
                    owners in 4 bits, and what changes in the parameters in 4 bits.
  FSDP              Parameters are cut. They travel in 8 bits, and gradients in 4 bits.
                    With feedback, workers keep what gradients lose, and send it later.

Four workers are a vmap on one device. Perplexities are those of bytes in the last tenth
of each file, with the float32 parameters. In each step of ZeRO the workers' parameters
are compared with each other, bit by bit, and with the owners' master copies. Bits are
those of the payload that stands for a parameter in a step, in both directions, read
from the same step compiled for four devices: what a worker sends is (N-1)/N of it.

With --output, writes parallel_study.json there after every run, and parallel_study.md
at the end. It leaves out the runs that the file has already.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.common import cli
from benchmarks.common.tables import spread, table
from benchmarks.common.trainer import Emulated, Plan, point
from examples.lib.data import text
from examples.lib.networks import Transformer
from examples.lib.sharded import fsdp
from examples.lib.training import AXIS, REPLICATED, Task, compile_step
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


STEPS, RATE, BATCH, LENGTH = 1500, 2e-3, 16, 64
FOUR, EIGHT = QSGD(bits=4), QSGD(bits=8)
BASELINE = "f32"
ARMS = {
  BASELINE: Arm("data"),
  "two_shot, 4 + 4 bits": Arm("data", FOUR),
  "ZeRO, 4 + 4 bits": Arm("zero", FOUR, FOUR),
  "FSDP, 8 + 4 bits, feedback": Arm("fsdp", FOUR, EIGHT, "error"),
  "FSDP, 8 + 4 bits": Arm("fsdp", FOUR, EIGHT),
}
QUICK = (BASELINE, "ZeRO, 4 + 4 bits", "FSDP, 8 + 4 bits, feedback")
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


def fsdp_of(arm: Arm, adam: optax.GradientTransformation, loss_fn: Any) -> fsdp.Fsdp:
  """Returns what takes steps with parameters that are cut."""
  return fsdp.Fsdp(
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
  cutting = fsdp_of(arm, adam, loss_fn)

  def init(params: Any) -> Any:
    i = lax.axis_index(AXIS)
    rows = lambda x: lax.dynamic_slice_in_dim(
      x, i * (len(x) // WORKERS), len(x) // WORKERS
    )
    shards = jax.tree.map(rows, params)
    return shards, cutting.init(shards)

  def step(shards: Any, state: Any, batch: Any) -> Any:
    shards, state, metrics = cutting.step(shards, state, batch)
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


def make_setting(quick: bool, devices: int = 1, spec: P = REPLICATED) -> Setting:
  """Returns the task of all arms, or a tiny one like it, on so many devices."""
  found = text.load()
  sizes = {"width": 32, "heads": 2, "layers": 1} if quick else {}
  length = 8 if quick else LENGTH
  test = found.test[:1000] if quick else found.test
  mesh = jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])
  model = Transformer(text.CHARACTERS, **sizes)
  task = Task(model, text.in_order(test, length), mesh, spec)
  steps = 2 * POINTS if quick else STEPS
  return Setting(task, found.train, steps, RATE, 4 if quick else BATCH, length)


def byte_counts(arm: Arm, quick: bool) -> dict[str, float]:
  """Reads what a worker sends from the step, compiled for a device a worker."""
  cut = arm.way == "fsdp"
  setting = make_setting(quick, WORKERS, P(AXIS) if cut else REPLICATED)
  task, adam = setting.task, adam_of(setting)
  batch = next(text.batches(setting.train, setting.batch, setting.length, seed=0))
  if cut:
    _, step = fsdp.compile_step(task, fsdp_of(arm, adam, task.loss_fn), batch)
    report = gradcomp.wire_report(step)
  else:
    _, report = compile_step(task, optimizer_of(arm, adam), batch)
  sent = report.bytes_sent
  return {
    "bytes_a_step": sent,
    "bits": 8 * sent * WORKERS / (WORKERS - 1) / elements(task),
  }


def elements(task: Task) -> int:
  """Counts the parameters."""
  return sum(x.size for x in jax.tree.leaves(jax.eval_shape(task.init_params, 0)))


def study(found: dict[str, Any], args: Any, save: Any) -> None:
  """Trains the runs that are not there yet, and saves after each."""
  setting = make_setting(args.quick)
  trainers: dict[str, Callable[[int], dict[str, Any]]] = {}
  for seed in range(args.seeds):
    for name in args.arms:
      rows = found["rows"]
      if str(seed) in rows.get(name, {}).get("runs", {}):
        continue
      if name not in trainers:
        trainers[name] = compiled(setting, ARMS[name])
      if name not in rows:
        rows[name] = {**byte_counts(ARMS[name], args.quick), "runs": {}}
      start = time.perf_counter()
      run = rows[name]["runs"][str(seed)] = trainers[name](seed)
      save()
      end, wall = run["points"][-1]["perplexity"], time.perf_counter() - start
      print(f"{name}, seed {seed}: {end:.4f}, {wall:.0f} s", flush=True)


def header(quick: bool) -> dict[str, Any]:
  """Returns the settings, without results."""
  setting = make_setting(quick)
  return {
    "title": "A quick run, no result" if quick else "A transformer on Python's library",
    "workers": WORKERS,
    "elements": elements(setting.task),
    "steps": setting.steps,
    "batch": setting.batch,
    "length": setting.length,
    "learning_rate": setting.rate,
    "rows": {},
  }


def markdown(found: dict[str, Any]) -> str:
  """Writes the table in Markdown."""
  columns = ("arm", "perplexity", "to f32", "loss to f32", "bits", "bytes a step")
  dense = found["rows"][BASELINE]["runs"]
  lines = [line(name, row, dense) for name, row in found["rows"].items()]
  seeds = len(dense)
  said = [
    f"{found['title']}: {found['elements']:,} parameters, {found['workers']} workers, "
    f"{found['steps']} steps of {found['batch']} sequences of {found['length']} bytes, "
    f"Adam at {found['learning_rate']} along a cosine. Mean and standard deviation "
    f"over {seeds} seeds; differences seed by seed, of perplexity and of loss in "
    "nats. Bits: of the payloads that stand for a parameter, in both directions.",
    table(columns, lines),
  ]
  for name, row in found["rows"].items():
    checked = [run for run in row["runs"].values() if "always_equal" in run]
    if checked:
      said.append(
        f"{name}: all parameters of all workers were "
        f"{'equal' if all(x['always_equal'] for x in checked) else 'NOT equal'} to the "
        "bit after every step. They were at most "
        f"{max(x['largest_distance'] for x in checked):.2g} from the master copies, "
        f"and at most {max(x['largest_in_half_steps'] for x in checked):.4f} of half a "
        "step of the codec."
      )
  return "\n\n".join(said) + "\n"


def line(name: str, row: Any, dense: Any) -> list[str]:
  """Returns the cells of a line of the table."""
  ends = {seed: run["points"][-1] for seed, run in row["runs"].items()}
  losses = [
    end["test_loss"] - dense[seed]["points"][-1]["test_loss"]
    for seed, end in ends.items()
    if seed in dense
  ]
  relative = [100 * (math.exp(x) - 1) for x in losses]
  baseline = row["runs"] is dense
  return [
    name,
    spread([x["perplexity"] for x in ends.values()], digits=3),
    "" if baseline else spread(relative, "+") + " %",
    "" if baseline else spread(losses, "+", 4),
    f"{row['bits']:.2f}",
    f"{row['bytes_a_step']:,}",
  ]


def main() -> None:
  args = cli.options(
    __doc__,
    "two steps a point of three arms with a tiny model",
    "folder of the two files",
    arms=cli.Option([*ARMS], QUICK, choices=ARMS),
    seeds=cli.Option(3, 1),
  )
  jax.config.update("jax_num_cpu_devices", WORKERS)
  file = args.output and args.output / "parallel_study.json"
  found = json.loads(file.read_text()) if file and file.exists() else header(args.quick)

  def save() -> None:
    if file:
      cli.write_json(file, found)

  study(found, args, save)
  print(markdown(found))
  if file:
    file.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
  main()
