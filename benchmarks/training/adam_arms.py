"""Makes the optimizers that benchmarks.training.adam compares.

adamw           AdamW of the plain mean
qsgd-4, qsgd-2, onebit, terngrad, topk-1
                AdamW behind a compressed gradient: 4, 2 and 1 bits, ternary, and 1 %
topk-1-warm     the same behind a dense start
onebit-ef21     AdamW behind an estimate that 1 bit an element corrects
acp-4           AdamW behind PowerSGD of rank 4 that sends one factor a step
adam-onebit     1-bit Adam: a variance that is frozen after a dense start
adam-onebit-eps the same with an eps of 1e-5
adam-doubling   0/1 Adam's variance
adam-local      0/1 Adam: that, and local steps in gaps that double, up to 4
adam-onebit-floor, adam-doubling-floor, adam-local-floor
                these three with the library's floor of variances, which the papers' and
                so all of the others have not
adam-onebit-late
                1-bit Adam with the floor behind a dense start of 30 %
muon            Muon of the plain mean, at 2.5 times the rate
muon-ef21       the same behind an estimate that 1 bit an element corrects
dion-16         Dion of rank 16 for matrices inside, at five times the rate, and AdamW
                of the plain mean for the rest
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import gradcomp
from gradcomp import contrib, optimizers

AXIS = "data"
BASELINE = "adamw"
DECAY = 0.01  # weight decay
FLOOR = 0.1  # of variances, the library's own
START = 0.1  # the share of the steps that are dense, of arms that start so


class Arm(NamedTuple):
  """Makes an optimizer of one worker's gradients.

  Attributes:
    make: takes the schedule of AdamW's rate, the number of dense steps, and the options
      ``axis_name`` and ``key``.
    start: the share of the steps that are dense at first.
  """

  make: Callable[..., optax.GradientTransformation]
  start: float = 0.0

  def optimizer(
    self, rate: optax.Schedule, steps: int, key: Any
  ) -> optax.GradientTransformation:
    """Returns the optimizer for a training of so many steps."""
    return self.make(rate, round(self.start * steps), axis_name=AXIS, key=key)


def _times(rate: optax.Schedule, factor: float) -> optax.Schedule:
  return lambda count: factor * rate(count)


def _behind(recipe: Callable[..., Any], *args: Any, **own: Any) -> Arm:
  """Returns an arm with AdamW behind the exchange of gradients."""

  def make(rate: Any, first: int, **options: Any) -> optax.GradientTransformation:
    del first
    exchange = recipe(*args, **own, **options)
    return optax.chain(exchange, optax.adamw(rate, weight_decay=DECAY))

  return Arm(make)


def _warm(rate: Any, first: int, **options: Any) -> optax.GradientTransformation:
  parts = [gradcomp.topk(density, **options) for density in (1.0, 0.01)]
  exchange = gradcomp.wrappers.switch([max(1, first)], parts)
  return optax.chain(exchange, optax.adamw(rate, weight_decay=DECAY))


def _adam(
  rate: Any, first: int, floor: float = 0.0, **options: Any
) -> optax.GradientTransformation:
  own = {"warmup": max(1, first), "floor": floor, "weight_decay": DECAY}
  return optimizers.adam(rate, **own, **options)


def _local(rate: Any, first: int, **options: Any) -> optax.GradientTransformation:
  gaps = optimizers.DoublingGaps(every=3 * max(1, first), most=4)
  return _adam(rate, first, variance="doubling", local=gaps, **options)


def _dion(rate: Any, first: int, **options: Any) -> optax.GradientTransformation:
  del first
  inside = contrib.dion(_times(rate, 5), rank=16, weight_decay=DECAY / 5, **options)
  adamw = optax.adamw(rate, weight_decay=DECAY)
  rest = optax.chain(gradcomp.dense(**options), adamw)
  return optax.partition({"inside": inside, "rest": rest}, _places)


def _places(params: Any) -> Any:
  """Says which leaves are matrices between the embedding and the last layer."""

  def place(path: Any, leaf: Any) -> str:
    name = jax.tree_util.keystr(path)
    outside = any(x in name for x in ("embed", "head", "position"))
    return "rest" if outside or leaf.ndim < 2 else "inside"

  return jax.tree.map_with_path(place, params)


def _muon(recipe: Callable[..., Any], **own: Any) -> Arm:
  def make(rate: Any, first: int, **options: Any) -> optax.GradientTransformation:
    del first
    muon = optax.contrib.muon(_times(rate, 2.5), weight_decay=DECAY / 2.5)
    return optax.chain(recipe(**own, **options), muon)

  return Arm(make)


ARMS: dict[str, Arm] = {
  BASELINE: _behind(gradcomp.dense),
  "qsgd-4": _behind(gradcomp.qsgd, 4),
  "qsgd-2": _behind(gradcomp.qsgd, 2, bucket_size=128),
  "onebit": _behind(gradcomp.onebit_sgd),
  "terngrad": _behind(gradcomp.terngrad),
  "topk-1": _behind(gradcomp.topk, 0.01),
  "topk-1-warm": Arm(_warm, START),
  "onebit-ef21": _behind(gradcomp.onebit_sgd, feedback="ef21"),
  "acp-4": _behind(gradcomp.powersgd, 4, alternate=True),
  "adam-onebit": Arm(_adam, START),
  "adam-onebit-eps": Arm(functools.partial(_adam, eps=1e-5), START),
  "adam-doubling": Arm(functools.partial(_adam, variance="doubling"), START),
  "adam-local": Arm(_local, START),
  "adam-onebit-floor": Arm(functools.partial(_adam, floor=FLOOR), START),
  "adam-onebit-late": Arm(functools.partial(_adam, floor=FLOOR), 0.3),
  "adam-doubling-floor": Arm(
    functools.partial(_adam, variance="doubling", floor=FLOOR), START
  ),
  "adam-local-floor": Arm(functools.partial(_local, floor=FLOOR), START),
  "muon": _muon(gradcomp.dense),
  "muon-ef21": _muon(gradcomp.onebit_sgd, feedback="ef21"),
  "dion-16": Arm(_dion),
}
