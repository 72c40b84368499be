"""Low-precision floats by name: a codec, an exchange and feedback, as in aliases.py."""

from typing import Literal

import optax
from jax.typing import ArrayLike

from gradcomp._axes import AxisName
from gradcomp._checks import static_factor
from gradcomp.codecs import FloatCast
from gradcomp.exchange import Exchange
from gradcomp.transform import compress


def aps(
  exponent_bits: int = 5,
  mantissa_bits: int = 2,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = "nearest_even",
  accumulate: Literal["format", "kahan", "float32"] = "format",
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error"] | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Auto Precision Scaling: averages gradients as floats of ``1 + e + m`` bits.

  :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.FloatCast`; the two
  say what the arguments mean. Each leaf is scaled by the largest power of two with
  which the sum of N workers cannot overflow; the workers agree on it, a byte a leaf.
  Every partial sum is rounded to the format, in the order of ``exchange``.

  The paper keeps no residual (``feedback=None``); by default one is kept, as for every
  biased codec. It uses rings of 8, and groups of 16 among 256 workers
  (``exchange="hierarchical", group_size=16``), and float32 for the last layer.

  Sends 8 bits an element with the default format, 4 with (3, 0), and a byte a leaf.
  ``optax.inject_hyperparams(gradcomp.aps, static_args=("exponent_bits",
  "mantissa_bits"))`` leaves the bits alone.

  Example:
    >>> tx = gradcomp.aps(4, 3, feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([1.0, -1.1, 3e-9, 0.0]), 512) * 2.0**-40}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4] * 2.0**40
    Array([ 1.   , -1.125,  0.   ,  0.   ], dtype=float32)

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021
  """
  codec = FloatCast(
    exponent_bits=exponent_bits,
    mantissa_bits=mantissa_bits,
    rounding=rounding,
    accumulate=accumulate,
  )
  return compress(
    codec,
    axis_name=axis_name,
    exchange=exchange,
    group_size=group_size,
    feedback=feedback,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
    key=key,
  )


def loss_scaling_cast(
  factor: float,
  exponent_bits: int = 5,
  mantissa_bits: int = 2,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = "nearest_even",
  accumulate: Literal["format", "kahan", "float32"] = "format",
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error"] | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """Loss scaling: the baseline of APS, one constant factor for all leaves.

  Like :func:`aps`, but every leaf is multiplied by ``factor`` before it is cast, and
  the mean divided by it. What is too large then becomes infinite, as in hardware; what
  is too small zero. A factor that is no power of two rounds twice more. It must be
  known when a program is traced: ``optax.inject_hyperparams`` needs it in
  ``static_args``.

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
  codec = FloatCast(
    exponent_bits=exponent_bits,
    mantissa_bits=mantissa_bits,
    scale=static_factor("factor", "a number from 2**-126 to 2**126", factor),
    rounding=rounding,
    accumulate=accumulate,
  )
  return compress(
    codec,
    axis_name=axis_name,
    exchange=exchange,
    group_size=group_size,
    feedback=feedback,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
    key=key,
  )
