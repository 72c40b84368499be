"""The protocols of codecs."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax

from gradcomp._src.codecs.sums.records import (
  Accumulate,
  Context,
  Encoded,
  Leaf,
  Memory,
  Payload,
)
from gradcomp._src.codecs.sums.sum import Sum, SumFacts

# Yields the arrays of each round, gets their means, and returns means and memories.
Talk = Generator[list[jax.Array], list[jax.Array], tuple[list[jax.Array], list[Any]]]


class Round(NamedTuple):
  """An array that all workers average."""

  shape: tuple[int, ...]
  codec: "Codec"  # of its rows
  of_leaf: bool = False  # whether it is the leaf itself


@runtime_checkable
class LeafCodec(Protocol):
  """A codec as users choose it, before its ``bind`` fits it to a leaf."""

  @property
  def unbiased(self) -> bool:
    """True if ``E[decode(encode(x))] == x``."""

  @property
  def needs_key(self) -> bool:
    """True if ``encode`` needs a key."""

  @property
  def sums(self) -> SumFacts:
    """How payloads are added; of an unbound codec, the facts about it."""

  def check_leaves(self, leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if the codec does not suit these leaves of a tree."""

  def rule(self, leaf: Leaf) -> str:
    """Returns the reason for a leaf's codec, in a few characters; "" for none."""

  def bind(self, leaf: Leaf) -> "Codec":
    """Returns the codec for a leaf of this shape and path."""


@runtime_checkable
class Codec(LeafCodec, Protocol):
  """A pair of pure functions between an array and a :class:`Payload`.

  Codecs are frozen dataclasses: hashable, printable, without state. They are not
  callable, because ``optax.inject_hyperparams`` takes callables for schedules.

  ``encode`` and ``decode`` are the pair for people. The exchange works on rows: those
  of ``encode_leaf``. Each can be decoded without the others, so that workers can own
  ranges of rows. ``encode_rows`` encodes a mean of decoded rows again.
  """

  def init(self, leaf: Leaf, key: jax.Array) -> Memory:
    """Returns the codec state of a leaf before the first step.

    Args:
      leaf: the leaf that the codec is bound to.
      key: ``uint32[2]``, the same on all workers, and another one for each leaf.
    """

  @property
  def by_column(self) -> bool:
    """True if a row is a column of a leaf's matrix."""

  @property
  def fitted(self) -> bool:
    """Whether the codec has a memory, as a ``FittedCodec`` has."""

  @property
  def sums(self) -> Sum:
    """How payloads are added, and how their sums travel."""

  def to_nearest(self) -> "Codec":
    """Returns the codec that rounds to nearest, with rows of the same format."""

  def agree(self, x: jax.Array) -> jax.Array | None:
    """Returns a leaf's statistics, of which all workers take the largest; or None."""

  def filled(self, flat: jax.Array) -> jax.Array:
    """Fills the last bucket of a flat leaf, where the zeros of padding would count."""

  def rotated(self, tiles: jax.Array) -> jax.Array:
    """Rotates the tiles of a leaf, ``float32[rows, tile_size]``, before encoding."""

  def unrotated(self, tiles: jax.Array) -> jax.Array:
    """Undoes :meth:`rotated` for tiles, or sums of tiles, of one or two axes each."""

  def sum_rows(self, rows: jax.Array) -> jax.Array:
    """Decodes ``uint32[K, rows, words]``, and adds K payloads in their order."""

  def payload_tiles(self, payload: Payload) -> jax.Array:
    """Decodes a payload to tiles, by the statistics in it if workers share them."""

  def bind(self, leaf: Leaf) -> "Codec":
    """Returns the codec for a leaf, with a definite ``tile_size``."""

  @property
  def tile_size(self) -> int:
    """The number of elements in a row."""

  @property
  def row_words(self) -> int:
    """The number of words in a row, scales included."""

  def rounds(self, shape: tuple[int, ...]) -> "tuple[Round, ...]":
    """Returns the arrays that workers average for a leaf, one after the other."""

  def in_rounds(self, leaves: Sequence[jax.Array], memory: Sequence[Any]) -> Talk:
    """Computes the means of leaves of one shape, while others average their arrays.

    Args:
      leaves: this worker's, ``float32``.
      memory: the shared codec state of each leaf.

    Yields:
      For each leaf the array of the next round. The means of all workers come back.

    Returns:
      The means of the leaves, and the new shared codec state of each.
    """

  def encode(self, x: jax.Array, *, key: jax.Array | None = None) -> Payload:
    """Encodes an array of any shape and float dtype, as a single worker does.

    Args:
      x: the array.
      key: one threefry key, which stochastic rounding needs.

    Raises:
      ValueError: ``key`` is missing, and the codec needs one.
      TypeError: ``x`` is not real floating point.
    """

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """Decodes a payload to an array with the shape and dtype of ``like``."""

  def roundtrip(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
    """Returns the array that arrives: ``decode(encode(x, key=key), like=x)``."""

  def encode_leaf(self, x: jax.Array, context: Context, *, keep: bool) -> Encoded:
    """Encodes a ``float32`` leaf of any shape; with ``keep`` perhaps its residual."""

  def encode_rows(self, tiles: jax.Array, context: Context) -> jax.Array:
    """Encodes ``float32[rows, ...]`` tiles: ``uint32[rows, row_words]``."""

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    """Decodes ``uint32[rows, row_words]`` to ``float32[rows, ...]``.

    The exchange calls it with two axes, and maps it by ``jax.vmap`` over others. A row
    becomes its ``tile_size`` elements, in one axis or several. Each row is decoded by
    itself. Zeros come back as zeros, and other than finite numbers as NaN or infinity.
    """


@runtime_checkable
class SharedCodec(Codec, Protocol):
  """A codec that makes all workers encode with the same statistics.

  It is ``summable`` and ``agrees``. Before anyone encodes, the exchange takes the
  largest result of ``agree`` over all workers. Rows then hold only codes, and the codes
  of several workers add up as integers.
  """

  @property
  def max_code(self) -> int:
    """The largest magnitude of a code."""

  def codes(self, rows: jax.Array) -> jax.Array:
    """Unpacks ``uint32[..., rows, words]`` to codes, ``int32[..., rows, P, B]``."""

  def from_codes(self, codes: jax.Array, agreed: jax.Array) -> jax.Array:
    """Returns the values of codes, or of sums of codes: ``float32[rows, P, B]``."""


@runtime_checkable
class FittedCodec(Codec, Protocol):
  """A codec that is fitted to the gradients of all workers every few steps.

  All leaves share one array, which is their memory. ``encode`` and ``encode_rows`` take
  it as ``levels`` of the context. Rows can be decoded without it.
  """

  @property
  def refit_every(self) -> int:
    """The number of steps from one fit to the next."""

  @property
  def most_counted(self) -> int:
    """The largest sum of one leaf's counts."""

  def measure(self, x: jax.Array) -> jax.Array:
    """Counts a leaf's elements, ``int32[k]``, to be added over leaves and workers."""

  def fit(self, counts: jax.Array, memory: jax.Array) -> jax.Array:
    """Returns the memory that fits the counts; the old one if nothing was counted."""


@runtime_checkable
class AddingCodec(Codec, Protocol):
  """A codec with ``adds``: sums of its numbers are rounded to its own format.

  Its rows stand for scaled numbers, which ``encode_rows`` takes and ``decode_rows``
  gives. The scale leaves room for the sum of all workers' numbers. With
  ``agrees`` the workers share it, by the largest of their bytes.
  """

  @property
  def accumulate(self) -> Accumulate:
    """The way in which numbers are added one by one."""

  def add(self, total: jax.Array, x: jax.Array) -> jax.Array:
    """Adds two numbers of the format, and rounds the sum to it."""

  def add_compensated(
    self, total: jax.Array, compensation: jax.Array, x: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the next sum and compensation of Kahan's algorithm, all in the format."""

  def encode_sums(self, tiles: jax.Array) -> jax.Array:
    """Encodes scaled sums, rounded to nearest: exact for numbers of the format."""

  def unscaled(self, tiles: jax.Array, agreed: jax.Array | None) -> jax.Array:
    """Divides ``float32[rows, P, B]`` by the scales of rows, from ``agreed``."""


def is_codec(value: Any) -> TypeGuard[LeafCodec]:
  """Returns True for an instance of a codec, and False for a codec's class.

  Example:
    >>> is_codec(gradcomp.codecs.QSGD()), is_codec(gradcomp.codecs.QSGD)
    (True, False)
  """
  return not isinstance(value, type) and isinstance(value, LeafCodec)


def is_fitted(codec: LeafCodec) -> TypeGuard[FittedCodec]:
  """Returns True if the hyperparameters make a codec a :class:`FittedCodec`.

  Example:
    >>> is_fitted(gradcomp.codecs.QSGD(levels="nonuniform"))
    True
  """
  return getattr(codec, "fitted", False)
