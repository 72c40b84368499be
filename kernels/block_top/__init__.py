"""Encodes and decodes the largest elements of blocks."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.block_top import pallas, reference
from gradcomp._src.kernels.block_top.form import WORDS
from gradcomp._src.kernels.block_top.form import Form as Form
from gradcomp._src.kernels.block_top.reference import decode_rows as decode_rows
from gradcomp._src.kernels.block_top.reference import entries_of_rows as entries_of_rows
from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles


def encode_rows(
  x: jax.Array,
  *,
  form: Form,
  keep: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {"form": form, "keep": keep}
  no = triton_tiles.refusal(x.size, form.planes, WORDS * form.block_size)
  return dispatch.run(
    implementation,
    x,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=no or functools.partial(pallas.encode_rows, **options),
    example=lambda: self_check.few_tiles(form.tile_size),
  )
