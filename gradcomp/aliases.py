"""The methods by name: a codec, an exchange and feedback, ready for ``optax.chain``."""

from typing import Literal

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from gradcomp._axes import AxisName
from gradcomp.codecs import QSGD, Dense
from gradcomp.exchange import Exchange
from gradcomp.transform import compress


def qsgd(
  bits: int = 4,
  *,
  bucket_size: int | None = 512,
  norm: Literal["max", "l2"] = "max",
  levels: Literal["sign_magnitude", "uniform"] = "sign_magnitude",
  rounding: Literal["stochastic", "nearest"] = "stochastic",
  share_scale: bool = False,
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error"] | None = "auto",
  second_stage_feedback: bool = True,
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """QSGD: averages gradients over ``axis_name`` in ``bits`` bits an element.

  :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.QSGD`; the two say
  what the arguments mean. The paper uses buckets of 128 at 2 bits, of 512 at 4 and 8
  bits, and of 8192 at 16 bits. Unbiased, and without feedback by default, as in the
  paper; at 2 bits ``feedback="error"`` is worth its memory.

  Sends about ``bits + 32 / bucket_size`` bits an element.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=8), optax.sgd(1.0))
    >>> params = {"w": jnp.ones(1024)}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": jnp.full(1024, 0.5)}, state)
    >>> updates["w"]  # a constant bucket is exact
    Array([-0.5, -0.5, -0.5, ..., -0.5, -0.5, -0.5], dtype=float32)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.3,
    3.2.2 and 4
  """
  codec = QSGD(
    bits=bits,
    bucket_size=bucket_size,
    norm=norm,
    levels=levels,
    rounding=rounding,
    share_scale=share_scale,
  )
  return compress(
    codec,
    axis_name=axis_name,
    exchange=exchange,
    group_size=group_size,
    feedback=feedback,
    second_stage_feedback=second_stage_feedback,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
    key=key,
  )


def dense(
  dtype: DTypeLike = jnp.float32,
  *,
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error"] | None = "auto",
  second_stage_feedback: bool = True,
  message_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """The baseline: averages gradients over ``axis_name`` in 32 or 16 bits an element.

  ``float32`` is the plain mean, one ``psum``. ``bfloat16`` and ``float16`` travel as
  16-bit integers, through the same exchanges as every codec, and are added in float32.
  16 bits are biased (round to nearest) and so keep a residual by default.

  Example:
    >>> tx = gradcomp.dense(jnp.bfloat16, feedback=None)
    >>> grads = {"w": jnp.array([1.001, 2.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': Array([1.001, 2.   ], dtype=float32)}
  """
  return compress(
    Dense(dtype=dtype),
    axis_name=axis_name,
    exchange=exchange,
    group_size=group_size,
    feedback=feedback,
    second_stage_feedback=second_stage_feedback,
    message_bytes=message_bytes,
  )
