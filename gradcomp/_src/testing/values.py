"""Laws of decoded values: zeros, constants, NaN, odd sizes, padding, ranges."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import ExchangeName, as_exchange
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.testing import broken, leaves, modes
from gradcomp._src.testing.broken import Findings, difference, first_wrong, law

__all__ = ["constants_are_exact", "half_precision_keeps_its_range"]
__all__ += ["large_numbers_keep_their_size", "non_finite_elements_are_seen"]
__all__ += ["odd_sizes_work", "padding_never_leaks", "tiny_numbers_stay_finite"]
__all__ += ["zeros_decode_to_zeros"]

_TINY = np.array([1e-45, -1e-41, 1.1754942e-38, -(2.0**-126), 2.0**-120, 0, -0.0], "f")
_UNIT = 2.0**-24  # the smallest number of float16
_TOP = float(jnp.finfo(jnp.float16).max)


@law("codecs.OneBit()", "`encode_rows` and `decode_rows` for a bucket whose scale is 0")
def zeros_decode_to_zeros(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """A leaf of zeros decodes to zeros, which fill up rows."""
  zeros = np.zeros_like(leaves.leaf_of(codec, x))
  found = difference(leaves.trial(codec, zeros).value, zeros)
  yield codec, "decode a leaf of zeros to zeros", found


@law(
  "codecs.QSGD(bits=4), (1.0, -0.1, 3e38)",
  "the largest level of a bucket, and its scale",
)
def constants_are_exact(
  codec: LeafCodec, values: tuple[float, ...], x: ArrayLike | None = None
) -> Findings:
  """A leaf of one value decodes exactly, for ``values`` that a codec is exact for."""
  for value in values:
    constant = np.full(leaves.leaf_of(codec, x).shape, value, np.float32)
    found = difference(leaves.trial(codec, constant).value, constant)
    yield codec, f"decode a leaf of {value} alone to {value}", found


@law("codecs.EightBit()", "the division by a scale")
def tiny_numbers_stay_finite(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Subnormal numbers decode to finite ones of at most 1, never to NaN."""
  # A scale that underflows, or its reciprocal that overflows, would spoil a bucket.
  shape = leaves.leaf_of(codec, x).shape
  for leaf in (np.resize(_TINY, shape), np.full(shape, np.float32(1e-40))):
    value = leaves.trial(codec, leaf).value
    # NaN is not at most 1 either.
    found = first_wrong(~(np.abs(value) <= 1), value, leaf)
    yield codec, "decode subnormal numbers to finite ones of at most 1", found


@law(
  "codecs.QSGD(bits=4, bucket_size=64), bad=np.inf, spoils=64",
  "what `encode_rows` makes of elements that are not finite",
)
def non_finite_elements_are_seen(
  codec: LeafCodec,
  x: ArrayLike | None = None,
  bad: float = np.nan,
  *,
  spoils: int | str | None = "any",
  unclipped: LeafCodec | None = None,
) -> Findings:
  """A NaN or an infinity decodes to one, never to a number; the rest stays.

  Args:
    x: a finite leaf.
    bad: the new value of one of its elements: NaN or an infinity.
    spoils: the elements that are not finite then; all others must keep their bits.
      ``"any"``: some in the element's row, and any others. The number of consecutive
      elements that all become NaN; None for the whole leaf, ``"column"`` for its
      column. ``"itself"``: only it, with its own value. ``"sent"``: it is sent as it
      is, and may displace others. ``"row"``: some sent elements of its row.
    unclipped: the codec for the rest of a leaf that is not finite, if another.
  """
  leaf = leaves.leaf_of(codec, x)
  position = leaf.size // 2
  dirty = leaf.copy()
  dirty.flat[position] = bad
  found = leaves.trial(codec, dirty).value.ravel()
  clean = leaves.trial(codec, leaf).value.ravel()
  if unclipped is not None:
    clean = np.asarray(leaves.returned(unclipped, leaf)).ravel()
  sizes: dict[Any, int] = {None: leaf.size, "itself": 1}
  row = sizes.get(spoils, codec.bind(Leaf(leaf.shape)).tile_size)
  number = np.arange(leaf.size) // (spoils if isinstance(spoils, int) else row)
  if spoils == "column":
    number = np.arange(leaf.size) % (leaf.size // leaf.shape[0])
  spoiled = number == number[position]
  at, unseen = found[position], None
  if spoils in ("itself", "sent"):
    if not (at == bad or (at != at and bad != bad)):
      unseen = f"element {position} became {at}"
  elif spoils in ("any", "row"):
    if np.isfinite(found[spoiled]).all():
      unseen = f"element {position} became {at}, and its row is finite"
  else:
    unseen = first_wrong(spoiled & ~np.isnan(found), found, np.full_like(found, np.nan))
    unseen = unseen and f"in the same bucket {unseen}"
  yield codec, f"never replace {bad} by a number", unseen
  kept = (found == clean) | ((found != found) & (clean != clean))
  if spoils == "any":
    spoiled = spoiled | ~np.isfinite(found)
  elif spoils == "sent":
    # It may take the place of others. These are sent, in 16 bits or more, or zero.
    near = np.abs(found - leaf.ravel()) <= 2.0**-8 * np.abs(leaf.ravel())
    kept |= spoiled & (near | (found == 0))
    spoiled = np.arange(leaf.size) == position
  changed = first_wrong(~kept & ~spoiled, found, clean)
  yield codec, f"leave what {bad} at {position} does not spoil as it is", changed


@law(
  "codecs.OneBit(), sizes=(0, 33)",
  "the last row of a leaf, which the leaf does not fill",
)
def odd_sizes_work(codec: LeafCodec, sizes: Sequence[int] = leaves.SIZES) -> Findings:
  """Leaves of any size decode to finite numbers in their shape; zeros to zeros."""
  tried = [leaves.gaussian(size, seed=size) for size in sizes]
  zeros = [np.zeros_like(leaf) for leaf in tried]
  run = jax.jit(lambda tried: [leaves.round_trip(codec, x) for x in tried])
  for leaf, value, zero in zip(tried, run(tried), run(zeros), strict=True):
    expected = f"decode a leaf of {leaf.size} elements to as many finite ones"
    if value.shape != leaf.shape:
      yield codec, expected, f"it becomes {broken.described(value)}"
    if not np.isfinite(value).all():
      yield codec, expected, f"it becomes {value}"
    yield codec, expected, difference(zero, np.zeros_like(leaf), of="as many zeros")


@law(
  "codecs.OneBit()",
  "what fills the last row in `encode`, and which of its elements count",
)
def padding_never_leaks(codec: LeafCodec) -> Findings:
  """A leaf that ends within a row has no larger error for it.

  If a codec is exact for leaves of one magnitude that fill rows, it is exact where they
  end within a row: padding counts in no scale and no mean.
  """
  tile = leaves.tile_of(codec)
  if tile is None:  # rows are as long as the leaf
    return
  # Sums of the first are exact, and the others are no fractions of any padding.
  for value, sign in ((0.125, 1), (0.125, -1), (0.3, 1), (-3.1, 1)):
    whole = np.full(2 * tile, value, np.float32)
    whole[1::2] *= sign
    short = whole[: tile + tile // 3 + 1]
    if difference(leaves.returned(codec, whole), whole):
      continue
    found = np.asarray(leaves.returned(codec, short))
    wrong = difference(found, short)
    expected = f"decode {short.size} elements of one magnitude as exactly as"
    expected += f" {whole.size}, which fill rows of {tile}"
    mixed = wrong and _mixes_zeros(codec, short, found, whole.size)
    yield codec, expected, None if mixed else wrong


def _mixes_zeros(codec: LeafCodec, x: np.ndarray, found: np.ndarray, size: int) -> bool:
  """Returns True for a codec that rotates a leaf together with the zeros after it."""
  # It has the same bits if the zeros are elements, and the elements that it changes are
  # not smaller on average. A mean in which zeros count is: by a third or more, where a
  # row or a bucket is filled to two thirds at most.
  padded = np.pad(x, (0, size - x.size))
  if difference(found, np.asarray(leaves.returned(codec, padded))[: x.size]):
    return False
  wrong = found != x
  return bool(abs(np.mean(found[wrong] / x[wrong]) - 1) <= 0.25)


@law(
  "codecs.QSGD(bits=4)",
  "`largest`, which says what a row holds, and bounds that numbers are cut to",
)
def large_numbers_keep_their_size(codec: LeafCodec) -> Findings:
  """A leaf times a power of two decodes to that power of two times the decoded leaf.

  This holds to a hundredth of the largest number, for 2^12, and for 2^40 with float32
  numbers in rows.
  """
  x = leaves.gaussian(leaves.ragged(codec))
  expected = np.asarray(leaves.trial(codec, x).value, np.float64)
  for power in (12,) if codec.bind(Leaf(x.shape)).largest else (12, 40):
    scale = np.float32(2.0**power)
    found = np.asarray(leaves.trial(codec, x * scale).value, np.float64) / scale
    wrong = ~(np.abs(found - expected) <= 0.01 * np.abs(x).max())
    told = first_wrong(wrong, found, expected, of=f", over 2^{power},")
    yield codec, f"send 2^{power} x as 2^{power} times what it sends of x", told


@law(
  'codecs.Dense(), "two_shot"',
  "`largest`, which says what a row holds, and casts without a scale",
)
def half_precision_keeps_its_range(
  codec: LeafCodec, exchange: ExchangeName | Exchange = "ring", *, workers: int = 4
) -> Findings:
  """A mean of float16 gradients is right near the largest number, and the smallest.

  Unlike the mean, a sum of N addends may overflow, and an Nth of one underflow. The
  mean must follow gradients multiplied by a power of two, to a hundredth of the
  largest, plus the smallest number of float16. Too large means are the largest number.
  """
  given: Any = {"exchange": exchange, "feedback": None, "min_leaf_size": 0}
  transformation = compress(codec, axis_name="data", **given)
  shape = (workers, *leaves.ragged(codec))

  def mean(gradients: np.ndarray) -> np.ndarray:
    half = np.asarray(gradients, np.float16)
    found = modes.run("vmap", transformation, [half]).outputs[0]
    return np.asarray(found, np.float64)[0]

  top = leaves.near_the_top(shape, 0, jnp.float16)
  # The workers agree, so that no rounding on the way changes what a codec selects.
  units = np.random.default_rng(0).integers(-8, 9, shape[1:]) * _UNIT
  units = np.broadcast_to(units, shape)
  for given, power, place in ((top, 2.0**-8, "top"), (units, 2.0**18, "smallest")):
    expected, found = mean(given * power) / power, mean(given)
    bound = 0.01 * np.abs(given).max() + _UNIT
    wrong = ~(np.abs(found - np.clip(expected, -_TOP, _TOP)) <= bound)
    way = f"over {as_exchange(exchange).name} with {workers} workers"
    law_of = f"send float16 gradients near the {place} number as it sends others, {way}"
    yield codec, law_of, first_wrong(wrong, found, expected, of=" of the mean")
