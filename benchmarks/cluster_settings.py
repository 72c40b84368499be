"""Says what a run of cluster_study.py is: all that its results depend on."""

from typing import NamedTuple

import optax


class Setting(NamedTuple):
  """The settings of a run.

  Attributes:
    way: ``"emulated"`` or ``"trained"`` for accuracy, by one device or on devices that
      exchange; ``"timed"`` for the times of a step.
    network, dataset, codec, exchange: by their names.
    workers: N.
    rule: whether the batch is ``"fixed"``, or one ``"per-worker"``.
    batch: the samples of a step of all workers together.
    steps: those of the training.
    epoch: the samples of an epoch.
    points: those of the curve, at equal distances.
    seed: of parameters, batches and rounding.
    optimizer: ``"sgd"`` or ``"adam"``.
    learning_rate: at first; it falls along a cosine.
    momentum: of ``"sgd"``; None for none.
    max_norm: what gradients are clipped at; None for no clipping.
    link: between hosts, by its name; "" without hosts.
    hosts: the processes of a run that was timed.
  """

  way: str
  network: str
  dataset: str
  codec: str
  exchange: str
  workers: int
  rule: str
  batch: int
  steps: int
  epoch: int
  points: int
  seed: int
  optimizer: str
  learning_rate: float
  momentum: float | None
  max_norm: float | None
  link: str = ""
  hosts: int = 1

  @property
  def evaluated(self) -> set[int]:
    """The steps behind which there is a point of the curve."""
    parts = min(self.points, self.steps)
    return {self.steps * (i + 1) // parts for i in range(parts)}


def optimizer(
  setting: Setting, momentum: float | None, max_norm: float | None
) -> optax.GradientTransformation:
  """Makes what is behind the exchange.

  Args:
    setting: of the run.
    momentum: None if the exchange has it.
    max_norm: None if gradients are clipped in front of the exchange, or not at all.
  """
  rate = optax.cosine_decay_schedule(setting.learning_rate, setting.steps)
  after = (
    optax.adam(rate)
    if setting.optimizer == "adam"
    else optax.sgd(rate, momentum=momentum)
  )
  if max_norm is None:
    return after
  return optax.chain(optax.clip_by_global_norm(max_norm), after)
