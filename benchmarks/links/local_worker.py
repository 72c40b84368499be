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
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.links import hosts
from benchmarks.links.process import joined, meeting, run
from examples.lib.data import text
from examples.lib.networks.transformer import Transformer
from gradcomp.codecs import BlockTop, Dense

AXIS = "data"
RATE = 1e-3


def optimizer(method: str, every: int) -> optax.GradientTransformation:
  """Makes one of the methods that are compared."""
  adam = optax.adamw(RATE)
  local = lambda outer, codec, **options: gradcomp.local.local_steps(
    adam,
    outer,
    axis_name=AXIS,
    every=every,
    codec=codec,
    options=gradcomp.local.LocalOptions(**options),
  )
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


class Trainer:
  """Compiles a method's step, and takes it."""

  def __init__(self, mesh: jax.sharding.Mesh, method: str, options: dict[str, Any]):
    length, batch = options["length"], options["batch"]
    model = Transformer(
      text.CHARACTERS, width=options["width"], layers=options["layers"]
    )
    tokens = text.batches(
      text.load().train,
      batch * mesh.size,
      length,
      seed=0,
      part=options["rank"],
      parts=mesh.size,
    )
    cut = jax.NamedSharding(mesh, jax.P(AXIS))

    def place(given: Any) -> Any:
      put = lambda x: jax.make_array_from_process_local_data(cut, x)
      return jax.tree.map(put, given)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
      inputs, labels = batch
      logits = model.apply({"params": params}, inputs)
      loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return loss.mean()

    tx = optimizer(method, options["every"])
    example = jnp.zeros((1, length), jnp.uint8)
    init = lambda key: model.init(key, example)["params"]
    whole = jax.NamedSharding(mesh, jax.P())
    self.params = jax.jit(init, out_shardings=whole)(jax.random.key(0, impl="rbg"))
    with jax.set_mesh(mesh):
      self.state = tx.init(self.params)
    step = gradcomp.make_train_step(loss_fn, tx, axis_name=AXIS, mesh=mesh)
    self._next = lambda: place(next(tokens))
    lowered = step.lower(self.params, self.state, self._next())
    self._step = lowered.compile()
    self.wire = gradcomp.wire_report(self._step)
    self.size = sum(x.size for x in jax.tree.leaves(self.params))

  def step(self) -> float:
    """Takes a step, and returns its seconds."""
    batch = jax.block_until_ready(self._next())
    start = time.perf_counter()
    self.params, self.state, metrics = jax.block_until_ready(
      self._step(self.params, self.state, batch)
    )
    del metrics
    return time.perf_counter() - start


def measure(
  trainer: Trainer, steps: int, every: int, meet: Callable[[], Any], interface: str
) -> dict[str, Any]:
  """Takes steps one after the other, and returns their seconds and bytes.

  Then it takes a round whose last step begins on all hosts at once, and so does a step
  before: their difference is what communication takes, and not what hosts wait for one
  that is late.
  """
  meet()
  sent, start = hosts.bytes_sent(interface), time.perf_counter()
  for _ in range(steps):
    trainer.step()
  seconds = time.perf_counter() - start
  meet()
  sent = hosts.bytes_sent(interface) - sent
  alone, together = [], []
  for _ in range(steps // every):
    for i in range(1, every + 1):
      if i >= every - 1:
        meet()
      taken = trainer.step()
      if i == every - 1:
        alone.append(taken)
    together.append(taken)
  return {"seconds": seconds, "sent": sent, "alone": alone, "together": together}


def main(options: dict[str, Any]) -> dict[str, Any]:
  mesh = joined(options)
  meet = meeting(mesh)
  trainer = Trainer(mesh, options["method"], options)
  for _ in range(options["first"]):
    trainer.step()
  size = (options["steps"], options["exchanged_every"])
  return {
    "parameters": trainer.size,
    "wire_report": trainer.wire.bytes_sent,
    **measure(trainer, *size, meet, options["interface"]),
  }


if __name__ == "__main__":
  run(main)
