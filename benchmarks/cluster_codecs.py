"""Names what cluster_study.py compares: each paper's settings, and those that fail.

A name may end in a part of the network, as in ``qsgd-2:conv``. Then the codec has those
leaves of that part that it has without a part, and all others travel in float32:

  conv   convolutions
  dense  matrices
  body   all but the output layer

QSGD of the library is better than the paper's: owners of a share keep what their
second encoding loses, and workers share random bits, so that their errors cancel. A
name that ends in ``-paper`` has neither.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from gradcomp._leaf_codecs import default_min_leaf_size
from gradcomp.codecs import OneBit, TopK
from gradcomp.exchange import Hierarchical, TwoShot

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from methods import FORMATS, output_layer  # noqa: E402

Transform = optax.GradientTransformation


class Method(NamedTuple):
  """Makes an exchange.

  Attributes:
    make: takes the options that all recipes share, by keyword.
    momentum: whether the exchange has the momentum, and takes it as ``momentum``. Then
      gradients are clipped in front of it, and else behind it.
    start: the share of the steps in which it is dense at first.
  """

  make: functools.partial[Transform]
  momentum: bool = False
  start: float = 0.0


def _of(make: Callable[..., Transform], *args: Any, **options: Any) -> Method:
  return Method(functools.partial(make, *args, **options))


def _plain(*args: Any, **options: Any) -> Method:
  """Returns QSGD as Grubic's: see the top of the file."""
  alike = {"exchange": TwoShot(feedback=False), "dither": "independent"}
  return _of(gradcomp.qsgd, *args, **alike, **options)


def _low(make: Callable[..., Transform], *args: Any, exchange: Any = "ring") -> Method:
  """Returns floats as the paper has them: a ring, all leaves, and no residuals."""
  return _of(make, *args, exchange=exchange, feedback=None, min_leaf_size=0)


def _sparse(density: float, start: float = 0.1, **options: Any) -> Method:
  redsync = functools.partial(gradcomp.redsync, density, nesterov=False, **options)
  return Method(redsync, momentum=True, start=start)


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
  "qsgd-4-8192-paper": _plain(4, bucket_size=8192),
  "qsgd-2-tensor-paper": _plain(2, bucket_size=None),
  "qsgd-4-l2-paper": _plain(4, norm="l2"),
  "qsgd-2-l2-paper": _plain(2, bucket_size=128, norm="l2"),
  "qsgd-1-uniform-paper": _plain(1, bucket_size=128, levels="uniform"),
  # What the library adds at 2 bits.
  "qsgd-2-fitted": _of(gradcomp.qsgd, 2, bucket_size=128, levels="nonuniform"),
  "qsgd-2-feedback": _of(gradcomp.qsgd, 2, bucket_size=128, feedback="error"),
  "onebit-64": _of(gradcomp.onebit_sgd),
  "onebit-512": _of(gradcomp.onebit_sgd, 512),
  "onebit-column": _of(gradcomp.onebit_sgd, per_column=True),
  # Dense at first. Owners then keep no residuals, so nobody is an owner.
  "onebit-64-warm": Method(
    functools.partial(gradcomp.onebit_sgd, exchange="all_gather", feedback="error"),
    start=0.1,
  ),
  "onebit-64-nofeedback": _of(gradcomp.compress, OneBit(), feedback=None),
  # Wen.
  "terngrad": _of(gradcomp.terngrad),
  "terngrad-noclip": _of(gradcomp.terngrad, None),
  # Dettmers, whose workers keep no residuals.
  **{
    name.replace("_", "-"): _of(gradcomp.eight_bit, name, feedback=None)
    for name in TYPES
  },
  # Han.
  **{f"aps-{e}-{m}": _low(gradcomp.aps, e, m) for e, m in FORMATS},
  **{f"cast-{e}-{m}": _low(gradcomp.loss_scaling_cast, 1.0, e, m) for e, m in FORMATS},
  **{
    f"aps-{e}-{m}-h{size}": _low(
      gradcomp.aps, e, m, exchange=Hierarchical(group_size=size)
    )
    for e, m in FORMATS[:2]
    for size in (16, 32)
  },
  # His hybrid precision: float32 in the first third.
  "aps-4-3-h16-hybrid": _low(
    gradcomp.aps, 4, 3, exchange=Hierarchical(group_size=16)
  )._replace(start=1 / 3),
  # Fang, who is dense at first.
  "redsync-1": _sparse(0.01),
  "redsync-0.1": _sparse(0.001),
  "redsync-0.1-asq": _sparse(0.001, quantize="asq"),
  "redsync-0.1-cold": _sparse(0.001, start=0.0),
  "topk-1-noresidual": _of(gradcomp.compress, TopK(density=0.01), feedback=None),
  "topk-0.1-noresidual": _of(gradcomp.compress, TopK(density=0.001), feedback=None),
  "powersgd-2": _of(gradcomp.powersgd, 2),
  "powersgd-4": _of(gradcomp.powersgd, 4),
}
PARTS = ("conv", "dense", "body")
_PLACES = {name: place for place, name in enumerate(METHODS)}


def place(name: str) -> int:
  """Returns where a method is among all, behind them if it is of another version."""
  return _PLACES.get(name.partition(":")[0], len(_PLACES))


def check(name: str) -> str:
  """Returns the name of a method, perhaps with a part.

  Raises:
    argparse.ArgumentTypeError: there is no such method, or no such part of it.
  """
  method, _, part = name.partition(":")
  if method not in METHODS or (":" in name and part not in PARTS):
    raise argparse.ArgumentTypeError(
      f"must be a name such as qsgd-4 or qsgd-4:conv, got {name!r}. Methods: "
      f"{', '.join(METHODS)}. Parts: {', '.join(PARTS)}."
    )
  if part and METHODS[method].momentum:
    raise argparse.ArgumentTypeError(
      f"must have no part where the exchange has the momentum, got {name!r}"
    )
  return name


def labels(part: str, least: int | None, params: Any) -> Any:
  """Labels each leaf ``"low"``, if it is of the part and not small, or ``"full"``.

  Args:
    part: one of ``PARTS``.
    least: the elements from which a leaf is not small; None for the library's choice.
    params: of the network.
  """
  if least is None:
    least = default_min_leaf_size([x.size for x in jax.tree.leaves(params)])
  if part == "body":
    of_part = jax.tree.map(lambda label: label != "output", output_layer(params))
  else:
    rank = {"conv": 4, "dense": 2}[part]
    of_part = jax.tree.map(lambda x: x.ndim == rank, params)
  return jax.tree.map(
    lambda x, chosen: "low" if chosen and x.size >= least else "full", params, of_part
  )


def make(
  name: str,
  *,
  axis_name: str,
  steps: int,
  exchange: str = "auto",
  momentum: float | None = None,
  max_norm: float | None = None,
  key: int = 0,
  steady: bool = False,
) -> tuple[Transform, float | None, float | None]:
  """Makes the exchange of a name.

  Args:
    name: a method, perhaps with a part.
    axis_name: the axis of the workers.
    steps: those of the training, of which a share may be dense.
    exchange: ``"auto"`` for the method's own.
    momentum: of the training.
    max_norm: what gradients are clipped at; None for no clipping.
    key: the seed of the rounding.
    steady: leaves the dense steps at the start out.

  Returns:
    The exchange, and the momentum and the clipping that are left for what is behind it.
  """
  method, _, part = check(name).partition(":")
  found = METHODS[method]
  options: dict[str, Any] = {"axis_name": axis_name, "key": key}
  if exchange != "auto":
    options["exchange"] = exchange
  if part:
    options["min_leaf_size"] = 0  # for labels leave the small ones out
  tx = _with_start(found, 0 if steady else steps, momentum, options)
  if part:
    alike = {"exchange": "local"} if exchange == "local" else {}
    full = gradcomp.dense(axis_name=axis_name, **alike)
    least = found.make.keywords.get("min_leaf_size")
    parts = functools.partial(labels, part, least)
    tx = optax.partition({"low": tx, "full": full}, parts)
  if not found.momentum:
    return tx, momentum, max_norm
  if max_norm is not None:
    # The rule that the committed records have.
    clip = gradcomp.clip_by_local_norm(max_norm, axis_name=axis_name, rule="root")
    tx = optax.chain(clip, tx)
  return tx, None, None


def _with_start(
  method: Method, steps: int, momentum: float | None, options: dict[str, Any]
) -> Transform:
  own = {"momentum": momentum} if method.momentum else {}
  tx = method.make(**own, **options)
  first = round(method.start * steps)
  if not first:
    return tx
  if method.momentum:
    dense = gradcomp.redsync(1.0, momentum, nesterov=False, **options)
  else:
    shared = ("exchange", "feedback", "min_leaf_size")  # switch wants them alike
    alike = {x: found for x, found in method.make.keywords.items() if x in shared}
    dense = gradcomp.dense(**(alike | options))
  return gradcomp.switch([first], [dense, tx])
