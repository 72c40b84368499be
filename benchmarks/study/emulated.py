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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from benchmarks.common.trainer import Trainer, first_kept, of_workers, own, point
from benchmarks.study import methods, optimizers, settings, tasks
from examples.lib.methods import averaged, observe
from examples.lib.training import AXIS, Task

_TOGETHER = 8  # workers whose gradients are one program


def trainer(task: Task, source: tasks.Source, setting: settings.Setting) -> Trainer:
  """Makes what trains; points of means of parameters also have those of the last."""
  workers = setting.workers
  exchange, after = methods.make(setting)
  arrays = jax.device_put(source.arrays)
  in_place = optimizers.WHOLE.get(setting.codec)
  axes_of = _axes if in_place else own

  @functools.partial(jax.jit, static_argnames="together")
  def gradients(params, moved, arrays, indices, numbers, options, together):
    """Computes workers' losses and gradients, at ``moved`` if they moved apart."""

    def of_one(moved: Any, worker: jax.Array, *indices: Any) -> Any:
      batch = tuple(x[i] for x, i in zip(arrays, indices, strict=True))
      own = {name: jax.random.fold_in(key, worker) for name, key in options.items()}
      at = params if moved is None else moved
      return jax.value_and_grad(task.loss_fn)(at, batch, **own)

    if together:
      return jax.vmap(of_one)(moved, numbers, *indices)
    each = [
      of_one(jax.tree.map(lambda x, i=i: x[i], moved), *own)
      for i, own in enumerate(zip(numbers, *indices, strict=True))
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)

  @jax.jit
  def at(params: Any, kept: Any) -> Any:
    """Returns the parameters of each worker, or None where they are all the same."""
    if not (in_place and in_place.moves):
      return None
    here = functools.partial(gradcomp.local.local_params, params)
    return jax.vmap(here, in_axes=(axes_of(kept),), axis_name=AXIS)(kept)

  @functools.partial(jax.jit, donate_argnums=0)
  def update(carry: Any, found: list[Any]) -> Any:
    params, kept, state = carry
    losses, grads = jax.tree.map(lambda *x: jnp.concatenate(x), *found)
    axes = axes_of(kept)
    one = lambda grads, kept: exchange.update(grads, kept, params)
    of_all = jax.vmap(one, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
    mean, kept = of_all(grads, kept)
    updates, state = after.update(mean, state, params)
    return (optax.apply_updates(params, updates), kept, state), losses.mean()

  def start(seed: int) -> Any:
    of_seed, *_ = methods.make(setting._replace(seed=seed))
    kept = lambda params: first_kept(of_seed, params, workers, axes_of=axes_of)
    first = lambda params: (params, kept(params), after.init(params))
    return jax.jit(first)(jax.device_get(task.init_params(seed)))  # of no mesh

  def drawn(seed: int, batch: Any, number: int) -> Any:
    # The keys are of no mesh, too.
    options = {"rng": jax.random.key((seed << 24) + number)} if task.drops else {}
    return (*of_workers(batch, workers), np.arange(workers)), options

  def whole(carry: Any, given: Any, size: int = workers, together: bool = True) -> Any:
    """Takes a step, with the gradients of so many workers at a time."""
    parts, options = given
    moved = at(*carry[:2])
    found = []
    for i in range(0, workers, size):
      *indices, numbers = (x[i : i + size] for x in parts)
      here = jax.tree.map(lambda x, i=i: x[i : i + size], moved)
      own = carry[0], here, arrays, indices, numbers, options
      found.append(gradients(*own, together=together))
    return update(carry, found)

  def step(seed: int, carry: Any, batch: Any, number: int) -> Any:
    return whole(carry, drawn(seed, batch, number), _TOGETHER, source.recurrent)

  def test(seed: int, carry: Any, number: int, loss: float) -> Any:
    params, kept, state = carry
    reached = point(number, loss, task.evaluate(averaged(state, params)))
    state = observe(state, reached["test_loss"])
    if setting.ema is not None:
      last = point(number, loss, task.evaluate(params))
      reached |= {f"last_{x}": last[x] for x in ("test_loss", "accuracy")}
    return reached, (params, kept, state)

  batches = lambda seed: source.draw(setting.batch, seed=seed)
  shapes = lambda: jax.eval_shape(lambda: task.init_params(0))
  sent = lambda: sent_bytes(exchange, shapes(), workers)
  record = lambda: gradcomp.checkpoint.make_record(exchange, shapes(), workers=workers)
  when = setting.steps, setting.evaluated
  return Trainer(*when, start, batches, step, test, sent, record, drawn, whole)


def _axes(kept: Any) -> Any:
  """Returns the axis of the workers of each array of an exchange's state."""
  specs = gradcomp.state_specs(kept, axis_name=AXIS)
  return jax.tree.map(lambda spec: 0 if any(spec) else None, specs)


def sent_bytes(tx: Any, params: Any, workers: int) -> dict[str, Any]:
  """Returns what a worker sends in a step, the ratio to float32, and the exchanges."""
  plan = gradcomp.explain(tx, params, workers=workers)
  return {
    "bytes_a_step": float(plan.bytes_per_step),
    "ratio": float(plan.ratio),
    "exchanges": sorted({leaf.exchange for leaf in plan.leaves}),
  }
