"""Builds PowerSGD: means of low rank, and a dense start."""

from typing import Literal, Unpack

import optax

from gradcomp._src.checks import step_count
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.power_sgd import PowerSGD
from gradcomp._src.core.transform import compress
from gradcomp._src.transforms.options import CompressOptions, checked, recipe
from gradcomp._src.transforms.switch import switch


@recipe(PowerSGD)
def powersgd(
  rank: int = PowerSGD.rank,
  *,
  min_rate: float = PowerSGD.min_rate,
  start: int = 0,
  bits: Literal[8, 32] = PowerSGD.bits,
  alternate: bool = PowerSGD.alternate,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""PowerSGD: averages gradients over ``axis_name`` as products of thin matrices.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.PowerSGD`. With
  worker :math:`i`'s gradient :math:`g_i` and residual :math:`e_i`, as matrices, it
  returns

  .. math:: \hat P Q'^T \approx \frac{1}{N} \sum_i (g_i + e_i), \qquad
     e_i' = g_i + e_i - \hat P Q'^T

  It is biased, and always keeps a residual. Momentum is best behind it, as in the
  paper: ``optax.sgd(0.1, momentum=0.9)``.

  A payload has ``32 * rank * (m + n)`` bits for a matrix of m by n, or 8 bits a number
  with ``bits=8``. With ``alternate=True`` (ACP-SGD) it has ``32 * rank * max(m, n)``,
  in one round.

  Args:
    start: steps that are dense before the first compressed one, 0 or more. Default: 0.
    feedback: ``"error"``, ``"momentum"``, an object of these, or ``"auto"``, which is
      ``"error"``; see :class:`gradcomp.CompressOptions`. Default: ``"auto"``.

  Returns:
    A gradient transformation, as :func:`gradcomp.compress` returns it; with ``start`` a
    :func:`gradcomp.wrappers.switch` to that.

  Raises:
    ValueError: an argument that the codec or ``compress`` does not allow; ``feedback``
      is None; or ``start`` is no number of steps.

  Example:
    >>> tx = gradcomp.powersgd(rank=1)
    >>> gradient = {"w": jnp.diag(jnp.array([4.0, 1.0] + 62 * [0.0]))}
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> jax.tree.map(lambda *x: bool(jnp.allclose(x[0] + x[1], x[2], atol=1e-6)),
    ...              update, state.residual, gradient)
    {'w': True}
  """
  feedback = options.get("feedback", "auto")
  if feedback is None:
    raise ValueError(
      '`feedback` must be "auto", "error" or "momentum" in PowerSGD, whose means lack '
      "what no residual keeps, got None; gradcomp.compress(PowerSGD(), feedback=None) "
      "may."
    )
  steps = step_count("start", start, least=0)
  codec = PowerSGD(rank=rank, min_rate=min_rate, bits=bits, alternate=alternate)
  low_rank = compress(codec, **checked(powersgd, options))
  if not steps:
    return low_rank
  # It keeps the residuals that the next one needs. They stay zero.
  dense: CompressOptions = {**options}
  dense["feedback"] = "error" if feedback == "auto" else feedback
  return switch([steps], [compress(Dense(), **dense), low_rank])
