"""Provides every codec that can be built, each as a case.

A new codec is one more case.
"""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gradcomp._src.transforms.low_rank import PowerSGD
from tests.table import cases

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
LEVELS = ("sign_magnitude", "uniform")

# One bit has no room for a sign.
SCHEMES = [
  (bits, levels)
  for bits in WIDTHS
  for levels in LEVELS
  if (bits, levels) != (1, "sign_magnitude")
]


# Each width by bucket. Level scheme, norm, rounding and one scale a tensor are the same
# code for all widths: a few show it, for each codec takes seconds to compile.
QSGD_CASES = [
  cases.of_qsgd(
    bits=bits,
    bucket_size=bucket_size,
    norm=norm,
    levels=levels,
    rounding=rounding,
    slow=bits in (5, 6, 7),
  )
  for bits, levels in SCHEMES
  for bucket_size, norm, rounding, widths in (
    (64, "max", "stochastic", WIDTHS),
    (32, "l2", "nearest", (4,)),
    (None, "l2", "stochastic", (3,)),
    (None, "max", "nearest", (8,)),
  )
  if bits in widths and (levels == "sign_magnitude" or bits in (1, 4))
]
SHARED_QSGD_CASES = [
  cases.of_qsgd(bits=4, bucket_size=64, share_scale=True),
  cases.of_qsgd(bits=3, bucket_size=None, levels="uniform", share_scale=True),
  cases.of_qsgd(
    bits=8, bucket_size=64, norm="l2", rounding="nearest", share_scale=True, slow=True
  ),
]
CLIPPED_QSGD_CASES = [
  cases.of_qsgd(norm="rms", levels="uniform", **hyper)
  for hyper in (
    dict(bits=1, bucket_size=64, slow=True),
    dict(bits=2, bucket_size=64, rounding="nearest"),
    dict(bits=3, bucket_size=32, rounding="nearest", slow=True),
    dict(bits=4, bucket_size=32),
    dict(bits=2, bucket_size=64, rounding="nearest", share_scale=True),
  )
]
ROTATED_QSGD_CASES = [
  cases.of_qsgd(bits=4, bucket_size=64, rotate=8),
  cases.of_qsgd(bits=1, bucket_size=32, levels="uniform", rotate=8, slow=True),
  cases.of_qsgd(
    bits=2, bucket_size=32, norm="rms", levels="uniform", rounding="nearest", rotate=32
  ),
  cases.of_qsgd(bits=4, bucket_size=None, rotate=32, slow=True),
  cases.of_qsgd(bits=4, bucket_size=64, share_scale=True, rotate=32),
]
EIGHT_BIT_CASES = [
  cases.of_eight_bit(),
  cases.of_eight_bit(dtype="dynamic_map", slow=True),
  cases.of_eight_bit(dtype="static_tree"),
  cases.of_eight_bit(dtype="linear", slow=True),
  cases.of_eight_bit(dtype="mantissa", slow=True),
  cases.of_eight_bit(bucket_size=64, rounding="stochastic", slow=True),
  cases.of_eight_bit(dtype="dynamic_map", rounding="stochastic"),
  cases.of_eight_bit(dtype="mantissa", exponent_offset=1),
]
BLOCK_FLOAT_CASES = [
  cases.of_lossless(),
  cases.of_block_float(element="e2m1"),
  cases.of_block_float(rounding="stochastic", slow=True),
  cases.of_block_float(element="e2m1", rounding="stochastic", slow=True),
  cases.of_block_float(slow=True),
  cases.of_block_float(element="e5m2", slow=True),
  cases.of_block_float(element="e3m2", slow=True),
  cases.of_block_float(element="e2m3", rounding="stochastic", slow=True),
  cases.of_block_float(element="e2m1", scale="e4m3", block_size=16),
  cases.of_block_float(element="e2m1", rotate=32),
  cases.of_block_float(element="e2m1", rounding="stochastic", rotate=8, slow=True),
  cases.of_block_float(
    element="e2m1", scale="e4m3", block_size=16, rotate=32, slow=True
  ),
  cases.of_block_float(
    element="e2m1", scale="e4m3", block_size=16, rounding="stochastic", slow=True
  ),
]
SPARSE_CASES = [
  *(
    cases.of_top_k(
      selection=selection,
      quantize=quantize,
      range_size=1000,
      slow=(selection, quantize)
      not in {
        ("exact", None),
        ("trimmed", "mean"),
        ("threshold", "asq"),
        ("sampled", None),
      },
    )
    for selection, quantize in itertools.product(
      ("exact", "trimmed", "threshold", "sampled", "auto"), (None, "asq", "mean")
    )
    if selection != "sampled" or quantize is None
  ),
  cases.of_top_k(slow=True),
  cases.of_top_k(range_size=1000, dtype=jnp.bfloat16),
  cases.of_top_k(range_size=1000, dtype=jnp.float16, slow=True),
  cases.of_random_k(),
  cases.of_random_k(range_size=1000),
]
CASES = [
  *QSGD_CASES,
  *SHARED_QSGD_CASES,
  *CLIPPED_QSGD_CASES,
  *ROTATED_QSGD_CASES,
  # The levels' fit is a property of a leaf: the laws take those of the first step.
  *(
    cases.of_qsgd(bits=bits, bucket_size=64, levels="nonuniform", slow=bits != 3)
    for bits in (2, 3, 4)
  ),
  cases.of_dense(jnp.float32, np.float32),
  cases.of_dense(jnp.bfloat16, ml_dtypes.bfloat16),
  cases.of_dense(jnp.float16, np.float16, slow=True),
  cases.of_dense(jnp.bfloat16, ml_dtypes.bfloat16, rounding="stochastic"),
  cases.of_dense(jnp.float16, np.float16, slow=True, rounding="stochastic"),
  cases.of_one_bit(64),
  cases.of_one_bit(512),
  cases.of_one_bit_columns(),
  cases.of_sign(),
  cases.of_sign(scale="one", bucket_size=32),
  cases.of_sign(scale="one", vote="majority"),
  cases.of_ternary(),
  cases.of_ternary(share_scale=False, slow=True),
  cases.of_ternary(bucket_size=64, slow=True),
  cases.of_ternary(bucket_size=64, share_scale=False),
  cases.of_ternary(packing="base3", slow=True),
  cases.of_ternary(packing="base3", share_scale=False),
  cases.of_ternary(bucket_size=64, clip_sigmas=None),
  cases.of_ternary(bucket_size=64, clip_sigmas=None, share_scale=False, slow=True),
  cases.of_ternary(scaler="sigma"),
  cases.of_ternary(bucket_size=64, share_scale=False, rounding="nearest", slow=True),
  *EIGHT_BIT_CASES,
  *(
    cases.of_float_cast(exponent_bits=exponent, mantissa_bits=mantissa, **hyper)
    for exponent, mantissa, hyper in (
      (5, 2, dict()),
      (4, 3, dict(addends=8)),
      (3, 0, dict(slow=True)),
      (5, 10, dict(rounding="toward_zero", slow=True)),
      (5, 2, dict(rounding="stochastic")),
      (5, 10, dict(scale=1.0, slow=True)),
      (4, 3, dict(scale=1.0, rounding="toward_zero", slow=True)),
      (3, 0, dict(scale=1.0)),
      (5, 2, dict(scale=1.0, rounding="stochastic", slow=True)),
      (8, 23, dict(scale=64.0)),
    )
  ),
  cases.of_natural(),
  cases.of_natural(rounding="nearest", slow=True),
  *BLOCK_FLOAT_CASES,
  *SPARSE_CASES,
  cases.of_block_top(),
  cases.of_block_top(block_size=8, count=2, bits=8),
  cases.of_block_top(block_size=16, bits=32),
  cases.of_block_top(block_size=256, count=3, slow=True),
]
# Factors, which are no codecs: their averages send rows of others.
LOW_RANK = [
  cases.Case(PowerSGD(rank=2, min_rate=1), None, "row"),
  cases.Case(PowerSGD(rank=2, min_rate=1, alternate=True), None, "row"),
]
