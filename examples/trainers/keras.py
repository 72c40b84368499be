"""Keras 3, ``fit()``.

One line puts 4 bits between the gradients and the optimizer.
"""

import os
from typing import Any

import jax

import gradcomp
from examples.lib import trainers

os.environ.setdefault("KERAS_BACKEND", "jax")


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  import keras  # behind the choice of its back end

  keras.utils.set_random_seed(0)
  keras.distribution.set_distribution(keras.distribution.DataParallel())
  model = keras.Sequential([keras.Input((trainers.WIDTH,))])
  for width in (256, 256):
    model.add(keras.layers.Dense(width, "tanh"))
  model.add(keras.layers.Dense(trainers.CLASSES))
  model.compile(keras.optimizers.Adam(3e-3), loss="mse")
  if compressed:
    gradcomp.contrib.keras(model, gradcomp.qsgd(bits=4, axis_name="batch"))

  feed = ((batch["x"], batch["y"]) for batch in trainers.batches(steps))
  # An epoch is a step, whose loss is read: emulated devices hang where nobody waits.
  how = {"epochs": steps, "steps_per_epoch": 1, "shuffle": False, "verbose": 0}
  losses = model.fit(feed, **how).history["loss"]
  return losses[-1], program(model, next(trainers.batches(1)).values())


def program(model: Any, batch: Any) -> Any:
  """Returns the lowered program of a step, as ``fit`` compiles it."""
  from keras import distribution

  optimizer = model.optimizer.variables
  parts = [model.trainable_variables, model.non_trainable_variables, optimizer]
  state = [[x.value for x in part] for part in (*parts, model.metrics_variables)]
  layout = distribution.distribution().get_data_layout
  batch = [jax.device_put(x, layout(x.shape).backend_layout) for x in batch]
  placed = jax.tree.map(lambda x: x.sharding, state)
  step = jax.jit(model.train_step, out_shardings=(None, tuple(placed)))
  return step.lower(state, batch)


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"batch": 8})
