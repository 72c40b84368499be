"""Laws of decoded values: zeros, constants, tiny numbers, NaN, odd sizes, padding."""

import jax
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.testing.broken import BrokenLaw, described, difference
from gradcomp._src.testing.leaves import gaussian, leaf_of, tile_of
from gradcomp._src.testing.trial import returned, round_trip, trial

_TINY = np.array(
  [1e-45, -1e-41, 1.1754942e-38, -(2.0**-126), 2.0**-120, 0, -0.0], np.float32
)


def zeros_decode_to_zeros(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """A leaf of zeros decodes to zeros, which fill up rows.

  Args:
    codec: the codec.
    x: a leaf of the shape to try; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.zeros_decode_to_zeros(gradcomp.codecs.OneBit())
  """
  zeros = np.zeros_like(leaf_of(codec, x))
  if told := difference(trial(codec, zeros).value, zeros):
    raise BrokenLaw(
      "zeros_decode_to_zeros",
      codec,
      "decode a leaf of zeros to zeros",
      told,
      "`encode_rows` and `decode_rows` for a bucket whose scale is 0",
    )


def constants_are_exact(
  codec: LeafCodec, values: tuple[float, ...], x: ArrayLike | None = None
) -> None:
  """A leaf of one value decodes exactly, for values that the format can represent.

  Args:
    codec: the codec.
    values: the values that a codec claims to be exact for.
    x: a leaf of the shape to try; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.constants_are_exact(gradcomp.codecs.QSGD(bits=4), (1.0, -0.1, 3e38))
  """
  leaf = leaf_of(codec, x)
  for value in values:
    constant = np.full(leaf.shape, value, np.float32)
    if told := difference(trial(codec, constant).value, constant):
      raise BrokenLaw(
        "constants_are_exact",
        codec,
        f"decode a leaf of {value} alone to {value}",
        told,
        "the largest level of a bucket, and its scale",
      )


def tiny_numbers_stay_finite(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """Subnormal numbers decode to finite ones of at most 1, never to NaN.

  A scale that underflows, or its reciprocal that overflows, would spoil a bucket.

  Args:
    codec: the codec.
    x: a leaf of the shape to try; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.tiny_numbers_stay_finite(gradcomp.codecs.EightBit())
  """
  shape = leaf_of(codec, x).shape
  tiny = np.resize(_TINY, shape)
  for leaf in (tiny, np.full(shape, np.float32(1e-40))):
    value = trial(codec, leaf).value
    # NaN is not at most 1 either.
    wrong = np.flatnonzero(~(np.abs(value.ravel()) <= 1))
    if wrong.size:
      raise BrokenLaw(
        "tiny_numbers_stay_finite",
        codec,
        "decode subnormal numbers to finite ones of at most 1",
        f"{leaf.ravel()[wrong[0]]} at {wrong[0]} became {value.ravel()[wrong[0]]} "
        f"({wrong.size} of {leaf.size} are wrong)",
        "the division by a scale",
      )


def non_finite_elements_are_seen(
  codec: LeafCodec,
  x: ArrayLike | None = None,
  bad: float = np.nan,
  *,
  spoils: int | str | None = "any",
  unclipped: LeafCodec | None = None,
) -> None:
  """A NaN or an infinity decodes to one, never to a number; the rest stays.

  Args:
    codec: the codec.
    x: a finite leaf; by default one of three rows.
    bad: the new value of one of its elements: NaN or an infinity.
    spoils: the elements that are not finite then. ``"any"``: some in the element's row,
      and any others. The number of consecutive elements that all become NaN, None for
      all of the leaf, ``"column"`` for all of its column; ``"itself"`` if only it, with
      its own value; ``"sent"`` if it is sent as it is, and may displace others;
      ``"row"`` if some sent elements of its row. All others must keep their bits.
    unclipped: the codec for the rest of a leaf that is not finite, if another.

  Example:
    >>> from gradcomp.testing import laws
    >>> codec = gradcomp.codecs.QSGD(bits=4, bucket_size=64)
    >>> laws.non_finite_elements_are_seen(codec, bad=np.inf, spoils=64)
  """
  leaf = leaf_of(codec, x)
  position = leaf.size // 2
  dirty = leaf.copy()
  dirty.flat[position] = bad
  found = trial(codec, dirty).value.ravel()
  clean = trial(codec, leaf).value
  if unclipped is not None:
    clean = np.asarray(returned(unclipped, leaf))
  spoiled = _spoiled(codec, leaf.shape, position, spoils)
  look = "what `encode_rows` makes of elements that are not finite"
  law = "non_finite_elements_are_seen"
  if told := _unseen(found, spoiled, position, bad, spoils):
    raise BrokenLaw(law, codec, f"never replace {bad} by a number", told, look)
  kept = (found == clean.ravel()) | ((found != found) & (clean != clean).ravel())
  if spoils == "any":
    spoiled = spoiled | ~np.isfinite(found)
  elif spoils == "sent":
    # It may take the place of others. These are sent, in 16 bits or more, or zero.
    near = np.abs(found - leaf.ravel()) <= 2.0**-8 * np.abs(leaf.ravel())
    kept |= spoiled & (near | (found == 0))
    spoiled = np.arange(leaf.size) == position
  wrong = np.flatnonzero(~kept & ~spoiled)
  if wrong.size:
    at = wrong[0]
    raise BrokenLaw(
      law,
      codec,
      f"leave what {bad} at {position} does not spoil as it is",
      f"element {at} became {found[at]} in place of {clean.flat[at]}",
      look,
    )


def _spoiled(
  codec: LeafCodec, shape: tuple[int, ...], position: int, spoils: int | str | None
) -> np.ndarray:
  """Masks the elements of a flat leaf that the one at ``position`` may spoil."""
  number = np.arange(int(np.prod(shape)))
  if spoils is None:
    return np.ones(number.size, bool)
  if spoils == "itself":
    return number == position
  if spoils == "column":
    columns = number.size // shape[0]
    return number % columns == position % columns
  if isinstance(spoils, int):
    return number // spoils == position // spoils
  (first, *_) = codec.bind(Leaf(shape)).rounds(shape)
  # Rows of a round are none of the leaf, which is spoiled as a whole then.
  tile = first.codec.tile_size if first.of_leaf else number.size
  return number // tile == position // tile


def _unseen(
  found: np.ndarray, spoiled: np.ndarray, position: int, bad: float, spoils: object
) -> str | None:
  """Describes the decoded element if it hides a value that is not finite; else None."""
  at = found[position]
  if spoils in ("itself", "sent"):
    same = at == bad or (at != at and bad != bad)
    return None if same else f"element {position} became {at}"
  if spoils in ("any", "row"):
    seen = not np.isfinite(found[spoiled]).all()
    return None if seen else f"element {position} became {at}, and its row is finite"
  wrong = np.flatnonzero(spoiled & ~np.isnan(found))
  if not wrong.size:
    return None
  return f"element {wrong[0]}, which it spoils, became {found[wrong[0]]} and not NaN"


def odd_sizes_work(
  codec: LeafCodec, sizes: tuple[int, ...] = (0, 1, 2, 3, 31, 33, 127, 200)
) -> None:
  """Leaves of any size decode to finite numbers in their shape; zeros to zeros.

  Args:
    codec: the codec.
    sizes: the sizes to try, all by one program.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.odd_sizes_work(gradcomp.codecs.OneBit(), sizes=(0, 1, 33))
  """
  law = "odd_sizes_work"
  leaves = [gaussian(size, seed=size) for size in sizes]
  zeros = [np.zeros_like(leaf) for leaf in leaves]
  run = jax.jit(lambda leaves: [round_trip(codec, x) for x in leaves])
  for leaf, value, zero in zip(leaves, run(leaves), run(zeros), strict=True):
    told = None if np.isfinite(value).all() else f"it becomes {value}"
    if value.shape != leaf.shape:
      told = f"it becomes {described(value)}"
    if told is None and (rest := difference(zero, np.zeros_like(leaf))):
      told = f"of as many zeros {rest}"
    if told:
      raise BrokenLaw(
        law,
        codec,
        f"decode a leaf of {leaf.size} elements to as many finite ones",
        told,
        "the last row of a leaf, which the leaf does not fill",
      )


def padding_never_leaks(codec: LeafCodec) -> None:
  """A leaf that ends within a row has no larger error for it.

  Leaves of one magnitude show it. If a codec is exact for them where they fill rows,
  as one with a scale a bucket is, then it is where they end within a row: the padding
  of the row counts in no scale and no mean.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.padding_never_leaks(gradcomp.codecs.OneBit())
  """
  tile = tile_of(codec)
  if tile is None:  # rows are as long as the leaf
    return
  # Sums of the first are exact, and the others are no fractions of any padding.
  for value, sign in ((0.125, 1), (0.125, -1), (0.3, 1), (-3.1, 1)):
    whole = np.full(2 * tile, value, np.float32)
    whole[1::2] *= sign
    short = whole[: tile + tile // 3 + 1]
    if difference(returned(codec, whole), whole):
      continue
    found = np.asarray(returned(codec, short))
    told = difference(found, short)
    if told and not _mixes_zeros(codec, short, found, whole.size):
      raise BrokenLaw(
        "padding_never_leaks",
        codec,
        f"decode {short.size} elements of one magnitude as exactly as {whole.size}, "
        f"which fill rows of {tile}",
        told,
        "what fills the last row in `encode`, and which of its elements count",
      )


def _mixes_zeros(
  codec: LeafCodec, short: np.ndarray, found: np.ndarray, size: int
) -> bool:
  """Returns True for a codec that rotates a leaf together with the zeros behind it."""
  # It has the same bits if the zeros are elements, and the elements that it changes are
  # not smaller on average. A mean in which zeros count is: by a third or more, where a
  # row or a bucket is filled to two thirds at most.
  padded = np.pad(short, (0, size - short.size))
  if difference(found, np.asarray(returned(codec, padded))[: short.size]):
    return False
  wrong = found != short
  return bool(abs(np.mean(found[wrong] / short[wrong]) - 1) <= 0.25)
