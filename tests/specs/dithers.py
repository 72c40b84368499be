"""Draws the page's random bits, and derives its keys and masks."""

import functools
import hashlib

import numpy as np

from tests.specs import planes

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key, c0, c1, rounds=20):
  """Threefry-2x32 (Salmon et al. 2011): two uint32 arrays of the counters' shape.

  Example:
    >>> [hex(word) for word in threefry2x32((0, 0), 0, 0)]
    ['0x6b200159', '0x99ba4efe']
    >>> [hex(word) for word in threefry2x32((0, 0), 0, 0, 13)]  # Random123's answer
    ['0x9d1c5ec6', '0x8bd50731']
  """
  k0, k1 = (np.asarray(word, np.uint32) for word in key)
  schedule = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = np.broadcast_arrays(np.asarray(c0, np.uint32), np.asarray(c1, np.uint32))
  with np.errstate(over="ignore"):  # NumPy warns where scalars wrap around
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for number in range(rounds):
      group, place = divmod(number, 4)
      rotation = _ROTATIONS[group % 2][place]
      x0 = x0 + x1
      x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
      x1 = x1 ^ x0
      if place == 3:
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
  return x0, x1


def fold_in(key, number):
  """The key that `jax.random.fold_in` makes of a threefry key and a number."""
  return tuple(int(word) for word in threefry2x32(key, 0, number))


def name_words(text):
  """The two words of a leaf's name, or of the names of a matrix's leaves."""
  digest = hashlib.sha256(text.encode()).digest()
  return tuple(int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))


def leaf_key(seed, step, name, *more):
  """The key of a leaf by its name, or of a stage; a worker's with its number behind."""
  return functools.reduce(fold_in, (step, *name_words(name), *more), (0, seed))


def mask(worker):
  """The page's constant of a worker, below 2^16."""
  mirrored = int(f"{worker >> 1:016b}"[::-1], 2)
  return mirrored ^ 0xFFFF if worker % 2 else mirrored


def leaf_dither(seed, step, name, worker, *more):
  """The key of a leaf that all workers share, and a worker's mask: three integers."""
  return (*leaf_key(seed, step, name, *more), mask(worker))


def lanes_of(a, b):
  """The eight lanes of blocks of two words: their halves, and sums of two halves."""
  q = [x for word in (a, b) for x in (word & np.uint32(0xFFFF), word >> np.uint32(16))]
  return [*q, q[0] ^ q[2], q[1] ^ q[3], q[0] ^ q[3], q[1] ^ q[2]]


def random_lanes(key, tiles, *, bits, bucket_size, first_row=0):
  """The 16-bit integers of stochastic rounding, uint32[tiles, P, B]."""
  per_word, words = planes.geometry(bits, bucket_size)
  groups = -(-per_word // 8)
  row = np.arange(first_row, first_row + tiles, dtype=np.uint32)[:, None]
  column = np.arange(groups * words, dtype=np.uint32)
  blocks = threefry2x32(key[:2], row, column, 13)
  lanes = np.stack(lanes_of(*(x.reshape(tiles, groups, words) for x in blocks)), axis=2)
  lanes = lanes.reshape(tiles, groups * 8, words)
  return lanes[:, :per_word] ^ np.uint32(key[2] if len(key) > 2 else 0)


def signed_lanes(lanes, x):
  """Returns what rounds the magnitudes of x as `lanes` would round x itself."""
  return np.where(np.signbit(x), 0xFFFF - lanes, lanes)


def of_leaf(key, flat, *, bits):
  """The signed lanes of a flat leaf in rows of 128 words, uint32 of its shape."""
  tiles = -(-flat.size // (32 // bits * planes.ROW_WORDS))
  lanes = random_lanes(key, tiles, bits=bits, bucket_size=planes.ROW_WORDS)
  return signed_lanes(lanes.ravel()[: flat.size], flat)


def addend(rounding, x, key, **rule):
  """The 16-bit integers that round magnitudes of tiles [tiles, P, B], or the one."""
  if rounding == "nearest":
    return np.uint32(2**15)
  return signed_lanes(random_lanes(key, len(x), **rule)[:, : x.shape[1]], x)


def one_of_two(size, table, r):
  """The codes of one of two neighbors of each number in a table, by 16-bit r."""
  code = np.minimum(np.searchsorted(table, size, "right") - 1, len(table) - 2)
  chance = (size - table[code]) / (table[code + 1] - table[code])
  return code + (chance + r / 2.0**16 >= 1)
