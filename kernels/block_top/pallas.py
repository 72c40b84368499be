"""Encodes the largest elements of blocks by a Pallas kernel, in one pass."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.block_top import reference
from gradcomp._src.kernels.common import fixed_point, planes, scales
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded


@tiles.completed(reference.encode_rows)
def encode_rows(x: Array, *, form: reference.Form, interpret: Any = False) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  # A plane of a tile is 32 blocks, each in the registers of four threads. Planes share
  # a scale: all entries are found first, and planes are read again for residuals.
  def body(block: Block) -> None:
    every = range(form.planes)
    found = [_select(block, block.plane(k), form) for k in every]
    scale = None
    if form.scaled:
      first = functools.reduce(jnp.maximum, [jnp.abs(e[0][1]) for e in found])
      one = scales.scales_of_bits(tiles.largest_bits(first))
      block.put(planes.float_words(one), form.row_words - 1)
      scale = block.spread(one, block.shape[:-1])
    divide = fixed_point.exact_quotient
    sent = [[reference.coded(x, scale, form, divide) for x in own] for own in found]
    for number in range(form.count):
      at = number * form.entry_words
      block.put(planes.pack_planes([x[number][0] for x in sent], form.code_bits), at)
      for k in every if scale is None else ():
        words = planes.float_words(sent[k][number][1])
        block.put(words, at + (k + 1) * reference.WORDS)
    if form.keep:
      for k in every:
        entries, others = reference.decoded(sent[k], scale, form)
        own = reference.spread(entries, others, form, block.placed)
        block.put_residual(k, block.plane(k) - own)

  view = reference.WORDS, form.block_size
  launch = tiles.Launch(
    "block_top_encode", form.row_words, interpret, form.keep, [view], planar=False
  )
  return tiles.encode(body, x, (), form, launch)


def _select(block: Block, x: Array, form: reference.Form) -> list[reference.Entry]:
  """Selects in blocks, ``float32[..., B]``: places and values, ``[...]`` each."""
  every = reference.keys(x, form, block.iota)
  entries: list[reference.Entry] = []
  rest = every
  for _ in range(form.count):
    key = rest.max(axis=-1)
    here = every == block.spread(key, x.shape)
    rest = jnp.where(here, jnp.uint32(0), rest)
    if form.scaled:
      value = reference.cut_value(key, form)
    else:
      whole = jnp.where(here, planes.float_words(x), jnp.uint32(0))
      value = planes.floats(whole.max(axis=-1))
    entries.append((reference.behind_of(key, form), value))
  return entries
