"""The largest elements of blocks, in jnp and by kernels: selects, codes and packs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels import rules
from gradcomp._src.kernels.common import dithers, fixed_point, planes, scales
from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.materialize import materialized, packed
from gradcomp._src.kernels.tpu import lines

WORDS = 32  # of codes in a row, for each entry of a block
SMALL = 0.375  # the smaller magnitude of a 2-bit value, in scales
_LIMITS = np.float32(SMALL / 2), np.float32((1 + SMALL) / 2)
_LEVELS = rules.Equal(bits=8, bucket_size=WORDS)  # of an 8-bit value

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
  def entry_words(self) -> int:
    """The number of words in a row for one entry of each of its blocks."""
    return WORDS + (0 if self.scaled else self.blocks)

  @property
  def row_words(self) -> int:
    """The number of words in a row: its entries, and its scale."""
    return self.count * self.entry_words + self.scaled


def _keys(
  x: Array, form: Form, iota: dithers.Iota = lax.broadcasted_iota, axis: int = -1
) -> Array:
  """Returns a sort key for each element; the largest of an axis of blocks are sent."""
  # From the highest bit on it holds `31 - log2(B)` bits of the magnitude, the number of
  # elements behind it in its block, and its sign.
  bits = float_words(x)
  behind = (form.block_size - 1) - iota(jnp.uint32, x.shape, axis % x.ndim)
  magnitude = (bits << 1) & np.uint32(2**32 - 2 * form.block_size)
  return magnitude | (behind << 1) | (bits >> 31)


def _behind(key: Array, form: Form) -> Array:
  """Returns the number of elements that lie behind a key's element in its block."""
  return (key >> 1) & np.uint32(form.block_size - 1)


def _cut_value(key: Array, form: Form) -> Array:
  """Returns the value of a key's element, with its lowest bits cleared."""
  return floats((key >> 1) & np.uint32(2**31 - form.block_size) | (key << 31))


def _select(x: Array, form: Form) -> list[Entry]:
  """Selects the largest elements of a flat array's blocks: ``[rows, R]`` an entry."""
  size = form.block_size
  steps = min(_STEPS, size // _LANES)

  def largest(numbers: Array) -> Array:
    count = len(numbers)
    parts = numbers.reshape(count, size // (steps * _LANES), steps, _LANES)
    lanes = lax.reduce(parts, np.uint32(0), lax.max, (2,)).reshape(count, -1)
    while (half := lanes.shape[1] // 2) > 0:
      lanes = jnp.maximum(lanes[:, :half], lanes[:, half:])
    return lanes[:, 0]

  def of_blocks(x: Array) -> list[Entry]:
    every = _keys(x, form)
    found = [largest(every)]
    while len(found) < form.count:
      rest = jnp.where(every < found[-1][:, None], every, np.uint32(0))
      found.append(largest(rest))
    if form.scaled:
      return [(key, _cut_value(key, form)) for key in found]
    whole = float_words(x)
    bits = [largest(jnp.where(every == key[:, None], whole, 0)) for key in found]
    return list(zip(found, map(floats, bits), strict=True))

  parts, whole = [], x.size // size * size
  if whole:
    parts.append(of_blocks(x[:whole].reshape(-1, size)))
  if whole < x.size:
    last = jnp.pad(x[whole:], (0, whole + size - x.size))
    parts.append(of_blocks(last.reshape(1, size)))
  blocks = -(-x.size // size)
  rows = -(-blocks // form.blocks)

  def joined(pieces: Sequence[Array]) -> Array:
    flat = jnp.concatenate(pieces)
    return jnp.pad(flat, (0, rows * form.blocks - blocks)).reshape(rows, form.blocks)

  entries = []
  for entry in zip(*parts, strict=True):
    key, value = map(joined, zip(*entry, strict=True))
    entries.append((_behind(key, form), value))
  return entries


def _coded(
  entry: Entry,
  scale: Array | None,
  form: Form,
  divide: fixed_point.Divide = fixed_point.divide,
) -> Entry:
  """Returns the codes of an entry, and the values beside them, if codes hold none."""
  # The code 0 sends nothing. It would stand for the smaller magnitude, positive, at the
  # end of a block. There the nearest of zero and the larger magnitude is sent.
  behind, value = entry
  if scale is None:
    words = float_words(value)
    some = (words << 1) > 0  # minus zero is sent as zero, and as nothing
    sent = floats(jnp.where(some, words, np.uint32(0)))
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


def _rows_of_entries(entries: Sequence[Entry], form: Form) -> Array:
  """Returns the rows of selected entries, ``uint32[rows, row_words]``."""
  parts, scale = [], None
  if form.scaled:
    scale = scales.scales(scales.norms(entries[0][1], "max"))[:, None]
  for codes, value in (_coded(x, scale, form) for x in entries):
    whole = codes.reshape(-1, form.planes, WORDS)
    own = [whole[:, k] for k in range(form.planes)]
    parts.append(planes.pack_planes(own, form.code_bits))
    parts += [float_words(value)] if scale is None else []
  parts += [] if scale is None else [float_words(scale)]
  return jnp.concatenate(parts, axis=1)


def entries_of_rows(rows: Array, form: Form) -> Entries:
  """Unpacks the entries of rows, ``uint32[..., words]``: ``[..., R]`` each."""
  shape = (*rows.shape[:-1], form.blocks)
  each = form.entry_words
  parts = [rows[..., k * each :][..., :each] for k in range(form.count)]
  unpack = lambda words: planes.unpack_planes(words, form.code_bits).reshape(shape)
  sent = [(unpack(x[..., :WORDS]), floats(x[..., WORDS:])) for x in parts]
  scale = floats(rows[..., -1:]) if form.scaled else None
  entries, others = _decoded(sent, scale, form)
  return entries, jnp.broadcast_to(others, shape)


def _decoded(given: Sequence[Entry], scale: Array | None, form: Form) -> Entries:
  """Returns the entries of blocks, of codes and the values beside them."""
  codes, beside = zip(*given, strict=True)
  places = [x >> form.value_bits if form.scaled else x for x in codes]
  places = [x & np.uint32(form.block_size - 1) for x in places]
  if scale is None:
    # All of a block are NaN where one is not finite; Pallas lowers no isfinite.
    finite = functools.reduce(jnp.logical_and, [jnp.abs(x) < np.inf for x in beside])
    others = jnp.where(finite, np.float32(0), np.float32(np.nan))
    sent = [jnp.where(finite, x, np.float32(np.nan)) for x in beside]
    return list(zip(places, sent, strict=True)), others

  def value(codes: Array) -> Array:  # NaN under a scale of NaN
    if form.value_bits == 8:
      return _LEVELS.value(codes & np.uint32(0xFF), scale)
    magnitude = jnp.where(codes & 1 == 1, scale, scale * np.float32(SMALL))
    signed = fixed_point.signed(magnitude, (codes >> 1) << 31)
    return jnp.where(codes == 0, scale * 0, signed)

  return list(zip(places, map(value, codes), strict=True)), scale * 0


def _spread(
  entries: Sequence[Entry],
  others: Array,
  form: Form,
  placed: Callable[[Array], Array] = lambda x: x,
) -> Array:
  """Puts entries into their places in blocks, ``float32[..., B]``, among ``others``."""
  # `placed` gives a kernel's arrays their layout.
  shape = (*others.shape, form.block_size)
  each = tuple(range(others.ndim))
  repeat = lambda x: placed(lax.broadcast_in_dim(x, shape, each))
  place = placed(lax.broadcasted_iota(jnp.uint32, shape, others.ndim))
  blocks = repeat(others)
  for behind, value in reversed(entries):
    here = place == repeat(form.block_size - 1 - behind)
    blocks = jnp.where(here, repeat(value), blocks)
  return blocks


def _stored_entries(rows: Array, form: Form) -> Entries:
  """Returns the :func:`entries_of_rows`, materialized on a CPU if that is faster."""
  # Where a tile's blocks are no power of two, XLA would find the row of each element by
  # a division, and take ten times as long.
  unpack = functools.partial(entries_of_rows, form=form)
  odd = form.planes & (form.planes - 1)
  return materialized(unpack, rows) if odd and rows.size >= _MANY else unpack(rows)


def encode_reference(x: Array, *, form: Form, first_row: int = 0) -> tiles.Encoded:
  """Encodes ``float32`` of any shape: ``uint32[rows, row_words]``, and the residual."""
  del first_row  # nothing is random
  flat = x.reshape(-1)
  if not flat.size:
    return jnp.zeros((0, form.row_words), jnp.uint32), x if form.keep else None
  rows = packed(_rows_of_entries(_select(flat, form), form))
  if not form.keep:
    return rows, None
  entries, others = _stored_entries(rows, form)
  if x.size % form.block_size:
    sent = _spread(entries, others, form).reshape(-1)[: x.size].reshape(x.shape)
    return rows, x - sent
  # Whole blocks are subtracted in their own shape: XLA's loops for CPUs take several
  # times as long in another one.
  blocks = x.reshape(-1, form.block_size)
  own = lambda part: part.reshape(-1)[: len(blocks)]
  entries = [(own(behind), own(value)) for behind, value in entries]
  return rows, (blocks - _spread(entries, own(others), form)).reshape(x.shape)


def decode_reference(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, R, B]``."""
  return _spread(*_stored_entries(rows, form), form)


@tiles.completed(encode_reference)
def encode_on_gpu(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""

  def select(block: tiles.Block, x: Array) -> list[Entry]:
    every = _keys(x, form, block.iota)
    entries: list[Entry] = []
    rest = every
    for _ in range(form.count):
      key = rest.max(axis=-1)
      here = every == block.spread(key, x.shape)
      rest = jnp.where(here, jnp.uint32(0), rest)
      if form.scaled:
        value = _cut_value(key, form)
      else:
        whole = jnp.where(here, float_words(x), jnp.uint32(0))
        value = floats(whole.max(axis=-1))
      entries.append((_behind(key, form), value))
    return entries

  # A plane of a tile is 32 blocks, each in the registers of four threads. Planes share
  # a scale: all entries are found first, and planes are read again for residuals.
  def body(block: tiles.Block) -> None:
    every = range(form.planes)
    found = [select(block, block.plane(k)) for k in every]
    scale = None
    if form.scaled:
      first = functools.reduce(jnp.maximum, [jnp.abs(e[0][1]) for e in found])
      one = scales.scales_of_bits(tiles.largest_bits(first))
      block.put(float_words(one), form.row_words - 1)
      scale = block.spread(one, block.shape[:-1])
    divide = fixed_point.exact_quotient
    sent = [[_coded(x, scale, form, divide) for x in own] for own in found]
    for number in range(form.count):
      at = number * form.entry_words
      block.put(planes.pack_planes([x[number][0] for x in sent], form.code_bits), at)
      for k in every if scale is None else ():
        block.put(float_words(sent[k][number][1]), at + (k + 1) * WORDS)
    if form.keep:
      for k in every:
        own = _spread(*_decoded(sent[k], scale, form), form, block.placed)
        block.put_residual(k, block.plane(k) - own)

  view = WORDS, form.block_size
  launch = tiles.Launch(
    "block_top_encode", [form.row_words], interpret, form.keep, [view], planar=False
  )
  return tiles.encode(body, x, (), form, launch)


# On TPUs, the elements of a block are a column of a transposed one. Decoded blocks are
# lines of 128 elements or more, since XLA pads a shorter last axis to 128.
@lines.completed(encode_reference)
def encode_on_tpu(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  size, width = form.block_size, lines.width(form.block_size)
  tile = form.planes * form.bucket_size
  count = tile // width  # lines of a tile
  each = 1 if form.scaled else 2  # numbers of an entry

  # Returns the keys of a column's entries, and the bits that are sent with them,
  # `int32[1, columns]` each. With the highest bit flipped, signed integers are in the
  # order of unsigned ones, which TPUs do not compare.
  def largest_of(block: Array) -> list[Array]:
    key = lax.bitcast_convert_type(_keys(block, form, axis=0), jnp.int32)
    lowest = np.int32(-(2**31))
    every, found = key ^ lowest, []
    bits = lax.bitcast_convert_type(block, jnp.int32)
    for _ in range(form.count):
      largest = every.max(axis=0, keepdims=True)
      found.append(largest ^ lowest)
      if not form.scaled:
        found.append(jnp.where(every == largest, bits, 0).sum(axis=0, keepdims=True))
      every = jnp.where(every == largest, lowest, every)
    return found

  def body(x: Array) -> tuple[Array, ...]:
    columns = x.T
    found = [largest_of(columns[at : at + size]) for at in range(0, width, size)]
    rows_of = lambda *numbers: lines.rows_of_tiles(numbers, count, form.blocks)
    return tuple(map(rows_of, *found))

  words = [form.blocks] * (form.count * each)
  launch = tiles.Launch("block_top_select", words, interpret)
  found = lines.encode(body, x, launch, tile, width)
  entries = []
  for at in range(0, len(found), each):
    key, *bits = found[at : at + each]
    value = floats(bits[0]) if bits else _cut_value(key, form)
    entries.append((_behind(key, form), value))
  rows = _rows_of_entries(entries, form)
  if not form.keep:
    return rows, None
  whole = x.reshape(-1)[: len(rows) * tile]
  return rows, _spread_by_kernel(rows, form=form, interpret=interpret, x=whole)


def _spread_by_kernel(
  rows: Array, *, form: Form, interpret: Any = False, x: Array | None = None
) -> Array:
  """Decodes rows to flat elements, which are subtracted from ``x`` if it is given."""

  def body(others: Array, *entries: Array) -> list[Array]:
    shape = form.block_size, others.shape[1]
    place = lax.broadcasted_iota(jnp.int32, shape, 0)
    parts = []
    for block in range(form.blocks):
      own = slice(block, block + 1)
      decoded = jnp.broadcast_to(others[own], shape)
      for at in reversed(range(0, len(entries), 2)):
        decoded = jnp.where(place == entries[at][own], entries[at + 1][own], decoded)
      parts.append(decoded)
    return parts

  entries, others = entries_of_rows(rows, form)
  given, tile = [others], form.planes * form.bucket_size
  for behind, value in entries:
    given += [form.block_size - 1 - behind.astype(jnp.int32), value]
  return lines.decode(body, given, "block_top_spread", tile, interpret, x)


decode_on_tpu = lines.decoder(decode_reference)(_spread_by_kernel)
decode_rows = dispatch.with_kernel(decode_reference, decode_on_tpu)
encode_rows = dispatch.encoder(
  "block_top", encode_reference, encode_on_gpu, encode_on_tpu
)
