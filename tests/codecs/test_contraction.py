"""Codecs lose no more than they state, so that residuals stay bounded."""

import jax.numpy as jnp
import pytest

from gradcomp.codecs import QSGD, BlockFloat, OneBit, Sign, Ternary
from gradcomp.contrib import Eden
from gradcomp.testing import laws
from tests.plugins.slow_cases import slow
from tests.support import laws as suite
from tests.table.settings import CASES

OTHERS = [
  QSGD(bits=2, bucket_size=128),
  Ternary(bucket_size=128, share_scale=False),
  *slow(
    QSGD(bits=3),
    QSGD(bits=2, rounding="nearest"),
    QSGD(bits=2, bucket_size=128, rotate=32),
    Ternary(clip_sigmas=2.0),
    Ternary(rounding="nearest"),
    Eden(bits=1, block_size=32),
    Eden(bits=1, scale="least squares"),
  ),
]
# One of each formula, and all others as slow ones.
PLAIN = (QSGD, OneBit, BlockFloat)
SOME = {kind: next(x for x in CASES if type(x.codec) is kind) for kind in PLAIN}
KEPT = [
  x.codec if x in SOME.values() else pytest.param(x.codec, marks=pytest.mark.slow)
  for x in CASES
]


@pytest.mark.parametrize("codec", [*OTHERS, *KEPT], ids=suite.name)
def test_what_is_lost_is_what_is_stated(codec):
  codec = suite.here(codec)
  own_units = isinstance(codec, Sign) and codec.scale == "one"
  laws.errors_are_contractions(codec, most_error=1.1 if own_units else None)
  # Rounded to nearest, an element may make an l2 norm larger, and so itself.
  grows = getattr(codec, "norm", "") == "l2"
  most = jnp.inf if own_units else 0.05 if grows else 0.005
  laws.decoded_leaves_do_not_grow(codec, most=most)
  laws.residuals_are_bounded(codec)


GROWING = [
  QSGD(bits=2),
  QSGD(bits=2, bucket_size=128, share_scale=True),
  QSGD(bits=1, levels="uniform", bucket_size=32, rounding="nearest"),
  QSGD(bits=4, norm="l2"),
  Ternary(),
  Ternary(clip_sigmas=None),
  Sign(scale="one"),
]
BOUNDED = [
  *(QSGD(bits=2, bucket_size=x) for x in (32, 64, 128)),
  *(QSGD(bits=2, rounding="nearest", bucket_size=x) for x in (512, None)),
  *(QSGD(bits=x) for x in (3, 4, 8, 16)),
  *(QSGD(bits=x, norm="rms", levels="uniform") for x in (1, 2, 3, 4)),
  QSGD(bits=8, norm="l2", bucket_size=128),
  Ternary(bucket_size=64, share_scale=False),
  Ternary(rounding="nearest"),
]


def test_residuals_of_some_would_grow():
  assert [codec for codec in GROWING if codec.contraction > 0] == []
  assert [codec for codec in BOUNDED if codec.contraction <= 0] == []
