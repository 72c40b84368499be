"""The largest elements of blocks in jnp: selects, codes, packs, and decodes them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import dithers, fixed_point, planes, scales
from gradcomp._src.kernels.common.fixed_point import Divide
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand
from gradcomp._src.kernels.materialize import materialized, packed
from gradcomp._src.kernels.quantize import qsgd

WORDS = 32  # of codes in a row, for each entry of a block
SMALL = 0.375  # the smaller magnitude of a 2-bit value, in scales
_LIMITS = np.float32(SMALL / 2), np.float32((1 + SMALL) / 2)
_LEVELS = qsgd.Form(bits=8, bucket_size=WORDS)  # of an 8-bit value

# A maximum is taken over lanes of at most 16 steps, and then over the lanes. XLA:CPU
# vectorizes such short ones, without writing the integers down first.
_LANES = 8
_STEPS = 16

_MANY = 2**12  # words of rows: fewer decode fast in any way

Entry = tuple[Array, Array]  # the places and the values of an entry of blocks
Entries = tuple[list[Entry], Array]  # and the value at all other places


@dataclasses.dataclass(frozen=True)
class Form:
  """The row format of block-wise selection, from the codec's hyperparameters."""

  block_size: int  # elements a block, B, a power of two
  count: int  # entries a block
  value_bits: int  # 2, 8 or 32
  keep: bool = False  # whether the encoder returns the residual

  @property
  def scaled(self) -> bool:
    """True if rows have a scale, and a code holds a value; else 32 bits hold it."""
    return self.value_bits < 32

  @property
  def code_bits(self) -> int:
    """The bits of the place and the value of an element."""
    return (self.block_size.bit_length() - 1) + self.scaled * self.value_bits

  @property
  def planes(self) -> int:
    """The number of codes that share a word."""
    return planes.planes_per_word(self.code_bits)

  @property
  def blocks(self) -> int:
    """The number of blocks in a tile."""
    return self.planes * WORDS

  @property
  def bucket_size(self) -> int:
    """The number of elements of a plane of a tile."""
    return WORDS * self.block_size

  @property
  def tile_size(self) -> int:
    """The number of elements in a tile."""
    return self.blocks * self.block_size

  @property
  def entry_words(self) -> int:
    """The number of words in a row for one entry of each of its blocks."""
    return WORDS + (0 if self.scaled else self.blocks)

  @property
  def row_words(self) -> int:
    """The number of words in a row: its entries, and its scale."""
    return self.count * self.entry_words + self.scaled


def keys(
  x: Array, form: Form, iota: dithers.Iota = jax.lax.broadcasted_iota, axis: int = -1
) -> Array:
  """Returns a sort key for each element; the largest of an axis of blocks are sent."""
  # From the highest bit on it holds `31 - log2(B)` bits of the magnitude, the number of
  # elements behind it in its block, and its sign.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  behind = (form.block_size - 1) - iota(jnp.uint32, x.shape, axis % x.ndim)
  magnitude = (bits << 1) & np.uint32(2**32 - 2 * form.block_size)
  return magnitude | (behind << 1) | (bits >> 31)


def behind_of(key: Array, form: Form) -> Array:
  """Returns the number of elements that lie behind a key's element in its block."""
  return (key >> 1) & np.uint32(form.block_size - 1)


def cut_value(key: Array, form: Form) -> Array:
  """Returns the value of a key's element, with its lowest bits cleared."""
  return planes.floats((key >> 1) & np.uint32(2**31 - form.block_size) | (key << 31))


def values(codes: Array, scale: Array, form: Form) -> Array:
  """Returns the values of codes under their scales; NaN under a scale of NaN."""
  if form.value_bits == 8:
    return _LEVELS.value(codes & np.uint32(0xFF), scale)
  magnitude = jnp.where(codes & 1 == 1, scale, scale * np.float32(SMALL))
  value = fixed_point.signed(magnitude, (codes >> 1) << 31)
  return jnp.where(codes == 0, scale * 0, value)


def encode_rows(x: Array, *, form: Form, first_row: int = 0) -> Encoded:
  """Encodes ``float32`` of any shape: ``uint32[rows, row_words]``, and the residual."""
  del first_row  # nothing is random
  flat = x.reshape(-1)
  if not flat.size:
    return jnp.zeros((0, form.row_words), jnp.uint32), x if form.keep else None
  rows = packed(rows_of_entries(select(flat, form), form))
  return rows, remainder(x, rows, form) if form.keep else None


def rows_of_entries(entries: Sequence[Entry], form: Form) -> Array:
  """Returns the rows of selected entries, ``uint32[rows, row_words]``."""
  parts, scale = [], None
  if form.scaled:
    scale = scales.scales(scales.norms(entries[0][1], "max"))[:, None]
  for codes, value in (coded(x, scale, form) for x in entries):
    tiles = codes.reshape(-1, form.planes, WORDS)
    own = [tiles[:, k] for k in range(form.planes)]
    parts.append(planes.pack_planes(own, form.code_bits))
    parts += [planes.float_words(value)] if scale is None else []
  parts += [] if scale is None else [planes.float_words(scale)]
  return jnp.concatenate(parts, axis=1)


def coded(
  entry: Entry, scale: Operand, form: Form, divide: Divide = fixed_point.divide
) -> Entry:
  """Returns the codes of an entry, and the values beside them, if codes hold none."""
  # The code 0 sends nothing. It would stand for the smaller magnitude, positive, at the
  # end of a block. There the nearest of zero and the larger magnitude is sent.
  behind, value = entry
  if scale is None:
    words = planes.float_words(value)
    some = (words << 1) > 0  # minus zero is sent as zero, and as nothing
    sent = planes.floats(jnp.where(some, words, np.uint32(0)))
    return jnp.where(some, behind, np.uint32(0)), sent
  if form.value_bits == 8:
    level = _LEVELS.code(value, _LEVELS.factor(scale, divide), None)
    some = level & _LEVELS.intervals > 0
    return jnp.where((scale > 0) & some, (behind << 8) | level, 0), value
  magnitude, negative = jnp.abs(value), fixed_point.sign_bit(value) >> 31
  nothing = (behind | negative) == 0
  low, high = (scale * limit for limit in _LIMITS)
  large = magnitude >= jnp.where(nothing, scale * np.float32(0.5), high)
  found = (behind << 2) | (negative << 1) | large.astype(jnp.uint32)
  return jnp.where((scale > 0) & (magnitude >= low), found, jnp.uint32(0)), value


def remainder(x: Array, rows: Array, form: Form) -> Array:
  """Returns the residual of an array, in its shape: the array less its decoded rows."""
  entries, others = _entries(rows, form)
  if x.size % form.block_size:
    return x - spread(entries, others, form).reshape(-1)[: x.size].reshape(x.shape)
  # Whole blocks are subtracted in their own shape: XLA's loops for CPUs take several
  # times as long in another one.
  blocks = x.reshape(-1, form.block_size)
  own = lambda part: part.reshape(-1)[: blocks.shape[0]]
  entries = [(own(behind), own(value)) for behind, value in entries]
  return (blocks - spread(entries, own(others), form)).reshape(x.shape)


def _largest(key: Array) -> Array:
  """Returns the largest number of each line of ``uint32[m, B]``."""
  count, size = key.shape
  steps = min(_STEPS, size // _LANES)
  lines = key.reshape(count, size // (steps * _LANES), steps, _LANES)
  lanes = jax.lax.reduce(lines, np.uint32(0), jax.lax.max, (2,)).reshape(count, -1)
  while (size := lanes.shape[1]) > 1:
    lanes = jnp.maximum(lanes[:, : size // 2], lanes[:, size // 2 :])
  return lanes[:, 0]


def _select(x: Array, form: Form) -> list[Entry]:
  """Selects in whole blocks, ``float32[m, B]``: the keys and values of entries."""
  every = keys(x, form)
  found = [_largest(every)]
  while len(found) < form.count:
    found.append(_largest(jnp.where(every < found[-1][:, None], every, np.uint32(0))))
  if form.scaled:
    return [(key, cut_value(key, form)) for key in found]
  whole = jax.lax.bitcast_convert_type(x, jnp.uint32)
  bits = [_largest(jnp.where(every == key[:, None], whole, 0)) for key in found]
  return list(zip(found, map(planes.floats, bits), strict=True))


def select(x: Array, form: Form) -> list[Entry]:
  """Selects the largest elements of a flat array's blocks: ``[rows, R]`` an entry."""
  size = form.block_size
  whole = x.size // size * size
  parts = []
  if whole:
    parts.append(_select(x[:whole].reshape(-1, size), form))
  if whole < x.size:
    last = jnp.pad(x[whole:], (0, whole + size - x.size))
    parts.append(_select(last.reshape(1, size), form))
  blocks = -(-x.size // size)
  rows = -(-blocks // form.blocks)

  def joined(pieces: Sequence[Array]) -> Array:
    flat = jnp.concatenate(pieces)
    return jnp.pad(flat, (0, rows * form.blocks - blocks)).reshape(rows, form.blocks)

  entries = []
  for entry in zip(*parts, strict=True):
    key, value = map(joined, zip(*entry, strict=True))
    entries.append((behind_of(key, form), value))
  return entries


def _entries(rows: Array, form: Form) -> Entries:
  """Returns the :func:`entries_of_rows`, materialized on a CPU if that is faster."""
  # Where a tile's blocks are no power of two, XLA would find the row of each element by
  # a division, and take ten times as long.
  unpack = functools.partial(entries_of_rows, form=form)
  odd = form.planes & (form.planes - 1)
  return materialized(unpack, rows) if odd and rows.size >= _MANY else unpack(rows)


def entries_of_rows(rows: Array, form: Form) -> Entries:
  """Unpacks the entries of rows, ``uint32[..., words]``: ``[..., R]`` each."""
  shape = (*rows.shape[:-1], form.blocks)
  each = form.entry_words
  parts = [rows[..., k * each :][..., :each] for k in range(form.count)]
  unpack = lambda words: planes.unpack_planes(words, form.code_bits).reshape(shape)
  sent = [(unpack(x[..., :WORDS]), planes.floats(x[..., WORDS:])) for x in parts]
  scale = planes.floats(rows[..., -1:]) if form.scaled else None
  entries, others = decoded(sent, scale, form)
  return entries, jnp.broadcast_to(others, shape)


def decoded(given: Sequence[Entry], scale: Operand, form: Form) -> Entries:
  """Returns the entries of blocks, of codes and the values beside them."""
  codes, beside = zip(*given, strict=True)
  places = [x >> form.value_bits if form.scaled else x for x in codes]
  places = [x & np.uint32(form.block_size - 1) for x in places]
  if scale is not None:
    sent, others = [values(x, scale, form) for x in codes], scale * 0
  else:  # all of a block are NaN where one is not finite; Pallas lowers no isfinite
    finite = functools.reduce(jnp.logical_and, [jnp.abs(x) < np.inf for x in beside])
    others = jnp.where(finite, np.float32(0), np.float32(np.nan))
    sent = [jnp.where(finite, x, np.float32(np.nan)) for x in beside]
  return list(zip(places, sent, strict=True)), others


def decode_rows(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, R, B]``."""
  return spread(*_entries(rows, form), form)


def spread(
  entries: Sequence[Entry],
  others: Array,
  form: Form,
  placed: Callable[[Array], Array] = lambda x: x,
) -> Array:
  """Puts entries into their places in blocks, ``float32[..., B]``, among ``others``."""
  # `placed` gives a kernel's arrays their layout.
  shape = (*others.shape, form.block_size)
  each = tuple(range(others.ndim))
  repeat = lambda x: placed(jax.lax.broadcast_in_dim(x, shape, each))
  place = placed(jax.lax.broadcasted_iota(jnp.uint32, shape, others.ndim))
  blocks = repeat(others)
  for behind, value in reversed(entries):
    here = place == repeat(form.block_size - 1 - behind)
    blocks = jnp.where(here, repeat(value), blocks)
  return blocks
