"""Times steps on devices that exchange, part by part, and trains on them.

A step's parts are differences between three programs, which run in turn:

  compute        the step without any exchange
  codec          the step that encodes and decodes and exchanges nothing, less compute
  communication  the step, less both

So communication has the decoding and adding of other workers' payloads in it, and what
a device waits for others. Where it overlaps with the computation, it may be below the
time that the bytes need on the wire.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import gradcomp
from benchmarks.common.trainer import Trainer, point
from benchmarks.links import hosts, process
from benchmarks.study import emulated, methods, tasks
from benchmarks.study.settings import Setting
from examples.lib.methods import averaged, observe
from examples.lib.training import AXIS, Batch, Task, compile_step, init_state

PARTS = ("compute", "codec", "communication")
_WARM = 2  # steps of each program that do not count


def batches(source: tasks.Source, setting: Setting, seed: int) -> Iterator[Batch]:
  """Yields this process's part of each batch."""
  return source.batches(
    setting.batch, seed=seed, part=jax.process_index(), parts=jax.process_count()
  )


def chain(setting: Setting, steady: bool = False) -> optax.GradientTransformation:
  """Makes the exchange and what is behind it, see ``methods.make``."""
  return optax.chain(*methods.make(setting, steady=steady))


def apart(task: Task, tx: optax.GradientTransformation, batch: Batch) -> Any:
  """Compiles a step of workers who exchange nothing, and drift apart."""

  def local(params: Any, state: Any, batch: Batch, options: Any) -> Any:
    loss, grads = jax.value_and_grad(task.loss_fn)(params, batch, **options)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = task.init_params(0)
  state = init_state(task, tx, params)
  with jax.set_mesh(task.mesh):
    specs = gradcomp.state_specs(state, axis_name=AXIS)
  step = jax.shard_map(
    local,
    mesh=task.mesh,
    in_specs=(jax.P(), specs, jax.P(AXIS), jax.P()),
    out_specs=(jax.P(), specs, jax.P()),
    check_vma=False,
  )
  program = jax.jit(step, donate_argnums=(0, 1))
  args = params, state, task.place(batch), task.options(0, 0)
  compiled = program.lower(*args).compile()
  return lambda *args, **options: compiled(*args, options)


def timed(
  task: Task, source: tasks.Source, setting: Setting, interface: str = ""
) -> dict[str, Any]:
  """Times steps and their parts, of the slowest process, and counts an interface."""
  drawn = batches(source, setting, 0)
  first = next(drawn)
  whole = chain(setting, steady=True)
  alone = setting._replace(exchange="local")
  local, plain = chain(alone, steady=True), chain(alone._replace(codec="f32"))
  step, wire = compile_step(task, whole, first)
  programs = {
    "step": (step, whole),
    "codec": (apart(task, local, first), local),
    "compute": (apart(task, plain, first), plain),
  }
  held: dict[str, tuple[Any, Any]] = {}
  for name, (_, tx) in programs.items():
    params = task.init_params(0)
    held[name] = params, init_state(task, tx, params)
  meet = process.meeting(task.mesh)
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  sent = []
  for i in range(_WARM + setting.steps):
    batch, options = task.place(next(drawn)), task.options(0, i)
    for name, (program, _) in programs.items():
      meet()
      before = hosts.bytes_sent(interface) if interface else 0
      start = time.perf_counter()
      *carry, _ = jax.block_until_ready(program(*held[name], batch, **options))
      spent = time.perf_counter() - start
      held[name] = carry[0], carry[1]
      if name == "step" and interface:
        meet()
        sent.append(hosts.bytes_sent(interface) - before)
      if i >= _WARM:
        seconds[name].append(spent)
  everyone = multihost_utils.process_allgather(np.array(list(seconds.values())))
  slowest = everyone.reshape(-1, len(programs), setting.steps).max(axis=0)
  found = dict(zip(programs, slowest.tolist(), strict=True))
  return split(found) | {
    "bytes_a_step": wire.bytes_sent,
    "ratio": wire.bytes_sent / wire.dense_bytes if wire.dense_bytes else 1.0,
    "interface_bytes": statistics.median(sent[_WARM:]) if sent else None,
  }


def split(seconds: dict[str, list[float]]) -> dict[str, Any]:
  """Splits a step into the medians of its parts, with the quartiles of the step.

  >>> found = split({"step": [9.0], "codec": [5.0], "compute": [4.0]})
  >>> found["compute"], found["codec"], found["communication"]
  (4.0, 1.0, 4.0)
  """
  median = lambda name: statistics.median(seconds[name])
  step, codec, compute = map(median, ("step", "codec", "compute"))
  low, high = np.quantile(seconds["step"], [0.25, 0.75]).tolist()
  return {
    "step": step,
    "quartiles": [low, high],
    "compute": compute,
    "codec": codec - compute,
    "communication": step - codec,
  }


def trainer(task: Task, source: tasks.Source, setting: Setting) -> Trainer:
  drawn = functools.partial(batches, source, setting)
  program, _ = compile_step(task, chain(setting), next(drawn(0)))

  def start(seed: int) -> Any:
    params = task.init_params(seed)
    return params, init_state(task, chain(setting._replace(seed=seed)), params)

  def step(seed: int, carry: Any, batch: Batch, number: int) -> Any:
    options = task.options(seed, number)
    *carry, metrics = program(*carry, task.place(batch), **options)
    return tuple(carry), metrics["loss"]

  def test(seed: int, carry: Any, number: int, loss: float) -> Any:
    params, state = carry
    reached = point(number, loss, task.evaluate(averaged(state, params)))
    return reached, (params, observe(state, reached["test_loss"]))

  def sent() -> dict[str, Any]:
    params = jax.eval_shape(lambda: task.init_params(0))
    return emulated.sent_bytes(chain(setting), params, setting.workers)

  return Trainer(setting.steps, setting.evaluated, start, drawn, step, test, sent)
