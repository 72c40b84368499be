"""Laws of ranges: large numbers, and their sums, are sent like others."""

import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import ExchangeName, as_exchange
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.testing import modes
from gradcomp._src.testing.broken import BrokenLaw
from gradcomp._src.testing.leaves import gaussian, near_the_top, ragged
from gradcomp._src.testing.trial import trial

_UNIT = 2.0**-24  # the smallest number of float16
_TOP = float(jnp.finfo(jnp.float16).max)


def large_numbers_keep_their_size(codec: LeafCodec) -> None:
  """A leaf times a power of two decodes to that power of two times the decoded leaf.

  This holds to a hundredth of the largest number. The powers are 2^12, and 2^40 for
  codecs with float32 numbers in rows. The random bits are the same.

  Args:
    codec: the codec.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.large_numbers_keep_their_size(gradcomp.codecs.QSGD(bits=4))
  """
  x = gaussian(ragged(codec))
  expected = np.asarray(trial(codec, x).value, np.float64)
  bound = 0.01 * np.abs(x).max()
  for power in (12,) if codec.bind(Leaf(x.shape)).largest else (12, 40):
    scale = np.float32(2.0**power)
    found = np.asarray(trial(codec, x * scale).value, np.float64) / scale
    wrong = np.argwhere(~(np.abs(found - expected) <= bound))
    if wrong.size:
      at = tuple(map(int, wrong[0]))
      raise BrokenLaw(
        "large_numbers_keep_their_size",
        codec,
        f"send 2^{power} x as 2^{power} times what it sends of x",
        f"of element {list(at)} it sends {found[at]:.4g} and not {expected[at]:.4g} "
        f"times that ({len(wrong)} of {found.size} are wrong)",
        "`largest`, which says what a row holds, and bounds that numbers are cut to",
      )


def half_precision_keeps_its_range(
  codec: LeafCodec, exchange: ExchangeName | Exchange = "ring", *, workers: int = 4
) -> None:
  """A mean of float16 gradients is right near the largest number, and the smallest.

  The mean lies in the range of its addends, but a sum of N of them does not, and an Nth
  of one may underflow. Gradients are multiplied by a power of two, and so must the mean
  be: to a hundredth of the largest, plus the smallest number of float16.

  Args:
    codec: the codec.
    exchange: the exchange in which it sends partial sums.
    workers: N, all emulated.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.half_precision_keeps_its_range(gradcomp.codecs.Dense(), "two_shot")
  """
  transformation = compress(
    codec, axis_name="data", exchange=exchange, feedback=None, min_leaf_size=0
  )
  shape = (workers, *ragged(codec))
  name = as_exchange(exchange).name

  def mean(gradients: np.ndarray) -> np.ndarray:
    half = jnp.asarray(gradients, jnp.float16)
    found = modes.run("vmap", transformation, [half]).outputs[0]
    return np.asarray(found, np.float64)[0]

  top = near_the_top(shape, jnp.float16)
  # The workers agree, so that no rounding on the way changes what a codec selects.
  units = np.random.default_rng(0).integers(-8, 9, shape[1:]) * _UNIT
  units = np.broadcast_to(units, shape)
  for given, power, place in ((top, 2.0**-8, "top"), (units, 2.0**18, "smallest")):
    expected = mean(given * power) / power
    found = mean(given)
    bound = 0.01 * np.abs(given).max() + _UNIT
    # What a codec makes too large for float16 may be infinite, or the largest number.
    wrong = np.argwhere(~(np.abs(found - expected) <= bound) & (abs(expected) <= _TOP))
    if wrong.size:
      at = tuple(map(int, wrong[0]))
      raise BrokenLaw(
        "half_precision_keeps_its_range",
        codec,
        f"send float16 gradients near the {place} number as it sends others, over "
        f"{name} with {workers} workers",
        f"the mean of element {list(at)} is {found[at]:.4g} and not {expected[at]:.4g} "
        f"({len(wrong)} of {found.size} are wrong)",
        "`largest`, which says what a row holds, and casts without a scale",
      )
