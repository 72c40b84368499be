"""Norms of buckets, tensors and rows, from which codecs make their scales."""

import jax

from gradcomp._src.kernels.common.scales import Norm, bucket_norms, norms, tensor_norm

_TENSOR_ROW = 512  # words in a row when the whole tensor is one bucket


def bucket_words(bucket_size: int | None) -> int:
  """Returns the words of codes in a row: the elements of a bucket."""
  return _TENSOR_ROW if bucket_size is None else bucket_size


def leaf_scales(
  flat: jax.Array, planes: int, bucket_size: int | None, norm: Norm = "max"
) -> jax.Array:
  """Returns the norms of a leaf: ``float32[1, 1]``, or ``[rows, P]`` of its buckets."""
  if bucket_size is None:
    return tensor_norm(flat, norm).reshape(1, 1)
  return bucket_norms(flat, planes, bucket_size, norm)


def row_scales(
  tiles: jax.Array, planes: int, bucket_size: int | None, norm: Norm = "max"
) -> jax.Array:
  """Returns the norms of each tile by itself: ``float32[rows, 1]`` or ``[rows, P]``."""
  if bucket_size is None:
    return norms(tiles.reshape(tiles.shape[0], -1), norm)[:, None]
  return bucket_norms(tiles.reshape(-1), planes, bucket_size, norm)
