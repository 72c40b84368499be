"""Makes scales of norms by the page's table, and reads them."""

import numpy as np

from tests.specs import planes

LARGEST = np.finfo(np.float32).max


def of_norms(norms):
  """Norms, NaN where an element is not finite, to float32 scales."""
  with np.errstate(over="ignore", invalid="ignore"):
    norms = np.minimum(np.asarray(norms), LARGEST).astype(np.float32)
    raised = np.maximum(norms, np.float32(2.0**-96))
    return np.where(norms < np.float32(2.0**-126), np.float32(0), raised)


def check(scale):
  """Raises where a scale is none that the table has."""
  with np.errstate(invalid="ignore"):
    legal = np.isnan(scale) | (scale == 0) & ~np.signbit(scale) | (scale >= 2.0**-96)
  if not legal.all() or np.isinf(scale).any():
    raise ValueError("a scale must be 0, NaN or finite and at least 2^-96.")


def read(patterns, size, per_word, words):
  """Each element's scale, in the leaf's order, of a row's: [tiles, P or 1]."""
  scale = planes.as_floats(patterns)
  check(scale)
  if scale.shape[1] > 1:
    nothing_behind(scale.ravel(), size, words)
  return per_element(scale, per_word, words)


def nothing_behind(scale, size, bucket_size):
  """Raises where a bucket that the leaf does not reach has a scale."""
  if scale[-(-size // bucket_size) :].any():
    raise ValueError("a bucket beyond the end of the leaf must have the scale 0.")


def per_element(scale, per_word, words):
  """float32[tiles, P or 1] for each element of the tiles, in the leaf's order."""
  return np.broadcast_to(scale, (len(scale), per_word)).ravel().repeat(words)


def given(scales, tiles, per_word, bucket_size):
  """Scales of a caller as float32, if rows have as many."""
  scales = np.asarray(scales, np.float32)
  expected = (tiles, 1 if bucket_size is None else per_word)
  if scales.shape != expected:
    raise ValueError(f"`scales` must have the shape {expected}, got {scales.shape}.")
  return scales
