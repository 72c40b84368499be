"""Every codec keeps its promises whatever a leaf holds, not only for Gaussian ones."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from gradcomp.codecs import QSGD, EightBit, OneBit, Ternary
from tests.plugins.slow_cases import one_in, slow
from tests.support import laws

# Around buckets of 32. Each size compiles anew, so few of those up to 200.
SIZES, MORE_SIZES = (65, 200), (0, 1, 32)

SPECIAL = np.float32(
  [0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-96, 1, -1, 3e38, -np.finfo(np.float32).max]
)

# How many elements share a scale, None for all; and how often the largest of them the
# largest value may be, None where levels do not depend on the leaf: one above may be
# the nearest.
CODECS = {
  OneBit(bucket_size=32): (32, 1),
  OneBit(per_column=True): (None, 1),
  Ternary(bucket_size=32, share_scale=False): (32, 1),
  # Sigma is at most the largest element.
  Ternary(packing="base3", scaler="sigma", clip_sigmas=2.5): (None, 2.5),
  EightBit(dtype="dynamic_map", bucket_size=32, rounding="stochastic"): (32, 1),
  EightBit(dtype="mantissa", exponent_offset=0): (None, None),
  EightBit(): (None, 1),
  QSGD(bits=3, bucket_size=32, levels="nonuniform"): (32, 1),
  # A root mean square is at most the largest element.
  QSGD(bits=2, bucket_size=32, norm="rms", levels="uniform"): (32, 1.494),
}


@st.composite
def leaves(draw, sizes):
  """Constants, special values, one huge range, or any floats; finite or not."""
  size = draw(st.sampled_from(sizes))
  elements = draw(
    st.sampled_from(
      [
        st.just(draw(st.sampled_from(SPECIAL))),
        st.sampled_from(SPECIAL),
        st.floats(-1, 1, width=32),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(width=32),
      ]
    )
  )
  # Without a fill every element is drawn, so that few leaves are almost constant.
  return draw(hnp.arrays(np.float32, size, elements=elements, fill=st.nothing()))


@pytest.mark.parametrize("sizes", [SIZES, *slow((MORE_SIZES,))], ids=["few", "more"])
@pytest.mark.parametrize(
  "codec",
  one_in(3, CODECS),
  ids=laws.name,
)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_values(codec, sizes, data):
  """Finite buckets stay finite, within the largest element; others are NaN."""
  x = data.draw(leaves(sizes))
  restored = laws.round_trip(codec, x)
  assert restored.shape == x.shape and restored.dtype == x.dtype
  count, most = CODECS[codec]
  count = count or max(x.size, 1)
  for start in range(0, x.size, count):
    bucket, got = x[start : start + count], restored[start : start + count]
    if not np.isfinite(bucket).all():
      assert np.isnan(got).all()
      continue
    assert np.isfinite(got).all()
    largest = np.abs(bucket.astype(np.float64)).max()
    if largest == 0:
      assert (got == 0).all()
    if most is not None:
      # The smallest scale; and the order of additions in a sum of 200 at most.
      limit = max(most * largest * (1 + 200 * 2.0**-24), 2.0**-96)
      assert (np.abs(got.astype(np.float64)) <= limit).all()
