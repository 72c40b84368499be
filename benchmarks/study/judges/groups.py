"""Says which trainings a claim is about."""

from collections.abc import Callable, Iterable, Iterator

from benchmarks.study.analysis import Group, in_groups
from benchmarks.study.tasks import TEXTS

Chosen = Callable[[Group], bool]


def of_images(group: Group, optimizer: str) -> bool:
  return group.setting.network not in TEXTS and group.setting.optimizer == optimizer


# Groups with SGD, of images and 64 workers at most.
images = lambda group: of_images(group, "sgd") and group.setting.workers <= 64
usual_batches = lambda group: images(group) and group.setting.batch <= 256  # of a step
large_batches = lambda group: images(group) and group.setting.batch > 256
# As many workers as Han et al. have, 256.
images_of_many = lambda group: of_images(group, "sgd") and group.setting.workers >= 256
recurrent = lambda group: group.setting.network in ("gru", "lstm")
# MNIST, as Wen et al.'s figure 3.
on_mnist = lambda group: group.setting.dataset.startswith("mnist")


def images_as_dettmers(group: Group) -> bool:
  """Returns whether gradients of images are exchanged, with SGD or with RMSProp."""
  chosen = images(group) or of_images(group, "rmsprop")
  return chosen and group.setting.way != "model"


def dense_model_parallel(group: Group) -> bool:
  """Returns whether activations of Dettmers' net of dense layers are exchanged."""
  return group.setting.way == "model" and group.setting.network.startswith("dense-")


def lenet_of_wen(group: Group) -> bool:
  """Returns whether a group is of LeNet and a polynomial, as Wen et al.'s figure 3."""
  x = group.setting
  return images(group) and (x.network, x.schedule) == ("lenet", "polynomial")


def images_by_adam(group: Group) -> bool:
  """Returns whether a group is of images, Adam, and a batch for each worker."""
  return of_images(group, "adam") and group.setting.rule == "per-worker"


def learned(group: Group) -> bool:
  """Returns whether a text was read once or more; images are learned sooner."""
  x = group.setting
  return x.network not in TEXTS or x.steps * x.batch >= 0.99 * x.epoch


def without_dropout(groups: Iterable[Group]) -> Iterator[tuple[Group, Group]]:
  """Yields groups of ``images`` that drop nothing, each with the one that does."""
  found = {x.setting: x for x in filter(images, groups)}
  for setting, group in found.items():
    usual = found.get(setting._replace(dropout=None))
    if setting.dropout == 0 and usual:
      yield group, usual


def of_more_workers(groups: Iterable[Group]) -> Iterator[tuple[Group, Group]]:
  """Yields groups of ``images_by_adam`` with most workers, each with that of fewest."""
  where = lambda group: (group.setting.network, group.setting.dataset)
  same = in_groups(filter(images_by_adam, groups), where)  # ordered by their workers
  for few, *_, many in (x for x in same.values() if len(x) > 1):
    if few.setting.workers < many.setting.workers:
      yield many, few
