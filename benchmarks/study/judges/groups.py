"""Says which trainings a claim is about, and which are in the paper's own setting."""

from collections.abc import Callable

from benchmarks.study.analysis import Group
from benchmarks.study.tasks import TEXTS

Chosen = Callable[[Group], bool]


def images(group: Group) -> bool:
  """Returns whether a group is of images, SGD, and 64 workers at most."""
  return _of_images(group, "sgd") and group.setting.workers <= 64


def images_as_dettmers(group: Group) -> bool:
  """Returns whether gradients of images are exchanged, with SGD or with RMSProp."""
  return group.setting.way != "model" and (
    images(group) or _of_images(group, "rmsprop")
  )


def dense_model_parallel(group: Group) -> bool:
  """Returns whether activations of Dettmers' net of dense layers are exchanged."""
  x = group.setting
  return x.way == "model" and x.network.startswith("dense-")


def lenet_of_wen(group: Group) -> bool:
  """Returns whether a group is of LeNet and a polynomial, as Wen et al.'s figure 3."""
  x = group.setting
  return images(group) and (x.network, x.schedule) == ("lenet", "polynomial")


def images_by_adam(group: Group) -> bool:
  """Returns whether a group is of images, Adam, and a batch for each worker."""
  return _of_images(group, "adam") and group.setting.rule == "per-worker"


def images_of_many(group: Group) -> bool:
  """Returns whether a group has as many workers as Han et al., 256."""
  return _of_images(group, "sgd") and group.setting.workers >= 256


def _of_images(group: Group, optimizer: str) -> bool:
  return group.setting.network not in TEXTS and group.setting.optimizer == optimizer


def recurrent(group: Group) -> bool:
  """Returns whether a group is of a recurrent net."""
  return group.setting.network in ("gru", "lstm")


def words(group: Group) -> bool:
  """Returns whether a group reads words, as Fang et al.'s."""
  return group.setting.dataset == "brown-words"


def long(group: Group) -> bool:
  """Returns whether there are nine times the steps in which 0.1 % a step is all."""
  return group.setting.steps >= 9_000


def trained(group: Group) -> bool:
  """Returns whether trainings saw their data ten times, and so went to their end."""
  x = group.setting
  return x.steps * x.batch >= 10 * x.epoch


def usual_batches(group: Group) -> bool:
  """Returns whether a group of ``images`` has 256 in a step at most."""
  return images(group) and group.setting.batch <= 256


def large_batches(group: Group) -> bool:
  """Returns whether a group of ``images`` has more than 256 in a step."""
  return images(group) and not usual_batches(group)
