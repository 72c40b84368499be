"""Times training steps on one host, as a process with one device and gloo to others.

  python -m benchmarks.links.local_worker '{"rank": 0, ...}'    links/local.py starts it

All hosts meet before each step that is timed alone, so that none waits in a step for
one that is late. They do not meet in the rounds whose whole time counts.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import gradcomp
from benchmarks.links import hosts
from benchmarks.links.process import joined, meeting, run
from benchmarks.training.local import by_local_steps
from examples.lib.data import text
from examples.lib.networks import Transformer
from examples.lib.training import AXIS, Task, compile_step, init_state
from gradcomp.codecs import BlockTop, Dense

RATE = 1e-3


def optimizer(method: str, every: int) -> optax.GradientTransformation:
  """Makes one of the methods that are compared."""
  adam = optax.adamw(RATE)
  local = functools.partial(by_local_steps, every, adam)
  forgetting = gradcomp.ErrorFeedback(residual_decay=0.95)
  sparse = functools.partial(local, codec=BlockTop(), feedback=forgetting)
  methods: dict[str, Callable[[], optax.GradientTransformation]] = {
    "f32 psum": lambda: optax.chain(gradcomp.dense(axis_name=AXIS), adam),
    "f32 two_shot": lambda: optax.chain(
      gradcomp.dense(axis_name=AXIS, exchange="two_shot"), adam
    ),
    "QSGD-4 two_shot": lambda: optax.chain(
      gradcomp.qsgd(bits=4, axis_name=AXIS, exchange="two_shot"), adam
    ),
    "DiLoCo two_shot": lambda: local(
      optax.sgd(0.7, 0.9, nesterov=True), Dense(), exchange="two_shot"
    ),
    "SparseLoCo all_gather": lambda: sparse(optax.sgd(1.0), merge="senders"),
    "SparseLoCo two_shot": lambda: sparse(optax.sgd(4.0), exchange="two_shot"),
  }
  return methods[method]()


def stepper(
  mesh: jax.sharding.Mesh, options: dict[str, Any]
) -> tuple[Callable[[], float], dict[str, int]]:
  """Compiles a method's step: returns what takes one and times it, and its sizes."""
  length, found = options["length"], text.load()
  model = Transformer(text.CHARACTERS, width=options["width"], layers=options["layers"])
  task = Task(model, text.in_order(found.test[: 2 * length], length), mesh)
  batches = text.batches(
    found.train,
    options["batch"] * mesh.size,
    length,
    seed=0,
    part=options["rank"],
    parts=mesh.size,
  )
  tx = optimizer(options["method"], options["every"])
  program, wire = compile_step(task, tx, next(batches))
  params = task.init_params(0)
  held = [params, init_state(task, tx, params)]

  def step() -> float:
    batch = jax.block_until_ready(task.place(next(batches)))
    start = time.perf_counter()
    held[:] = jax.block_until_ready(program(*held, batch))[:2]
    return time.perf_counter() - start

  size = sum(x.size for x in jax.tree.leaves(params))
  return step, {"parameters": size, "wire_report": wire.bytes_sent}


def measure(
  step: Callable[[], float],
  steps: int,
  every: int,
  meet: Callable[[], Any],
  interface: str,
) -> dict[str, Any]:
  """Takes steps one after the other, and returns their seconds and bytes.

  Then it takes a round whose last step begins on all hosts at once, and so does a step
  before: their difference is what communication takes, and not what hosts wait for one
  that is late.
  """
  meet()
  sent, start = hosts.bytes_sent(interface), time.perf_counter()
  for _ in range(steps):
    step()
  seconds = time.perf_counter() - start
  meet()
  sent = hosts.bytes_sent(interface) - sent
  alone, together = [], []
  for _ in range(steps // every):
    for i in range(1, every + 1):
      if i >= every - 1:
        meet()
      taken = step()
      if i == every - 1:
        alone.append(taken)
    together.append(taken)
  return {"seconds": seconds, "sent": sent, "alone": alone, "together": together}


def main(options: dict[str, Any]) -> dict[str, Any]:
  mesh = joined(options)
  meet = meeting(mesh)
  step, sizes = stepper(mesh, options)
  for _ in range(options["first"]):
    step()
  size = (options["steps"], options["exchanged_every"])
  return sizes | measure(step, *size, meet, options["interface"])


if __name__ == "__main__":
  run(main)
