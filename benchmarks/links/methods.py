"""Names what is timed on links: codecs, with the exchanges that each is timed in.

Options are those of the codec's paper, but for 2 bits: they are in buckets of 512, and
Grubic's in 128. So residuals are kept where a method has them: 1-bit SGD, RedSync,
PowerSGD. Elsewhere a time is without. A case "in leaves" sends each
leaf in a message of its own, as systems do that do not merge layers (Han 2021, figure
11). "Sorted" is RedSync with the naive selection: the exact largest, by sorting.
Optimizers that exchange in place of gradients stand beside them.
"""

import inspect
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.compilers.codecs import NVFP4
from gradcomp import codecs, contrib, optimizers
from gradcomp._src.core.feedback import FeedbackName
from gradcomp._src.exchange.auto import ExchangeName
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.exchange import Hierarchical

GROUPED = Hierarchical(group_size=2)
EXCHANGES = tuple(x for x in get_args(ExchangeName) if x not in ("auto", "local"))
_GATHERS = ("all_gather", "two_shot", "ring")
_SUMS = ("two_shot", "psum")
_CHAINS = ("two_shot", "ring")
_MIB = 2**20
_RATE = 1e-3


class Case(NamedTuple):
  """A codec, the exchanges to time it in, and the options that matter for its time."""

  codec: Any  # or what makes an optimizer from the name of an exchange
  exchanges: tuple[str, ...]
  feedback: FeedbackName | None = None
  message_bytes: int | None = None
  updates: bool = False  # it makes the mean of the gradients

  def transformation(self, exchange: str) -> optax.GradientTransformation:
    """Makes the exchange of gradients over the axis ``"data"``, or an optimizer."""
    if inspect.isfunction(self.codec):
      return self.codec(exchange)
    options: dict[str, Any] = {"axis_name": "data", "feedback": self.feedback}
    options["exchange"] = GROUPED if exchange == GROUPED.name else exchange
    options["message_bytes"] = self.message_bytes
    return gradcomp.compress(self.codec, **options)


APS = codecs.FloatCast(exponent_bits=5, mantissa_bits=2)
BF16, F16 = (codecs.Dense(dtype=x) for x in (jnp.bfloat16, jnp.float16))
_FITTED: Any = {"levels": "nonuniform"}
_REDSYNC: Any = {"": {}, " asq": {"quantize": "asq"}, " sorted": {"selection": "exact"}}
_redsync = lambda **way: Case(codecs.TopK(**way), ("all_gather",), "momentum")
IN_PARTS = codecs.QSGD(bits=4)  # its two_shot is also timed part by part

CASES: dict[str, Case] = {
  "f32": Case(codecs.Dense(), ("psum",)),
  "bf16": Case(BF16, ("all_gather", "two_shot")),
  "f16": Case(F16, _CHAINS),
  **{f"qsgd-{bits}": Case(codecs.QSGD(bits=bits), EXCHANGES) for bits in (8, 4, 2)},
  "qsgd-4 shared": Case(codecs.QSGD(bits=4, share_scale=True), _SUMS),
  **{
    f"qsgd-{n} fitted": Case(codecs.QSGD(bits=n, **_FITTED), _GATHERS) for n in (4, 2)
  },
  "natural": Case(codecs.Natural(), _GATHERS),
  "mxfp8": Case(codecs.BlockFloat(), _GATHERS),
  "nvfp4": Case(NVFP4, _GATHERS),
  "onebit-64": Case(codecs.OneBit(bucket_size=64), _GATHERS, "error"),
  "onebit-512": Case(codecs.OneBit(bucket_size=512), _GATHERS, "error"),
  "terngrad": Case(codecs.Ternary(), _SUMS),
  "terngrad-base3": Case(codecs.Ternary(packing="base3"), _SUMS),
  "dynamic-tree": Case(codecs.EightBit(dtype="dynamic_tree"), _GATHERS),
  "linear": Case(codecs.EightBit(dtype="linear"), _GATHERS),
  "aps-8": Case(APS, _CHAINS),
  **{
    f"redsync-{100 * x:g}%{kind}": _redsync(density=x, **own)
    for x in (0.01, 0.001)
    for kind, own in _REDSYNC.items()
  },
  **{f"powersgd-{n}": Case(PowerSGD(rank=n), ("psum",), "error") for n in (1, 2, 4)},
  "powersgd-4-8bit": Case(PowerSGD(rank=4, bits=8), ("two_shot",), "error"),
  "powersgd-4 alternate": Case(PowerSGD(rank=4, alternate=True), ("psum",), "error"),
  "sign by votes": Case(codecs.Sign(), _SUMS),
  "onebit-512 ef21": Case(codecs.OneBit(bucket_size=512), _SUMS[:1], "ef21"),
  # One message in parts; with one leaf these are one message, too, and left out.
  "f16 in leaves": Case(F16, _CHAINS, message_bytes=1),
  "bf16 in leaves": Case(BF16, ("two_shot",), message_bytes=1),
  "aps-8 in leaves": Case(APS, _CHAINS, message_bytes=1),
  "qsgd-4 in leaves": Case(codecs.QSGD(bits=4), ("two_shot",), message_bytes=1),
  "qsgd-4 by 1 MiB": Case(codecs.QSGD(bits=4), ("two_shot",), message_bytes=_MIB),
  "qsgd-4 by 4 MiB": Case(codecs.QSGD(bits=4), ("two_shot",), message_bytes=4 * _MIB),
}


def _bf16(grads: list[jax.Array], _: Any) -> list[jax.Array]:
  """Returns JAX's own mean in bfloat16."""
  mean = jax.lax.pmean([x.astype(jnp.bfloat16) for x in grads], "data")
  return [x.astype(jnp.float32) for x in mean]


_over: Any = lambda way: {"axis_name": "data", "exchange": way}
# Times go from the gradient to the update. The first step, which is not timed, is in
# float32 where there is a warm-up.
_dense_adam = lambda way: optax.chain(gradcomp.dense(**_over(way)), optax.adam(_RATE))
_adam = lambda way: optimizers.adam(_RATE, **_over(way), warmup=1)
_dion = lambda way: contrib.dion(_RATE, **_over(way), rank=4)
STEPS = CASES | {
  "jax bf16": Case(lambda _: optax.stateless(_bf16), ("psum",)),
  "adam": Case(_dense_adam, ("psum",), updates=True),
  "1-bit adam": Case(_adam, ("two_shot", "all_gather"), updates=True),
  "dion-4": Case(_dion, ("psum",), updates=True),
}

# What cells have that are there for the rate or the leaves, and not for the codecs.
_BRIEF = {
  "two_shot": "bf16, f16, natural, dynamic-tree, aps-8, qsgd-8, qsgd-4, qsgd-4 fitted, "
  "qsgd-2, terngrad, onebit-64, 1-bit adam",
  "ring": "f16, aps-8",
  "all_gather": "redsync-1%, redsync-0.1%, redsync-0.1% asq",
  "psum": "terngrad, powersgd-1, powersgd-2, powersgd-4, adam, dion-4",
}
BRIEF = [f"{name} {way}" for way, x in _BRIEF.items() for name in x.split(", ")]
# The same for many leaves, whose programs take 3 to 30 s to compile on one core each.
BRIEF_OF_MANY = (
  "f32 psum, bf16 two_shot, f16 ring, aps-8 ring, qsgd-4 two_shot, powersgd-4 psum, "
  "f16 in leaves ring, aps-8 in leaves ring"
).split(", ")


def chosen(codecs: list[str], brief: bool, merged: bool) -> list[str]:
  """Returns the names of the steps to time: a codec of ``codecs`` and its exchange.

  ``brief`` takes a choice where no codecs are chosen. A gradient with one leaf is
  ``merged``: nothing in it can be split.

  >>> chosen(["f16", "f16 in leaves"], brief=True, merged=True)
  ['f16 two_shot', 'f16 ring']
  """
  if brief and codecs == [*STEPS]:
    return BRIEF if merged else BRIEF_OF_MANY
  return [
    f"{name} {exchange}"
    for name in codecs
    for exchange in STEPS[name].exchanges
    if not (merged and STEPS[name].message_bytes)
  ]
