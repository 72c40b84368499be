"""Names optimizers that exchange in place of gradients, beside those of methods.py.

They take the place of an exchange and of the optimizer behind it, and have the rate,
the weight decay and the key of the setting:

  adam-onebit    1-bit Adam: a variance that is frozen behind a dense tenth of the
                 steps; -late: behind three tenths
  adam-doubling  0/1 Adam's variance
  adam-local     0/1 Adam: that, and local steps in gaps that double, up to 4
  ...-paper      the same without the library's floor of variances
  muon           Muon of the plain mean, at 2.5 times the rate
  muon-ef21      the same behind an estimate that 1 bit an element corrects
  dion-16        Dion of rank 16 for matrices inside, at five times the rate, and AdamW
                 of the plain mean for the rest
  zero-4-4       ZeRO around AdamW: gradients travel to their owners in 4 bits, and what
                 changes in the parameters in 4 bits
  diloco         rounds of 30 steps of AdamW, exchanged in float32, with Nesterov's
                 momentum outside; -sgd: with plain SGD outside
  sparseloco     BlockTop, a byte for 64 elements, plain SGD outside; an element is the
                 mean of those workers that sent it
  sparseloco-two-shot  the same, where owners choose once more among the sums
  streaming      floats of 3 bits of exponent and none of mantissa, gathered; 4
                 fragments, a delay of two steps, half mixed
  muloco         Muon inside, and 2 bits: the nearest of 4 levels that lose least of
                 Gaussian buckets, gathered; -dense: in float32
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import gradcomp
from benchmarks.study.settings import Setting
from examples.lib.methods import make_schedule
from gradcomp import codecs, contrib, local, optimizers, parallel

Transform = optax.GradientTransformation
EVERY = 30  # steps of a round


class Whole(NamedTuple):
  """Makes an optimizer of one worker's gradients."""

  # Takes the schedule of the rate, the number of dense steps, the weight decay, and the
  # options ``axis_name`` and ``key``.
  make: Callable[..., Transform]
  start: float = 0.0  # the share of the steps that are dense at first
  moves: bool = False  # whether a worker's parameters move between exchanges

  def optimizer(self, setting: Setting, **options: Any) -> Transform:
    first = max(1, round(self.start * setting.steps))
    return self.make(make_schedule(setting), first, setting.weight_decay, **options)


def _times(rate: optax.Schedule, factor: float) -> optax.Schedule:
  return lambda count: factor * rate(count)


def _adam(rate: Any, first: int, decay: float, **options: Any) -> Transform:
  return optimizers.adam(rate, warmup=first, weight_decay=decay, **options)


def _moving(rate: Any, first: int, decay: float, **options: Any) -> Transform:
  gaps = optimizers.DoublingGaps(every=3 * first, most=4)
  return _adam(rate, first, decay, variance="doubling", local=gaps, **options)


def _muon(make: Any, rate: Any, first: int, decay: float, **options: Any) -> Transform:
  muon = optax.contrib.muon(_times(rate, 2.5), weight_decay=decay / 2.5)
  return optax.chain(make(**options), muon)


def _dion(rate: Any, first: int, decay: float, **options: Any) -> Transform:
  inside = contrib.dion(_times(rate, 5), rank=16, weight_decay=decay / 5, **options)
  adamw = optax.adamw(rate, weight_decay=decay)
  rest = optax.chain(gradcomp.dense(**options), adamw)
  return optax.partition({"inside": inside, "rest": rest}, _places)


def _places(params: Any) -> Any:
  """Says which leaves are matrices between the embedding and the last layer."""

  def place(path: Any, leaf: Any) -> str:
    name = jax.tree_util.keystr(path)
    outside = any(x in name for x in ("embed", "head", "position"))
    return "rest" if outside or leaf.ndim < 2 else "inside"

  return jax.tree.map_with_path(place, params)


def _zero(rate: Any, first: int, decay: float, **options: Any) -> Transform:
  four = codecs.QSGD(bits=4)
  adamw = optax.adamw(rate, weight_decay=decay)
  return parallel.zero(adamw, grads=four, params=four, feedback=None, **options)


def _local(codec: Any, outer: Transform, muon: bool = False, **own: Any) -> Whole:
  def make(rate: Any, first: int, decay: float, **options: Any) -> Transform:
    inner = optax.adamw(rate, weight_decay=decay)
    if muon:
      inner = optax.contrib.muon(_times(rate, 2.5), weight_decay=decay / 2.5)
    return local.local_steps(inner, outer, every=EVERY, codec=codec, **own, **options)

  return Whole(make, moves=True)


_PAPER = {"floor": 0.0}
_DOUBLING = functools.partial(_adam, variance="doubling")
_NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
_EF21 = functools.partial(gradcomp.onebit_sgd, feedback="ef21")
_FORGETTING = gradcomp.ErrorFeedback(residual_decay=0.95)
_sparse = functools.partial(_local, codecs.BlockTop(), feedback=_FORGETTING)
_TWO_BITS = codecs.QSGD(
  bits=2, bucket_size=128, norm="rms", levels="uniform", rounding="nearest"
)
_FLOATS = codecs.FloatCast(exponent_bits=3, mantissa_bits=0)
_PARTS = {"fragments": 4, "delay": 2, "mixing": 0.5}
WHOLE: dict[str, Whole] = {
  "adam-onebit": Whole(_adam, 0.1),
  "adam-onebit-paper": Whole(functools.partial(_adam, **_PAPER), 0.1),
  "adam-onebit-late": Whole(_adam, 0.3),
  "adam-doubling": Whole(_DOUBLING, 0.1),
  "adam-doubling-paper": Whole(functools.partial(_DOUBLING, **_PAPER), 0.1),
  "adam-local": Whole(_moving, 0.1, moves=True),
  "adam-local-paper": Whole(functools.partial(_moving, **_PAPER), 0.1, moves=True),
  "muon": Whole(functools.partial(_muon, gradcomp.dense)),
  "muon-ef21": Whole(functools.partial(_muon, _EF21)),
  "dion-16": Whole(_dion),
  "zero-4-4": Whole(_zero),
  "diloco": _local(codecs.Dense(), _NESTEROV),
  "diloco-sgd": _local(codecs.Dense(), optax.sgd(1.0)),
  "sparseloco": _sparse(optax.sgd(1.0), merge="senders"),
  "sparseloco-two-shot": _sparse(optax.sgd(4.0), exchange="two_shot"),
  "streaming": _local(_FLOATS, _NESTEROV, exchange="all_gather", **_PARTS),
  "muloco": _local(_TWO_BITS, _NESTEROV, muon=True, exchange="all_gather"),
  "muloco-dense": _local(codecs.Dense(), _NESTEROV, muon=True),
}
