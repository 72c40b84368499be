"""Measures of each leaf's compression, as numbers for any logger."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradcomp._src.checks import see
from gradcomp._src.core import border
from gradcomp._src.core.measures import Sums, watched
from gradcomp._src.core.state import is_state, states_in
from gradcomp._src.mesh.axes import count
from gradcomp._src.report import tracing
from gradcomp._src.report.collectives import aligned

Grads = TypeVar("Grads")
State = TypeVar("State")


class Metrics(NamedTuple):
  r"""Measures of a leaf's compression, or of all leaves', equal on all workers.

  Each is ``float32[]``. Worker i of N has the gradient :math:`g_i` and the residual
  :math:`e_i`, and sends :math:`c_i = g_i + e_i` less its unsent part :math:`e_i'`. The
  result of the step is :math:`m`. A quotient of zeros is 0.

  Attributes:
    bytes_sent: bytes that a worker sends, as :func:`gradcomp.explain` counts them.
    gradient_norm: :math:`\sqrt{\tfrac{1}{N} \sum_i |g_i|^2}`.
    residual_norm: the same of the residuals after the step.
    owner_residual_norm: the norm of the owner residuals, one vector for all workers.
    relative_error: :math:`\sqrt{\sum_i |e_i'|^2 / \sum_i |c_i|^2}`.
    cosine: of the angle between :math:`m` and the mean of all :math:`g_i`.
    zeros: the share of zeros in the sent parts.
    equal: the share of elements in leaves whose gradient is the same on all workers, to
      a millionth of its squares; 0 with one worker. In total, 1 shows gradients that
      were averaged before, or equal batches.
  """

  bytes_sent: jax.Array
  gradient_norm: jax.Array
  residual_norm: jax.Array
  owner_residual_norm: jax.Array
  relative_error: jax.Array
  cosine: jax.Array
  zeros: jax.Array
  equal: jax.Array


class Inspection(NamedTuple):
  """The measures of :func:`inspect_update`; ``print`` shows a table, on the host.

  A warning follows if all gradients are the same on all workers, and not zero.

  Attributes:
    total: the measures of all leaves together.
    leaves: the measures of each leaf, by its path.
  """

  total: Metrics
  leaves: dict[str, Metrics]

  @property
  def warning(self) -> str:
    """The warning of equal gradients, on the host; empty where they are not."""
    if float(self.total.equal) != 1 or not float(self.total.gradient_norm) > 0:
      return ""
    return (
      "The gradient is the same on all workers: each sends what all have. Delete the "
      "`pmean` before the exchange, or give each worker its own part of the batch."
      f"{see('the-gradient-is-the-same-on-all-workers')}"
    )

  def __str__(self) -> str:
    rows = [["leaf", *(name.replace("_", " ") for name in Metrics._fields)]]
    for path, metrics in [*self.leaves.items(), ("total", self.total)]:
      nbytes, *values = map(float, metrics)
      rows.append([path, f"{math.ceil(nbytes):,}", *(f"{x:.4g}" for x in values)])
    return "\n".join(aligned(rows) + [self.warning] * bool(self.warning))


def inspect_update(
  optimizer: optax.GradientTransformation,
  grads: Grads,
  opt_state: State,
  params: Any = None,
  **extra_args: Any,
) -> tuple[Grads, State, Inspection]:
  """Returns the updates and the state of ``optimizer.update``, and measures of them.

  Call it in place of ``update``, inside the map, or in plain ``jax.jit``;
  :func:`gradcomp.make_train_step` does with ``inspect=True``. It also sends the plain
  mean of the gradients in ``float32``. The :class:`Inspection` is the same on all
  workers; a program that returns it alone takes no step.

  A transformation that another step runs (under ``optax.MultiSteps``, in
  ``jax.lax.cond``) has NaN for all but bytes. Where a gradient is not finite, errors
  and the cosine are NaN. :func:`gradcomp.parallel.zero` has a second line for each
  leaf, "change", for the updates that owners send: ``gradient_norm`` is the distance of
  the parameters from the owners' rows before the update, and ``owner_residual_norm``
  after; only the latter is in the total. Its cosine of gradients is NaN, and bytes of
  both ways are in the first line.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    grads: the gradients of this worker, as ``update`` takes them.
    opt_state: the state of the optimizer before the step.
    params: the parameters, if ``update`` needs them.
    **extra_args: further arguments of ``update``.

  Raises:
    TypeError: ``optimizer`` is no gradient transformation.
    ValueError: none of gradcomp's transformations is in it; ``opt_state`` is that of
      another optimizer; or ``update`` would raise it.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4), optax.sgd(0.1))
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
    >>> updates, state, found = inspect_update(optimizer, grads, optimizer.init(grads))
    >>> sorted(found.leaves), bool(found.total.cosine > 0.99)
    (["['w']"], True)
  """
  if not isinstance(optimizer, optax.GradientTransformation):
    raise TypeError(
      f"`optimizer` must be an optax.GradientTransformation, got {optimizer!r}."
    )
  return measured_update(optimizer, optimizer, grads, opt_state, params, **extra_args)


def measured_update(
  optimizer: optax.GradientTransformation,
  studied: optax.GradientTransformation,
  grads: Grads,
  opt_state: State,
  params: Any,
  **extra_args: Any,
) -> tuple[Grads, State, Inspection]:
  """Runs and measures ``optimizer.update``, and reads the messages of ``studied``."""
  # These send the same. A wrapper that is made anew for each step is no key of a study
  # that is kept, and the optimizer inside is.
  like, mesh, sizes = border.on_device(grads, opt_state)
  known = lambda name: count(name, mesh)[0]
  found = tracing.study_in(studied, like, sizes or (1,), {}, known).found
  states = states_in(opt_state)
  if not found or not states:
    raise ValueError(
      "`optimizer` must have a gradcomp transformation in it, whose state is in "
      f"`opt_state`, got {len(found)} of them and {len(states)} states; make the state "
      "by optimizer.init."
    )
  by_state = {x.state: x for x in found if x.state is not None}
  if not by_state.keys() <= set(range(len(states))):
    raise ValueError(
      f"`opt_state` must be that of `optimizer`, which has {max(by_state) + 1} "
      f"gradcomp transformations, got the states of {len(states)}; make it by "
      "optimizer.init."
    )
  numbers = itertools.count()
  of = lambda x: by_state.get(next(numbers)) if is_state(x) else None
  watch = lambda x: watched(x, len(one.plan.names)) if (one := of(x)) else x
  state = jax.tree.map(watch, opt_state, is_leaf=is_state)
  update = optax.with_extra_args_support(optimizer).update
  updates, state = update(grads, state, params, **extra_args)
  sums = [x.measures for x in states_in(state) if x.measures is not None]
  without = lambda x: x._replace(measures=None) if is_state(x) else x
  state = jax.tree.map(without, state, is_leaf=is_state)
  return updates, state, _inspection([by_state[i] for i in sorted(by_state)], sums)


def _inspection(found: Sequence[tracing.Found], sums: Sequence[Sums]) -> Inspection:
  """Returns the metrics of each leaf of the transformations, and of all together."""
  leaves: dict[str, Metrics] = {}
  for one, rows in zip(found, sums, strict=True):
    names = list(zip(one.plan.names, one.by_leaf, strict=True))
    # zero has further rows, for the updates that owners send.
    back = len(rows.size) // max(len(names), 1) - 1
    names += [(f"{name} change", Fraction(0)) for name, _ in names] * back
    for i, (name, nbytes) in enumerate(names):
      same = sum(name == path.partition(" #")[0] for path in leaves)
      path = f"{name} #{same + 1}" if same else name
      leaves[path] = _metrics(nbytes, jax.tree.map(lambda x, i=i: x[i], rows))
  cut = lambda one, rows: jax.tree.map(lambda x: x[: len(one.plan.names)], rows)
  own = map(cut, found, sums)
  total = jax.tree.map(lambda *x: jnp.sum(jnp.concatenate(x), axis=0), *own)
  sent = sum((sum(x.by_leaf, x.fitting) for x in found), Fraction(0))
  return Inspection(_metrics(sent, total), leaves)


def _metrics(bytes_sent: Fraction, sums: Sums) -> Metrics:
  """Returns the metrics of a leaf, or of all, from the sums over its elements."""
  return Metrics(
    bytes_sent=jnp.float32(float(bytes_sent)),
    gradient_norm=jnp.sqrt(sums.gradient),
    residual_norm=jnp.sqrt(sums.residual),
    owner_residual_norm=jnp.sqrt(sums.owned),
    relative_error=jnp.sqrt(_ratio(sums.unsent, sums.corrected)),
    cosine=_ratio(sums.product, jnp.sqrt(sums.mean) * jnp.sqrt(sums.true)),
    zeros=_ratio(sums.zeros, sums.size),
    equal=_ratio(sums.equal, sums.size),
  )


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the quotient: 0 for 0/0, and NaN for values that are not finite."""
  quotient = a / jnp.where(b == 0, 1.0, b)
  return jnp.where(b == 0, 0.0, jnp.where(jnp.isfinite(b), quotient, jnp.nan))
