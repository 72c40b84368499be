"""Says what a run of a study is: all that its results depend on."""

from typing import NamedTuple

import optax

from examples.lib import methods


class Setting(NamedTuple):
  """The settings of a run."""

  # ``"emulated"`` or ``"trained"`` for accuracy, by one device or on devices that
  # exchange; ``"data"`` or ``"model"`` for Dettmers' nets, see study/dettmers.py;
  # ``"timed"`` for the times of a step.
  way: str
  network: str  # this and the next three: by their names
  dataset: str
  codec: str
  exchange: str
  workers: int  # N
  rule: str  # whether the batch is ``"fixed"``, or one ``"per-worker"``
  batch: int  # the samples of a step of all workers together
  steps: int  # those of the training
  epoch: int  # the samples of an epoch
  points: int  # those of the curve, at equal distances
  seed: int  # of parameters, batches and rounding
  optimizer: str  # "sgd", "adam" or "lars"; Dettmers' nets have "rmsprop"
  learning_rate: float  # at first
  momentum: float | None  # of ``"sgd"``; None for none
  max_norm: float | None  # what gradients are clipped at; None for no clipping
  link: str = ""  # between hosts, by its name; "" without hosts
  hosts: int = 1  # the processes of a run that was timed
  # ``"cosine"``, ``"polynomial"``, ``"plateau"`` or ``"constant"``: see ``optimizers``.
  # On a plateau of the test's loss the rate halves, as Fang's does.
  schedule: str = "cosine"
  weight_decay: float = 0.0  # of matrices and kernels, with SGD behind the exchange
  dropout: float | None = None  # of networks that have any; None for each one's own
  nesterov: bool = False  # whether the momentum of ``"sgd"`` is Nesterov's
  # What is clipped at ``max_norm``. ``"mean"``: the mean of all workers, and with
  # momentum in the exchange each worker's gradient by the rule ``"root"``. ``"own"``,
  # ``"share"`` or ``"root"``: each worker's gradient by that rule of
  # ``gradcomp.wrappers.clip_by_local_norm``, whatever the exchange, float32's too.
  clipping: str = "mean"
  ema: float | None = None  # decay of the mean of parameters that is tested; None: none

  @property
  def name(self) -> str:
    """The codec, with its exchange where that is not the codec's own."""
    return self.codec if self.exchange == "auto" else f"{self.codec} {self.exchange}"

  @property
  def evaluated(self) -> set[int]:
    """The steps behind which there is a point of the curve."""
    parts = min(self.points, self.steps)
    return {self.steps * (i + 1) // parts for i in range(parts)}


def optimizer(
  setting: Setting, momentum: float | None, max_norm: float | None
) -> optax.GradientTransformation:
  """Makes what is behind the exchange, with what momentum and clipping it leaves."""
  if setting.optimizer not in ("sgd", "adam", "lars"):
    raise ValueError(
      f'`optimizer` must be "sgd", "adam" or "lars", got {setting.optimizer!r}.'
    )
  rate, decay = methods.make_schedule(setting), setting.weight_decay
  chain = [] if max_norm is None else [optax.clip_by_global_norm(max_norm)]
  if setting.optimizer == "adam":
    chain.append(optax.adamw(rate, weight_decay=decay, mask=methods.weights))
  elif setting.optimizer == "lars":
    chain.append(optax.lars(rate, decay, momentum=momentum or 0.0))
  else:
    if decay:
      chain.append(optax.add_decayed_weights(decay, methods.weights))
    nesterov = setting.nesterov and momentum is not None
    chain.append(optax.sgd(rate, momentum=momentum, nesterov=nesterov))
  if setting.schedule == "plateau":
    chain.append(methods.scale_by_plateau())
  if setting.ema is not None:
    chain.append(methods.average_params(setting.ema))
  return optax.chain(*chain)
