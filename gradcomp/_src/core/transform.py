"""The optax transformation: gradient, residual, encode, exchange, decode."""

import functools
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.core.border import on_workers
from gradcomp._src.core.compression import Compression, Dither, paths_of
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.inputs import not_differentiated
from gradcomp._src.core.state import CompressState
from gradcomp._src.core.step import as_updates, otherwise, take_step
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.plan import MessageBytes
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.place import Place

Taken = tuple[Any, CompressState]  # updates, and the next state


def compress(  # noqa: PLR0913 - options of users, by keyword
  codec: LeafCodec,
  *,
  axis_name: AxisName | None = None,
  exchange: ExchangeName | Auto | Exchange = "auto",
  feedback: FeedbackName | Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: MessageBytes = "auto",
  key: ArrayLike = 0,
  dither: Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradient by the mean of all workers', sent compressed.

  Put it in front of an optimizer, and give it gradients that no collective has touched
  yet: see :func:`gradcomp.value_and_grad`. With worker :math:`i`'s gradient
  :math:`g_i` and residual :math:`e_i` (zero without feedback), it returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  where :math:`Q` encodes and decodes. ``two_shot`` encodes the mean once more, and
  sends the rounding error in the next step: see :class:`gradcomp.exchange.TwoShot`.
  Every worker gets the same bits. Without feedback the result is unbiased if the codec
  is, up to that rounding error.

  Under Explicit axes, call ``update`` in plain ``jax.jit``. It takes gradients typed
  ``{U:data}``, whose sum over the devices is the gradient of the whole batch, and
  returns that sum, replicated. There is then no :math:`1/N` in the formula.

  All is computed in float32, and returned in the gradient's dtype. With feedback, the
  error of that cast joins the residual, too. A mean that a codec makes too large for
  the dtype becomes its largest number. Float64 numbers beyond 3.4e38 become
  infinite. But with ``Dense()``, float64 is added as float64.
  Complex gradients are sent, and kept in residuals, as pairs of reals.

  A non-finite gradient makes (at least) its bucket NaN on every worker, and leaves the
  residuals there as they were. Guard with ``optax.apply_if_finite`` *after* this. Or
  put :func:`gradcomp.skip_nonfinite` around all, which keeps every residual.

  ``init`` takes any tree, for example a whole ``equinox.Module``: what is not trained,
  see :func:`gradcomp.value_and_grad`, has nothing in the state. ``update`` takes
  gradients with None there, and the tree itself as parameters. Variables of flax.nnx
  count as their arrays, and come back as Variables.

  Args:
    codec: the codec of the leaves, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name, exchange, feedback, min_leaf_size, message_bytes, key, dither: the
      options, which all recipes take, too: see :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation; its state is a :class:`gradcomp.state.CompressState`.
    Inside the map, ``init`` makes the worker's own state. Outside, under
    ``jax.set_mesh(mesh)`` or with arrays that lie on a mesh, it makes the global one:
    see :func:`gradcomp.state_specs`. Elsewhere, and without ``jax.set_mesh`` in
    ``jax.jit`` or ``jax.eval_shape``, it cannot count the workers. Then ``update``
    warns if their second stage loses something for that.

  Raises:
    ValueError: an option is bad, the codec or the axes do not allow the exchange, or
      the codec's residual would grow: see ``contraction`` of
      :class:`gradcomp.codecs.Codec`. In ``update``: an axis is not bound; there are
      manual axes and no ``axis_name``; gradients are already reduced; residuals have
      other shapes than it needs; or another process of the run has other options. In
      both, parameters are visibly sharded over an axis that is averaged over.
    TypeError: ``codec`` is not one; in ``update``, a gradient leaf is neither real nor
      complex floating point, or ``jax.grad`` differentiates through it.

  Example:
    >>> tx = compress(gradcomp.codecs.QSGD(bits=8, rounding="nearest"))
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 512)}
    >>> state = tx.init(grads)
    >>> updates, state = tx.update(grads, state)
    >>> bool(jnp.all(updates["w"] + state.residual["w"] == grads["w"]))
    True

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.4 and
    3.2; Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, section 4.2
  """
  if not is_codec(codec):
    raise TypeError(f"`codec` must be an instance of a codec, got {codec!r}.")
  return transformation(Compression(**locals()))


def transformation(parts: Compression) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that averages gradients as its parts do."""

  def average(across: Place, updates: Any, state: CompressState) -> Taken:
    updates = not_differentiated(updates)
    parts.check(across, updates, state)
    workers = parts.workers(across, updates, state)
    leaves = jax.tree.leaves(updates)
    plan = parts.plan(leaves, paths_of(updates), across, workers)
    parts.warn_of_owners(plan, state)
    share = parts.error_share(across)
    finish = functools.partial(as_updates, across.dtypes, share)
    facts = lambda plan: parts.step(plan, workers, state)
    rest = updates, state, finish
    taken = take_step(parts, facts(plan), *rest)[:2]
    again = lambda plan: take_step(parts, facts(plan), *rest)[:2]
    axes = across.axes if plan.sends else None
    return otherwise(taken, again, plan, axes)

  unsent = not parts.exchange.sends
  return on_workers(parts.init, average, parts.axis_name, keeps=unsent, local=unsent)
