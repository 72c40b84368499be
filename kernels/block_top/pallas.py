"""Encodes the largest elements of blocks by a Pallas kernel, in one pass.

A plane of a tile is 32 blocks. The kernel finds the entries of all planes first, since
they share a scale, and reads the planes once more for the residual, out of the cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.block_top import reference
from gradcomp._src.kernels.block_top.form import (
  WORDS,
  Form,
  behind_of,
  behind_of_code,
  code,
  cut_value,
  keys,
  values,
)
from gradcomp._src.kernels.block_top.reference import spread
from gradcomp._src.kernels.common.fixed_point import exact_quotient
from gradcomp._src.kernels.common.planes import float_words, floats, pack_planes
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Launch

_ELEMENTS = 2048  # of a plane in a program, at least
_HIGHEST = 1 << 31

Entry = tuple[jax.Array, jax.Array]


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array, *, form: Form, interpret: bool = False
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  def body(block: triton_tiles.Block) -> None:
    planes = range(form.planes)
    blocks_of = lambda k: block.plane(k).reshape(-1, form.block_size)
    found = [_select(blocks_of(k), form) for k in planes]
    scale = None
    if form.scaled:
      first = functools.reduce(jnp.maximum, [jnp.abs(e[0][1]) for e in found])
      scale = scales_of_bits(triton_tiles.largest_bits(first.reshape(-1, WORDS)))
      block.put_scale(form.row_words - 1, float_words(scale))
      scale = jnp.broadcast_to(scale[:, None], (block.shape[0], WORDS)).reshape(-1)
    sent = [_coded(entries, scale, form) for entries in found]
    for number in range(form.count):
      codes = [entries[number][0].reshape(-1, WORDS) for entries in sent]
      at = number * form.entry_words
      block.put(pack_planes(codes, form.code_bits), at)
      if scale is None:
        for k in planes:
          words = float_words(sent[k][number][1]).reshape(-1, WORDS)
          block.put(words, at + (k + 1) * WORDS)
    if form.keep:
      for k in planes:
        rest = blocks_of(k) - _decoded(sent[k], scale, form)
        block.put_residual(k, rest.reshape(block.shape))

  launch = Launch(
    "block_top_encode", form.row_words, form.keep, _ELEMENTS, interpret=interpret
  )
  return triton_tiles.encode(body, x, (), form, launch)


def _select(x: jax.Array, form: Form) -> list[Entry]:
  """Selects in blocks, ``float32[m, B]``: places and values, ``[m]`` each."""
  every = keys(x, form)
  entries: list[Entry] = []
  rest = every
  for _ in range(form.count):
    key = _largest(rest)
    here = every == key[:, None]
    rest = jnp.where(here, jnp.uint32(0), rest)
    if form.scaled:
      value = cut_value(key, form)
    else:
      bits = jax.lax.bitcast_convert_type(x, jnp.int32)
      whole = jnp.where(here, bits, 0).sum(axis=1)
      value = jax.lax.bitcast_convert_type(whole, jnp.float32)
    entries.append((behind_of(key, form), value))
  return entries


def _largest(key: jax.Array) -> jax.Array:
  """Returns the largest of each line of ``uint32[m, B]``, as a maximum of ``int32``."""
  signed = jax.lax.bitcast_convert_type(key ^ np.uint32(_HIGHEST), jnp.int32)
  highest = signed.max(axis=1)
  return jax.lax.bitcast_convert_type(highest, jnp.uint32) ^ np.uint32(_HIGHEST)


def _coded(entries: list[Entry], scale: jax.Array | None, form: Form) -> list[Entry]:
  """Returns the codes of entries, and their values where codes hold none."""
  if scale is not None:
    return [(code(*e, scale, form, exact_quotient), e[1]) for e in entries]
  coded = []
  for behind, value in entries:
    words = float_words(value)
    some = (words << 1) > 0
    value = floats(jnp.where(some, words, jnp.uint32(0)))
    coded.append((jnp.where(some, behind, jnp.uint32(0)), value))
  return coded


def _decoded(sent: list[Entry], scale: jax.Array | None, form: Form) -> jax.Array:
  """Decodes the codes of blocks: ``float32[m, B]``."""
  codes, exact = zip(*sent, strict=True)
  if scale is None:
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, exact))
    found = [jnp.where(finite, value, np.nan) for value in exact]
    others = jnp.where(finite, jnp.float32(0), np.nan)
  else:
    found = [values(code, scale, form) for code in codes]
    others = scale * 0
  entries = list(zip([behind_of_code(c, form) for c in codes], found, strict=True))
  return spread(entries, others, form)
