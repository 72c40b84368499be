"""Builds low-precision floats by name: a codec, an exchange and feedback."""

from typing import Literal, Unpack

import optax

from gradcomp._src.checks import static_factor
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.transforms.options import CompressOptions, of_codec, recipe


@recipe(FloatCast)
def aps(
  exponent_bits: int = FloatCast.exponent_bits,
  mantissa_bits: int = FloatCast.mantissa_bits,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = FloatCast.rounding,
  accumulate: Literal["format", "kahan", "float32"] = FloatCast.accumulate,
  implementation: Implementation | None = FloatCast.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Auto Precision Scaling: averages gradients as floats of ``1 + e + m`` bits.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.FloatCast`. The
  workers agree on the largest power of two :math:`2^f` with which the sum of a leaf
  cannot overflow. Without residuals it returns

  .. math:: \frac{2^{-f}}{N} \bigoplus_i \mathrm{cast}(2^f g_i)

  where :math:`\oplus` rounds every partial sum to the format, in the order of
  ``exchange``.

  It is biased, and keeps a residual by default; the paper keeps none
  (``feedback=None``). The paper uses rings of 8, groups of 16 among 256 workers
  (``exchange=Hierarchical(group_size=16)``), and float32 for the last layer. A payload
  has 8 bits an element with the default format, 4 with (3, 0), and a byte a leaf.
  ``optax.inject_hyperparams`` needs ``static_args=("exponent_bits", "mantissa_bits")``.

  Raises:
    ValueError: an argument that the codec or ``compress`` does not allow; in ``init``
      or ``update``, more workers than the format has room for.

  Example:
    >>> tx = gradcomp.aps(4, 3, feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([1.0, -1.1, 3e-9, 0.0]), 512) * 2.0**-40}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4] * 2.0**40
    Array([ 1.   , -1.125,  0.   ,  0.   ], dtype=float32)
  """
  return of_codec(aps, FloatCast, locals())


@recipe(FloatCast)
def loss_scaling_cast(
  factor: float,
  exponent_bits: int = FloatCast.exponent_bits,
  mantissa_bits: int = FloatCast.mantissa_bits,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = FloatCast.rounding,
  accumulate: Literal["format", "kahan", "float32"] = FloatCast.accumulate,
  implementation: Implementation | None = FloatCast.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Averages gradients as floats of few bits, scaled by one constant: loss scaling.

  This is the baseline of :func:`aps`. Without residuals it returns

  .. math:: \frac{1}{c N} \bigoplus_i \mathrm{cast}(c \, g_i)

  Numbers that are too large become infinite, as in hardware, and numbers that are too
  small become zero. A factor that is no power of two rounds twice more. It must be
  known when a program is traced: ``optax.inject_hyperparams`` needs it in
  ``static_args``. Like :func:`aps` it is biased, keeps a residual by default, and sends
  4, 8, 16 or 32 bits an element; it sends no byte a leaf.

  Args:
    factor: c, a number from 2**-126 to 2**126. Required.

  Example:
    >>> tx = gradcomp.loss_scaling_cast(1024.0, feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([1.0, 1e3, 1e-3, 1e-9]), 512)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4]
    Array([1.000000e+00,          inf, 9.765625e-04, 0.000000e+00], dtype=float32)

  References:
    Han et al., 2021, section 3.1; Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2017
  """
  scale = static_factor("factor", "a number from 2**-126 to 2**126", factor)
  return of_codec(loss_scaling_cast, FloatCast, locals())
