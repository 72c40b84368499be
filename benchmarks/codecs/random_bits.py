"""Models, in NumPy, the random bits that rounding draws, as streams of words.

Rounding draws Threefry-2x32 with 13 rounds. A block of the cipher is two words a and b,
which serve eight lanes of 16 bits: the halves of a, of b, of a ^ b, and of a ^ rotl(b,
16). Any two lanes of a block are independent where a and b are uniform
(tests/kernels/test_dithers.py proves it), but some sets of three are not. So a
stream has one lane, two lanes, or the four halves of a and b. It has them in the order
in which an encoder of buckets of 512 draws them.
"""

from typing import NamedTuple

import jax
import numpy as np

COLUMNS = 512
NAME = (0x51F09E3C, 0x8D2A6B47)  # the two words for a leaf's name; any would do
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


class Stream(NamedTuple):
  """The lanes that make its words, and what follows a row: the next row, or step."""

  lanes: str
  along: str = "rows"


STREAMS = {
  "words": Stream("0123"),
  "steps": Stream("0123", "steps"),
  "lane 7": Stream("7"),
  "lane 4": Stream("4"),
  "pair 4 6": Stream("46"),
  "pair 0 4": Stream("04"),
  "pair 5 7": Stream("57"),
}


def rotate(x: np.ndarray, by: int) -> np.ndarray:
  """Rotates words of 32 bits to the left."""
  return x << np.uint32(by) | x >> np.uint32(32 - by)


def threefry(
  key: tuple[int, int], counter: tuple[np.ndarray, np.ndarray], rounds: int
) -> tuple[np.ndarray, np.ndarray]:
  """Computes Threefry-2x32; the key is added before, and after every four rounds."""
  keys = [np.uint32(word) for word in (*key, key[0] ^ key[1] ^ 0x1BD11BDA)]
  a, b = counter[0] + keys[0], counter[1] + keys[1]
  for i in range(rounds):
    a = a + b
    b = rotate(b, _ROTATIONS[i % 8]) ^ a
    if i % 4 == 3:
      group = i // 4 + 1
      a = a + keys[group % 3]
      b = b + keys[(group + 1) % 3] + np.uint32(group)
  return a, b


def lanes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Cuts blocks of two words into lanes: uint32[8, ...] with values of 16 bits."""
  words = a, b, a ^ b, a ^ rotate(b, 16)
  return np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])


def model(stream: Stream, rounds: int, key: int, rows: int) -> np.ndarray:
  """Computes the first words of a stream, of two lanes: uint32[rows * 256 * lanes]."""
  chosen = [int(lane) for lane in stream.lanes]
  draws = []
  for number in range(rows):
    row, step = (0, number) if stream.along == "steps" else (number, 0)
    derived = jax.random.key(key, impl="threefry2x32")
    for word in (step, *NAME):
      derived = jax.random.fold_in(derived, word)
    first, second = map(int, jax.random.key_data(derived))
    counter = np.full(COLUMNS, row, np.uint32), np.arange(COLUMNS, dtype=np.uint32)
    draws.append(lanes(*threefry((first, second), counter, rounds))[chosen].T)
  low, high = np.stack(draws).reshape(-1, 2).T
  return low | high << 16
