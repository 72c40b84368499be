"""Trains with workers that one device emulates: accuracy and bytes, but no times.

A step is two calls from Python and no ``lax.scan``, since XLA:CPU computes convolutions
in a loop's body twenty times as slowly as outside: 3.0 s against 0.11 s of CPU time for
LeNet's gradient of 128 images of 28 x 28. For the same reason the gradients of workers
are computed one after another in networks with convolutions, and by ``vmap`` in
recurrent ones. Convolutions of 3 x 3 on images of 2 x 2 are as slow: with 256 channels
and 16 images they take 22 to 27 ms, and 1.7 ms on images of 4 x 4. So the residual
net's gradient takes half as long on 14 x 14 pixels as on 7 x 7.

The exchange is that of ``vmap``, with the bits of real devices. Only dropout draws
other numbers than it does there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from benchmarks.common.trainer import own, point
from benchmarks.study import curve, methods
from benchmarks.study.settings import Setting, optimizer
from benchmarks.study.tasks import Source
from examples.lib.averaging import averaged
from examples.lib.checkpoints import Saved
from examples.lib.plateau import observe
from examples.lib.training import AXIS, NOWHERE, Task

_TOGETHER = 8  # workers whose gradients are one program


class Trainer:
  """Trains a method on a task, with programs that are compiled once for all seeds."""

  def __init__(self, task: Task, source: Source, setting: Setting):
    exchange, *left = _exchange(setting, setting.seed)
    after = optimizer(setting, *left)
    self._task, self._source, self._setting = task, source, setting
    self._arrays = jax.device_put(source.arrays)
    self._after = after

    def gradients(
      params: Any, arrays: Any, indices: Any, workers: jax.Array, options: Any
    ) -> Any:
      def of_one(worker: jax.Array, *indices: Any) -> Any:
        batch = tuple(x[i] for x, i in zip(arrays, indices, strict=True))
        own = {name: jax.random.fold_in(key, worker) for name, key in options.items()}
        return jax.value_and_grad(task.loss_fn)(params, batch, **own)

      if source.recurrent:
        return jax.vmap(of_one)(workers, *indices)
      each = [of_one(*own) for own in zip(workers, *indices, strict=True)]
      return jax.tree.map(lambda *x: jnp.stack(x), *each)

    def update(carry: Any, found: list[Any]) -> Any:
      params, kept, state = carry
      losses, grads = jax.tree.map(lambda *x: jnp.concatenate(x), *found)
      axes = own(kept)
      mean, kept = jax.vmap(
        lambda grads, kept: exchange.update(grads, kept, params),
        in_axes=(0, axes),
        out_axes=(None, axes),
        axis_name=AXIS,
      )(grads, kept)
      updates, state = after.update(mean, state, params)
      return (optax.apply_updates(params, updates), kept, state), losses.mean()

    self._gradients = jax.jit(gradients)
    self._update = jax.jit(update, donate_argnums=0)

  def recorded(self) -> dict[str, Any]:
    """Returns what a saved state belongs to."""
    exchange, *_ = _exchange(self._setting, 0)
    params = jax.eval_shape(lambda: self._task.init_params(0))
    return gradcomp.checkpoint.record(exchange, params, workers=self._setting.workers)

  def bytes(self) -> dict[str, Any]:
    """Returns what a worker sends in a step, and what float32 sends."""
    exchange, *_ = _exchange(self._setting, 0)
    params = jax.eval_shape(lambda: self._task.init_params(0))
    return sent_bytes(exchange, params, self._setting.workers)

  def train(
    self,
    seed: int,
    stepped: Callable[[], None] = lambda: None,
    saved: Saved = NOWHERE,
  ) -> dict[str, Any]:
    """Trains from one seed, to the end or until the loss is no number any more.

    Args:
      seed: of parameters, batches and rounding.
      stepped: called behind each step.
      saved: where the training goes on from, and what keeps it.

    Returns:
      What ``curve.ended`` returns. Where a mean of the parameters is tested,
      points also have ``last_accuracy`` and ``last_test_loss``, those of the last
      parameters.
    """
    setting = self._setting
    params = jax.device_get(self._task.init_params(seed))  # of no mesh
    exchange, *_ = _exchange(setting, seed)
    carry = jax.jit(functools.partial(self._start, exchange))(params)
    batches = self._source.draw(setting.batch, seed=seed)
    step = functools.partial(self._step, seed)
    return curve.follow(setting, carry, batches, step, self._tested, stepped, saved)

  def _step(self, seed: int, carry: Any, batch: Any, number: int) -> Any:
    workers = self._setting.workers
    indices = [x.reshape(workers, -1, *x.shape[1:]) for x in batch]
    # The keys are of no mesh, too.
    options = {"rng": jax.random.key((seed << 24) + number)} if self._task.drops else {}
    found = []
    for i in range(0, workers, _TOGETHER):
      own = slice(i, i + _TOGETHER)
      parts = [x[own] for x in (*indices, np.arange(workers))]
      found.append(
        self._gradients(carry[0], self._arrays, parts[:-1], parts[-1], options)
      )
    return self._update(carry, found)

  def _tested(self, carry: Any, number: int, loss: float) -> Any:
    params, kept, state = carry
    reached = self._point(number, loss, params, state)
    return reached, (params, kept, observe(state, reached["test_loss"]))

  def _point(self, step: int, loss: float, params: Any, state: Any) -> dict[str, float]:
    """Tests the parameters, and their mean in their place if there is one."""
    found = point(step, loss, self._task.evaluate(averaged(state, params)))
    if self._setting.ema is None:
      return found
    own = point(step, loss, self._task.evaluate(params))
    return found | {f"last_{x}": own[x] for x in ("test_loss", "accuracy")}

  def _start(self, exchange: optax.GradientTransformation, params: Any) -> Any:
    of_each = functools.partial(
      jax.vmap, lambda _: exchange.init(params), axis_name=AXIS
    )
    each = jnp.arange(self._setting.workers)
    axes = own(jax.eval_shape(of_each(), each))
    return params, of_each(out_axes=axes)(each), self._after.init(params)


def _exchange(
  setting: Setting, seed: int
) -> tuple[optax.GradientTransformation, float | None, float | None]:
  return methods.make(
    setting.codec,
    axis_name=AXIS,
    steps=setting.steps,
    exchange=setting.exchange,
    momentum=setting.momentum,
    nesterov=setting.nesterov,
    max_norm=setting.max_norm,
    clipping=setting.clipping,
    key=seed,
  )


def sent_bytes(tx: Any, params: Any, workers: int) -> dict[str, Any]:
  """Returns what a worker sends in a step, the ratio to float32, and the exchanges."""
  plan = gradcomp.explain(tx, params, workers=workers)
  ways = sorted({leaf.exchange for leaf in plan.leaves})
  return {
    "bytes_a_step": float(plan.bytes_sent),
    "ratio": float(plan.ratio),
    "exchanges": ways,
  }
