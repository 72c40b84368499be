"""Names what a study compares: each paper's settings, and those that fail.

A name may end in a part of the network, as in ``qsgd-2:conv``. Then the codec has those
leaves of that part that it has without a part, and all others travel in float32:

  conv   convolutions
  dense  matrices
  body   all but the output layer

A name that ends in ``-paper`` is the paper's algorithm, where the library departs from
it or adds to it:

  QSGD         owners of a share keep nothing of what their second encoding loses, and
               each worker has random bits of its own
  TernGrad     random bits of each worker's own, and all leaves are ternary
  8 bits       gradients of all leaves travel once, to all, without residuals;
               static tree and mantissa are scaled by 10 and not by the largest element
  RedSync      sparse from the first step on; ASQ leaves the output layer out

Optimizers that exchange in place of gradients are in optimizers.py.

A leaf whose payload would be no smaller stays in float32 in all of them: with TernGrad
and 8 bits one of fewer than some 520 elements.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.study.optimizers import WHOLE
from benchmarks.study.settings import Setting, optimizer
from examples.lib.methods import FORMATS, output_layer
from examples.lib.training import AXIS
from gradcomp._src.exchange.layout import default_min_leaf_size
from gradcomp.codecs import OneBit, TopK
from gradcomp.exchange import Hierarchical, TwoShot

Transform = optax.GradientTransformation


class Method(NamedTuple):
  """Makes an exchange."""

  make: functools.partial[Transform]  # takes what all recipes share, by keyword
  # Whether the exchange has the momentum, and takes it as ``momentum`` and
  # ``nesterov``. Then gradients are clipped in front of it, and else behind it.
  momentum: bool = False
  start: float = 0.0  # the share of the steps in which it is dense at first


def _of(make: Callable[..., Transform], *args: Any, **options: Any) -> Method:
  return Method(functools.partial(make, *args, **options))


def _low(make: Callable[..., Transform], *args: Any, group_size: int = 0) -> Method:
  """Returns floats as the paper has them: a ring, all leaves, and no residuals."""
  exchange = Hierarchical(group_size=group_size) if group_size else "ring"
  return _of(make, *args, exchange=exchange, feedback=None, min_leaf_size=0)


def one_layer(clip_sigmas: float, **options: Any) -> Transform:
  """Makes TernGrad with one scale for all leaves, which Wen calls worse (3.3)."""
  return optax.flatten(gradcomp.terngrad(clip_sigmas, **options))


def _sparse(density: float, start: float = 0.1, **options: Any) -> Method:
  found = _of(gradcomp.redsync, density, **options)
  return found._replace(momentum=True, start=start)


def asq_but_output(density: float, **options: Any) -> Transform:
  """Makes RedSync that quantizes all but the output layer, as Fang's section 2.2."""
  make = functools.partial(gradcomp.redsync, density, **options)
  parts = {"rest": make(quantize="asq"), "output": make()}
  return optax.partition(parts, output_layer)


# Grubic's QSGD, Wen's TernGrad, and types as Dettmers' nets send them: see the top.
_FORGETFUL = TwoShot(feedback=False)
_ALONE = {"exchange": _FORGETFUL, "dither": "independent"}
_plain = functools.partial(_of, gradcomp.qsgd, **_ALONE)
_wen = functools.partial(_of, gradcomp.terngrad, dither="independent", min_leaf_size=0)
_eight = functools.partial(
  _of, gradcomp.eight_bit, exchange="all_gather", min_leaf_size=0, feedback=None
)
TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
METHODS: dict[str, Method] = {
  "f32": _of(gradcomp.dense),
  "bf16": _of(gradcomp.dense, jnp.bfloat16),
  # Grubic: the settings of figure 5, and those that the text warns of.
  "qsgd-16": _of(gradcomp.qsgd, 16, bucket_size=8192),
  "qsgd-8": _of(gradcomp.qsgd, 8),
  "qsgd-4": _of(gradcomp.qsgd, 4),
  "qsgd-3": _of(gradcomp.qsgd, 3),
  "qsgd-2": _of(gradcomp.qsgd, 2, bucket_size=128),
  "qsgd-4-8192": _of(gradcomp.qsgd, 4, bucket_size=8192),
  "qsgd-4-tensor": _of(gradcomp.qsgd, 4, bucket_size=None),
  "qsgd-2-tensor": _of(gradcomp.qsgd, 2, bucket_size=None),
  "qsgd-4-l2": _of(gradcomp.qsgd, 4, norm="l2"),
  "qsgd-2-l2": _of(gradcomp.qsgd, 2, bucket_size=128, norm="l2"),
  "qsgd-1-uniform": _of(gradcomp.qsgd, 1, bucket_size=128, levels="uniform"),
  "qsgd-8-paper": _plain(8),
  "qsgd-4-paper": _plain(4),
  "qsgd-2-paper": _plain(2, bucket_size=128),
  "qsgd-2-32-paper": _plain(2, bucket_size=32),
  "qsgd-4-8192-paper": _plain(4, bucket_size=8192),
  "qsgd-2-tensor-paper": _plain(2, bucket_size=None),
  "qsgd-4-l2-paper": _plain(4, norm="l2"),
  "qsgd-2-l2-paper": _plain(2, bucket_size=128, norm="l2"),
  "qsgd-1-uniform-paper": _plain(1, bucket_size=128, levels="uniform"),
  # Owners round means at random, and keep nothing of what that loses.
  "qsgd-4-forgetful": _of(gradcomp.qsgd, 4, exchange=_FORGETFUL),
  "qsgd-2-forgetful": _of(gradcomp.qsgd, 2, bucket_size=128, exchange=_FORGETFUL),
  # What the library adds at 2 bits.
  "qsgd-2-fitted": _of(gradcomp.qsgd, 2, bucket_size=128, levels="nonuniform"),
  "qsgd-2-feedback": _of(gradcomp.qsgd, 2, bucket_size=128, feedback="error"),
  "onebit-64": _of(gradcomp.onebit_sgd),
  "onebit-512": _of(gradcomp.onebit_sgd, 512),
  "onebit-column": _of(gradcomp.onebit_sgd, per_column=True),
  # Dense at first. Owners then keep no residuals, so nobody is an owner.
  "onebit-64-warm": _of(
    gradcomp.onebit_sgd, exchange="all_gather", feedback="error"
  )._replace(start=0.1),
  "onebit-64-nofeedback": _of(gradcomp.compress, OneBit(), feedback=None),
  # Wen.
  "terngrad": _of(gradcomp.terngrad),
  "terngrad-noclip": _of(gradcomp.terngrad, None),
  "terngrad-forgetful": _of(gradcomp.terngrad, exchange=_FORGETFUL),
  "terngrad-independent": _of(gradcomp.terngrad, **_ALONE),
  "terngrad-paper": _wen(2.5),
  **{f"terngrad-{c:g}-paper": _wen(c) for c in (1.5, 2.0, 3.0, 4.0)},
  "terngrad-noclip-paper": _wen(None),
  "terngrad-global-paper": _of(one_layer, 2.5, dither="independent", min_leaf_size=0),
  # Dettmers, whose workers keep no residuals.
  **{x.replace("_", "-"): _of(gradcomp.eight_bit, x, feedback=None) for x in TYPES},
  "dynamic-tree-paper": _eight("dynamic_tree"),
  "linear-paper": _eight("linear"),
  "mantissa-paper": _eight("mantissa", exponent_offset=1),
  "static-tree-paper": _eight("static_tree", exponent_offset=1),
  # Han.
  **{f"aps-{e}-{m}": _low(gradcomp.aps, e, m) for e, m in FORMATS},
  **{f"cast-{e}-{m}": _low(gradcomp.loss_scaling_cast, 1.0, e, m) for e, m in FORMATS},
  **{
    f"aps-{e}-{m}-h{size}": _low(gradcomp.aps, e, m, group_size=size)
    for e, m in FORMATS[:2]  # 3 bits of exponent have no room for a sum of 256
    for size in (16, 32)
  },
  **{
    f"cast-{e}-{m}-h16": _low(gradcomp.loss_scaling_cast, 1.0, e, m, group_size=16)
    for e, m in FORMATS[:2]
  },
  # His hybrid precision: float32 in the first third.
  "aps-4-3-h16-hybrid": _low(gradcomp.aps, 4, 3, group_size=16)._replace(start=1 / 3),
  # Fang, dense at first as two of the paper's nets, or never.
  "redsync-1": _sparse(0.01),
  "redsync-0.1": _sparse(0.001),
  "redsync-0.1-asq": _sparse(0.001, quantize="asq"),
  **{f"redsync-{x:g}-paper": _sparse(x / 100, start=0.0) for x in (0.1, 1, 10)},
  "redsync-0.1-asq-paper": _of(asq_but_output, 0.001)._replace(momentum=True),
  "topk-1-noresidual": _of(gradcomp.compress, TopK(density=0.01), feedback=None),
  "topk-0.1-noresidual": _of(gradcomp.compress, TopK(density=0.001), feedback=None),
  "powersgd-2": _of(gradcomp.powersgd, 2),
  "powersgd-4": _of(gradcomp.powersgd, 4),
  "powersgd-4-alternate": _of(gradcomp.powersgd, 4, alternate=True),
  "onebit-64-ef21": _of(gradcomp.onebit_sgd, feedback="ef21"),
  "topk-1": _of(gradcomp.topk, 0.01),
}
PARTS = ("conv", "dense", "body")
_PLACES = {name: place for place, name in enumerate(METHODS)}


def place(name: str) -> int:
  """Returns where a method is among all, behind them if it is of another version."""
  return _PLACES.get(name.partition(":")[0], len(_PLACES))


def check(name: str) -> str:
  """Returns the name of a method, perhaps with a part, if there are such."""
  method, _, part = name.partition(":")
  if name in WHOLE:
    return name
  if method not in METHODS or (":" in name and part not in PARTS):
    raise ValueError(
      f"must be a name such as qsgd-4 or qsgd-4:conv, got {name!r}. Methods: "
      f"{', '.join([*METHODS, *WHOLE])}. Parts: {', '.join(PARTS)}."
    )
  if part and METHODS[method].momentum:
    raise ValueError(
      f"must have no part where the exchange has the momentum, got {name!r}"
    )
  return name


def labels(part: str, least: int | None, params: Any) -> Any:
  """Labels each leaf ``"low"``, if it is of the part and not small, or ``"full"``."""
  if least is None:
    least = default_min_leaf_size([x.size for x in jax.tree.leaves(params)])
  if part == "body":
    of_part = jax.tree.map(lambda label: label != "output", output_layer(params))
  else:
    rank = {"conv": 4, "dense": 2}[part]
    of_part = jax.tree.map(lambda x: x.ndim == rank, params)
  label = lambda x, chosen: "low" if chosen and x.size >= least else "full"
  return jax.tree.map(label, params, of_part)


def make(setting: Setting, *, steady: bool = False) -> tuple[Transform, Transform]:
  """Makes the exchange of a setting, and the optimizer behind it.

  ``steady`` leaves dense first steps out. Behind an optimizer that exchanges in place
  of gradients there is nothing.
  """
  method, _, part = check(setting.codec).partition(":")
  options: dict[str, Any] = {"axis_name": AXIS, "key": setting.seed}
  if method in WHOLE:
    if setting.exchange != "auto":
      raise ValueError(f"`exchange` must be 'auto' with {method}: it has its own.")
    return WHOLE[method].optimizer(setting, **options), optax.identity()
  found, max_norm = METHODS[method], setting.max_norm
  if setting.exchange != "auto":
    options["exchange"] = setting.exchange
  if part:
    options["min_leaf_size"] = 0  # for labels leave the small ones out
  first = 0 if steady else first_steps(setting.codec, setting.steps)
  if found.momentum:
    options |= {"momentum": setting.momentum, "nesterov": setting.nesterov}
  tx = found.make(**options)
  if first:
    if found.momentum:
      dense = gradcomp.redsync(1.0, **options)
    else:
      shared = ("exchange", "feedback", "min_leaf_size")  # switch wants them alike
      alike = {x: y for x, y in found.make.keywords.items() if x in shared}
      dense = gradcomp.dense(**(alike | options))
    tx = gradcomp.wrappers.switch([first], [dense, tx])
  if part:
    alike = {"exchange": "local"} if setting.exchange == "local" else {}
    full = gradcomp.dense(axis_name=AXIS, **alike)
    parts = functools.partial(labels, part, found.make.keywords.get("min_leaf_size"))
    tx = optax.partition({"low": tx, "full": full}, parts)
  local = found.momentum or setting.clipping != "mean"
  if max_norm is not None and local:
    # "root" is the rule of the study's records.
    rule = "root" if setting.clipping == "mean" else setting.clipping
    clip = gradcomp.wrappers.clip_by_local_norm(max_norm, axis_name=AXIS, rule=rule)
    tx, max_norm = optax.chain(clip, tx), None
  left = None if found.momentum else setting.momentum
  return tx, optimizer(setting, left, max_norm)


def first_steps(name: str, steps: int) -> int:
  """Returns how many of the steps of a training are dense at first.

  A method of another version counts as one that is never dense.

  >>> first_steps("redsync-1", 937), first_steps("redsync-1-paper", 937)
  (94, 0)
  """
  method = METHODS.get(name.partition(":")[0])
  return round(method.start * steps) if method else 0
