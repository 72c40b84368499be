"""States the laws that every codec obeys, as functions of a case of `codec_cases`.

A law raises AssertionError; where it allows a difference, the reason stands beside the
number. What one program computes of a leaf serves all laws that try the leaf.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from codec_cases import CASES

from gradcomp.codecs import Context, Leaf, Payload, RemainderCodec, to_tiles

CODECS = [case.codec for case in CASES]

KEY = jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32)


def name(codec):
  """The id of a codec in tests: its type, and the fields that are not the defaults."""
  fields = dataclasses.fields(codec)
  values = {field.name: getattr(codec, field.name) for field in fields}
  told = [
    _told(values[field.name], field.name)
    for field in fields
    if values[field.name] != field.default or field.name in ("bits", "bucket_size")
  ]
  return "-".join([type(codec).__name__.lower(), *told])


def _told(value, field):
  if isinstance(value, bool):
    return field if value else f"no_{field}"
  return str(value) if isinstance(value, str | int | float | None) else value.name


def encode(codec, x, key, levels=None):
  """The payload of a leaf; under the first levels where levels are fitted."""
  if codec.fitted and levels is None:
    levels = codec.init().shared
  return codec.encode(
    x, key=key if codec.needs_key else None, context=Context(levels=levels)
  )


def here(codec):
  """The codec whose ``implementation`` is the one that None takes on CPUs.

  None would trace the kernels for GPUs too, which takes longer than all else.
  """
  if getattr(codec, "implementation", "") is None:
    return dataclasses.replace(codec, implementation="xla")
  return codec


@functools.cache
def encoder(codec):
  return jax.jit(functools.partial(encode, here(codec)))


@functools.cache
def decoder(codec, shape, dtype=jnp.float32):
  like = jax.ShapeDtypeStruct(shape, dtype)
  return jax.jit(lambda payload: codec.decode(payload, like=like))


def round_trip(codec, x, key=KEY):
  x = jnp.asarray(x)
  return np.asarray(decoder(codec, x.shape, x.dtype)(encoder(codec)(x, key)))


def gaussian(size, seed=0):
  return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


class Trial(NamedTuple):
  """Holds what a codec makes of one leaf.

  Attributes:
    payload: of the leaf.
    value: what the payload decodes to.
    together: the tiles of its rows, decoded at once.
    alone: the same, each row by itself.
  """

  payload: Payload
  value: np.ndarray
  together: np.ndarray
  alone: np.ndarray


@functools.lru_cache(maxsize=1)  # the laws of one codec follow each other
def _program(case):
  whole = here(case.codec)
  codec = whole.bind(Leaf(case.leaf))

  @jax.jit
  def run(x, key):
    payload = encoder(case.codec)(x, key)
    rows, stats = payload
    lines = (
      None
      if stats is None
      else jnp.broadcast_to(stats, (rows.shape[0], stats.shape[1]))
    )
    tiles = functools.partial(_tiles, codec)
    one = lambda row: tiles(*jax.tree.map(lambda part: part[None], row))[0]
    return Trial(
      payload,
      whole.decode(payload, like=x),
      tiles(rows, lines),
      jax.lax.map(one, (rows, lines)),
    )

  return run


def _tiles(codec, rows, stats):
  """The values of rows, which share statistics or hold their own."""
  if codec.adds:
    return codec.unscaled(codec.decode_rows(rows), stats)
  if stats is None:
    return codec.decode_rows(rows)
  return codec.from_codes(codec.codes(rows), stats)


def trial(case, x, key=KEY):
  return jax.tree.map(np.asarray, _program(case)(jnp.asarray(x), key))


def payload_is_the_documented_rows(case, x):
  """Rows of one tile each; statistics where workers share them; nothing beside them."""
  codec = case.codec.bind(Leaf(x.shape))
  payload = trial(case, x).payload
  tiles = -(-x.size // codec.tile_size)
  chex.assert_shape(payload.rows, (tiles, codec.row_words))
  chex.assert_type(payload.rows, jnp.uint32)
  assert (payload.agreed is not None) == codec.agrees
  assert len(jax.tree.leaves(payload)) == 1 + codec.agrees
  if codec.agrees:
    assert payload.agreed.shape[0] in (1, tiles)


def the_page_reads_the_payload(case, x):
  """A decoder that knows docs/wire-format.md alone finds the same values, exactly."""
  found = trial(case, x)
  expected = case.read(*found.payload, x.shape).reshape(x.shape)
  np.testing.assert_array_equal(found.value, expected)


def rows_stand_alone(case, x):
  """Each row decodes alone to its own tile: what lets workers own ranges of rows."""
  found = trial(case, x)
  np.testing.assert_array_equal(found.together, found.alone)


def zeros_stay(case, x):
  zeros = trial(case, np.zeros_like(x)).value
  np.testing.assert_array_equal(zeros, np.zeros_like(x))


def batches_are_independent(case, x):
  """vmap over leaves and keys is a loop, and the residual is what is not sent.

  A codec that gives the payload and the residual at once gives the same of both.
  """
  codec = here(case.codec)
  batch = np.stack([x, 3 * x[::-1]])
  keys = jnp.stack([KEY, KEY + 1])

  def both(x, key):
    if not isinstance(codec, RemainderCodec):
      return encoder(case.codec)(x, key), None
    levels = codec.init().shared if codec.fitted else None
    own = key if codec.needs_key else None
    return codec.encode_with_residual(x, key=own, context=Context(levels=levels))

  payloads, rests = jax.jit(jax.vmap(both))(batch, keys)
  for i in range(2):
    alone = trial(case, batch[i], keys[i])
    payload = jax.tree.map(lambda part, i=i: part[i], payloads)
    chex.assert_trees_all_equal(payload, alone.payload, strict=True)
    if rests is not None:
      # One subtraction: what is sent plus what is not is rounded once.
      np.testing.assert_array_equal(rests[i], batch[i] - alone.value)


def padding_never_leaks(case, x):
  """A short leaf is the same leaf with zeros behind it, and rows encode like leaves.

  Where zeros are elements that count, in means and standard deviations, what a leaf
  gives is that of its own elements. With one scale a leaf, ``encode_rows`` has another
  for each row.
  """
  found = trial(case, x)
  if case.own is not None:
    case.own(x, found.payload.rows, found.value)
    return
  codec = here(case.codec).bind(Leaf(x.shape))
  by_bucket = isinstance(case.spoils, int) or case.spoils == "itself"
  scaled = codec.agrees or getattr(codec, "scale", 1) != 1

  @jax.jit
  def run(padded):
    payload = encode(codec, padded, KEY)
    if not by_bucket or scaled:
      return payload, payload.rows
    key = KEY if codec.needs_key else None
    levels = codec.init().shared if codec.fitted else None
    tiles = to_tiles(padded, codec).reshape(-1, codec.tile_size // 32, 32)
    return payload, codec.encode_rows(tiles, key=key, context=Context(levels=levels))

  payload, rows = run(np.pad(x, (0, -x.size % codec.tile_size)))
  chex.assert_trees_all_equal(found.payload, payload, strict=True)
  np.testing.assert_array_equal(rows, payload.rows)


def non_finite_elements_are_seen(case, x, bad):
  """A NaN or an infinity comes out where the case says, and no other bucket changes."""
  position = x.size // 2
  dirty = x.copy()
  dirty.flat[position] = bad
  found = trial(case, dirty).value.ravel()
  if case.unclipped is not None:
    clean = round_trip(case.unclipped, x).ravel()
  else:
    clean = trial(case, x).value.ravel()
  number = np.arange(x.size)
  if case.spoils in ("sent", "row"):
    codec = case.codec.bind(Leaf(x.shape))
    spoiled = number // codec.tile_size == position // codec.tile_size
    assert not np.isfinite(found[spoiled]).all()
    if case.spoils == "sent":
      np.testing.assert_array_equal(found[position], dirty.flat[position])
      own = np.asarray(jnp.asarray(x, codec.value_dtype), np.float32).ravel()
      others = spoiled & (number != position)
      assert ((found == own) | (found == 0))[others].all()
  elif case.spoils == "itself":
    spoiled = number == position
    np.testing.assert_array_equal(found[spoiled], dirty.flat[position])
  else:
    columns = x.size // x.shape[0]
    spoiled = {
      None: np.ones(x.size, bool),
      "column": number % columns == position % columns,
    }.get(case.spoils)
    if spoiled is None:
      spoiled = number // case.spoils == position // case.spoils
    assert np.isnan(found[spoiled]).all()
  np.testing.assert_array_equal(found[~spoiled], clean[~spoiled])


def shapes_and_dtypes_return(codec):
  """A leaf of any shape and float dtype has its own again, with x64 enabled too."""
  for shape, dtype, x64 in (
    ((), jnp.float32, False),
    ((0, 3), jnp.float32, True),
    ((5, 7), jnp.bfloat16, True),
  ):
    x = jax.ShapeDtypeStruct(shape, dtype)
    with jax.enable_x64(x64):
      payload, value = jax.eval_shape(lambda x: _both_ways(codec, x), x)
    assert (value.shape, value.dtype) == (shape, dtype)
    assert payload.rows.dtype == jnp.uint32
    assert payload.agreed is None or payload.agreed.dtype in (jnp.float32, jnp.uint8)


def _both_ways(codec, x):
  payload = encode(codec, x, KEY)
  return payload, codec.decode(payload, like=x)


def half_precision_is_computed_in_float32(codec):
  """Leaves of half precision, of any shape, come back with their shape and dtype."""
  leaves = [
    jnp.asarray(gaussian(shape), dtype)
    for shape, dtype in (
      ((), jnp.bfloat16),
      ((1,), jnp.float16),
      ((5, 7), jnp.float16),
      ((3, 3, 8, 16), jnp.bfloat16),
    )
  ]

  @jax.jit
  def run(leaves):
    value = lambda x: _both_ways(codec, x)[1]
    wide = lambda x: value(x.astype(jnp.float32)).astype(x.dtype)
    return jax.tree.map(value, leaves), jax.tree.map(wide, leaves)

  chex.assert_trees_all_equal(*run(leaves), strict=True)


def facts_hold(codec):
  """Codecs are values: equal, hashable, printable, and no functions."""
  again = dataclasses.replace(codec)
  assert again == codec and hash(again) == hash(codec)
  assert not callable(codec)
  assert repr(codec).startswith(f"{type(codec).__name__}(")


def mean_is_the_input(codec, x, draws, z=5.0, mean=None, step=None, levels=None):
  """z-test of unbiasedness: |mean - x| <= z * sigma / sqrt(draws) for every element.

  Where a codec clips, `mean` is what it is to be unbiased of. Where steps are small,
  `step` tells those of all elements, which keeps the test sharp. `levels` are those
  of a codec that fits them.

  With z = 5 and at most 10^4 elements a correct codec fails with probability 6e-3;
  the keys are fixed, so it does so always or never. An element between two levels that
  are a step apart has sigma <= step / 2; the fixed-point grid adds 2^-16 of a step.
  """
  keys = jax.vmap(lambda i: jnp.stack([KEY[0], i]))(jnp.arange(draws, dtype=jnp.uint32))

  @jax.jit
  def total(x, mean, keys):
    def add(sums, key):
      value = codec.decode(encode(codec, x, key, levels), like=x)
      error = value.astype(jnp.float32) - mean
      return (sums[0] + error, sums[1] + error * error), None

    zeros = jnp.zeros_like(x)
    return jax.lax.scan(add, (zeros, zeros), keys)[0]

  first, second = (
    np.asarray(s, np.float64) / draws
    for s in total(jnp.asarray(x), jnp.asarray(x if mean is None else mean), keys)
  )
  if step is None:
    step = 2 * np.abs(round_trip(codec, x) - x).max() + np.abs(x).max()
  assert np.isfinite(first).all()
  sigma = np.sqrt(np.maximum(second, 0))
  # An element that rounds up with a probability below about 1 / draws may never do so:
  # its sample sigma is then too small; one more draw of a step covers it.
  slack = (z * z / draws + 2.0**-16) * step
  assert (np.abs(first) <= z * sigma / np.sqrt(draws) + slack).all()
  # All elements together: errors are independent, so the mean error is sharper.
  pooled = z * np.sqrt(second.sum() / draws) / x.size + 2.0**-16 * np.max(step)
  assert abs(first.mean()) <= pooled
