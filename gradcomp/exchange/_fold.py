"""Adding one by one in a codec's own numbers, and what each addition loses."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp.codecs import Codec, is_adding
from gradcomp.layout import UNROLLED, in_order

# An addition that rounds is 60 operations: fewer are written out, for the compile time.
_UNROLLED = 4


class Sum(NamedTuple):
  """A running sum of decoded tiles, ``float32[rows, P, B]``.

  Attributes:
    total: so far.
    compensation: of Kahan's algorithm; else None.
    lost: by the additions that count; None where nobody asks.
  """

  total: jax.Array
  compensation: jax.Array | None = None
  lost: jax.Array | None = None


def compensates(codec: Codec) -> bool:
  """Whether a running sum has a compensation."""
  return is_adding(codec) and codec.accumulate == "kahan"


def rounds(codec: Codec) -> bool:
  """Whether every addition is rounded to the codec's format."""
  return is_adding(codec) and codec.accumulate != "float32"


def start(codec: Codec, first: jax.Array, *, keep: bool) -> Sum:
  """The sum of one."""
  # Zeros that differ between workers where types say that the first number does.
  zeros = jnp.where(first == first, np.float32(0), np.float32(0))
  return Sum(first, zeros if compensates(codec) else None, zeros if keep else None)


def plus(
  codec: Codec, so_far: Sum, x: jax.Array, counts: jax.Array | bool = True
) -> Sum:
  """The sum with one more.

  Args:
    codec: whose format it is; any other than an adding codec adds in float32.
    so_far: the sum.
    x: ``float32[rows, P, B]``.
    counts: whether what this addition loses is to be kept here.
  """
  exact = so_far.total + x
  total, compensation = exact, so_far.compensation
  if is_adding(codec) and rounds(codec):
    if compensation is None:
      total = codec.add(so_far.total, x)
    else:
      total, compensation = codec.add_compensated(so_far.total, compensation, x)
  lost = so_far.lost
  if lost is not None and rounds(codec):
    lost = lost + jnp.where(counts, exact - total, 0.0)
  return Sum(total, compensation, lost)


def fold(
  codec: Codec,
  rows: jax.Array,
  *,
  keep: bool,
  counts: Callable[[jax.Array | int], jax.Array | bool] | None = None,
) -> Sum:
  """The sum of K payloads, in their order.

  Args:
    codec: of the rows.
    rows: ``uint32[K, rows, words]``.
    keep: whether to return what is lost.
    counts: from the number of a payload to whether what adding it loses is to be kept
      here; by default all is.
  """

  def step(k: jax.Array | int, so_far: Sum) -> Sum:
    kept = True if counts is None else counts(k)
    return plus(codec, so_far, codec.decode_rows(rows[k]), kept)

  first = start(codec, codec.decode_rows(rows[0]), keep=keep)
  if first.lost is not None and counts is not None:
    # What is kept differs between workers, and types shall say so from the start.
    lost = jnp.where(counts(0), first.lost, first.lost)
    first = first._replace(lost=lost)
  return in_order(step, rows.shape[0], first, _UNROLLED if rounds(codec) else UNROLLED)


def sum_rows(codec: Codec, so_far: Sum) -> tuple[jax.Array, jax.Array | None]:
  """Rows of a sum, and all that was lost on the way to what they stand for."""
  if not is_adding(codec):
    return codec.encode_rows(so_far.total), so_far.lost
  words = codec.encode_sums(so_far.total)
  lost = so_far.lost
  if lost is not None and not rounds(codec):
    lost = lost + (so_far.total - codec.decode_rows(words))
  return words, lost
