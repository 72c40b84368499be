"""Laws of payloads: their types and shapes, their rows, and their bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf, Payload
from gradcomp._src.codecs.tiles import to_tiles
from gradcomp._src.core.transform import compress
from gradcomp._src.report.explain import explain
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.testing.broken import BrokenLaw, described, difference
from gradcomp._src.testing.leaves import KEY, first_context, gaussian, key_of, leaf_of
from gradcomp._src.testing.modes import lowered
from gradcomp._src.testing.trial import decode, encode, round_trip, trial


def shapes_and_dtypes_return(codec: LeafCodec) -> None:
  """A leaf of any shape and float dtype decodes to its own, with x64 enabled too.

  Scalars, empty leaves and odd shapes are traced, and nothing is computed.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.shapes_and_dtypes_return(gradcomp.codecs.QSGD(bits=4))
  """
  law = "shapes_and_dtypes_return"
  for shape, dtype, x64 in (
    ((), jnp.float32, False),
    ((0, 3), jnp.float32, True),
    ((5, 7), jnp.bfloat16, True),
  ):
    like = jax.ShapeDtypeStruct(shape, dtype)
    with jax.enable_x64(x64):
      payload, value = jax.eval_shape(lambda x: _both_ways(codec, x), like)
    if (value.shape, value.dtype) != (shape, dtype):
      raise BrokenLaw(
        law,
        codec,
        f"decode a leaf {described(like)} to its own shape and dtype",
        f"it decodes to {described(value)}",
        "`decode`, which has them from `like`",
      )
    _check_types(law, codec, payload)


def _both_ways(codec: LeafCodec, x: jax.Array) -> tuple[Payload, jax.Array]:
  payload = encode(codec, x, KEY)
  return payload, decode(codec, payload, x)


def _check_types(law: str, codec: LeafCodec, payload: Payload) -> None:
  """Raises BrokenLaw for a payload that is not made of words and statistics."""
  expected = "encode to a gradcomp.codecs.Payload whose `rows` are uint32[rows, words]"
  if not isinstance(payload, Payload):
    found = f"it encodes to {type(payload).__name__}"
  elif payload.rows.dtype != jnp.uint32 or payload.rows.ndim != 2:
    found = f"they are {described(payload.rows)}"
  elif payload.agreed is not None and payload.agreed.dtype not in (
    jnp.float32,
    jnp.uint8,
  ):
    expected = "have workers agree on float32 or uint8"
    found = f"`agreed` is {described(payload.agreed)}"
  else:
    return
  raise BrokenLaw(law, codec, expected, found, "`encode`")


def half_precision_is_computed_in_float32(codec: LeafCodec) -> None:
  """Leaves of half precision decode in their dtype, rounded once from float32.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.half_precision_is_computed_in_float32(gradcomp.codecs.OneBit())
  """
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
  def run(leaves: list[jax.Array]) -> list[list[jax.Array]]:
    value = lambda x: round_trip(codec, x)
    wide = lambda x: value(x.astype(jnp.float32)).astype(x.dtype)
    return [jax.tree.map(function, leaves) for function in (value, wide)]

  for found, expected in zip(*run(leaves), strict=True):
    if told := difference(found, expected):
      raise BrokenLaw(
        "half_precision_is_computed_in_float32",
        codec,
        f"decode {described(expected)} as it decodes the same numbers of float32",
        told,
        "the dtype in which `encode` and `decode` compute",
      )


def payload_is_rows_of_words(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """A payload is ``uint32[rows, row_words]``, a row for each tile.

  It has statistics, too, if workers agree on some, and only then.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.payload_is_rows_of_words(gradcomp.codecs.Ternary())
  """
  law = "payload_is_rows_of_words"
  leaf = leaf_of(codec, x)
  payload = trial(codec, leaf).payload
  _check_types(law, codec, payload)
  parts = codec.bind(Leaf(leaf.shape)).rounds(leaf.shape)
  rows = sum(-(-math.prod(part.shape) // part.codec.tile_size) for part in parts)
  claimed = (rows, parts[0].codec.row_words)
  if payload.rows.shape != claimed:
    raise BrokenLaw(
      law,
      codec,
      f"encode {described(leaf)} to the rows that `tile_size` and `row_words` claim, "
      f"uint32[{claimed[0]},{claimed[1]}]",
      f"the payload has {described(payload.rows)}, {payload.rows.nbytes} bytes in "
      f"place of {4 * math.prod(claimed)}",
      "`row_words`, or what `encode` stacks",
    )
  shared = jax.eval_shape(parts[0].codec.agree, leaf)
  if (shared is None) != (payload.agreed is None):
    raise BrokenLaw(
      law,
      codec,
      "put into `payload.agreed` what workers agree on, and nothing else",
      f"`agree` gives {shared} and the payload {payload.agreed}",
      "`agree` and `encode`",
    )
  if payload.agreed is not None and payload.agreed.shape[0] not in (1, rows):
    raise BrokenLaw(
      law,
      codec,
      f"agree on one line for all rows, or for each of {rows}",
      f"`agreed` is {described(payload.agreed)}",
      "`agree`",
    )


def rows_stand_alone(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """Each row decodes to its own tile without the others, as shares of rows need.

  Args:
    codec: the codec.
    x: a leaf; by default one of three rows.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.rows_stand_alone(gradcomp.codecs.EightBit(bucket_size=64))
  """
  found = trial(codec, leaf_of(codec, x))
  if told := difference(found.alone, found.together):
    raise BrokenLaw(
      "rows_stand_alone",
      codec,
      "decode each row without the others",
      f"of its tiles, [row, ...], {told}",
      "`decode_rows`, which may mix rows",
    )


def zeros_behind_change_nothing(
  codec: LeafCodec, x: ArrayLike | None = None, *, by_row: bool = False
) -> None:
  """A leaf that ends within a tile has the payload of the leaf padded with zeros.

  This holds where zeros fill the last tile, as on the page on the wire format. It does
  not hold for statistics of the leaf's own elements, like means: for such codecs
  :func:`padding_never_leaks` does.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.
    by_row: whether ``encode_rows`` of its tiles must give the same rows, as it does
      for codecs without statistics of a whole leaf.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.zeros_behind_change_nothing(gradcomp.codecs.QSGD(bits=4))
  """
  law = "zeros_behind_change_nothing"
  leaf = leaf_of(codec, x)
  bound = codec.bind(Leaf(leaf.shape))
  ((_, rows_codec, _),) = bound.rounds(leaf.shape)

  @jax.jit
  def run(padded: jax.Array) -> tuple[Payload, jax.Array]:
    payload = encode(bound, padded, KEY)
    if not by_row:
      return payload, payload.rows
    tiles = to_tiles(padded, rows_codec).reshape(-1, rows_codec.tile_size // 32, 32)
    context = first_context(bound, Leaf(padded.shape))
    rows = rows_codec.encode_rows(tiles, context._replace(key=key_of(bound, KEY)))
    return payload, rows

  tile = rows_codec.tile_size
  padded, rows = run(np.pad(leaf.reshape(-1), (0, -leaf.size % tile)))
  found = trial(codec, leaf).payload
  for part, expected in zip(*map(jax.tree.leaves, (found, padded)), strict=True):
    if told := difference(part, expected):
      raise BrokenLaw(
        law,
        codec,
        f"encode {described(leaf)} as with zeros behind it, to whole tiles of {tile}",
        f"of its payload {told}",
        "what fills the last tile in `encode`; if zeros would count as elements, its "
        "statistics are of the leaf's own, as CheckOptions(own_statistics=True) says",
      )
  if told := difference(rows, padded.rows):
    raise BrokenLaw(
      law,
      codec,
      "encode tiles as it encodes a leaf",
      f"of what `encode_rows` gives {told}",
      "`encode_rows`",
    )


def bytes_are_the_claim(
  codec: LeafCodec, x: ArrayLike | None = None, *, workers: int = 4
) -> None:
  """Explained, encoded and compiled payloads have equal bytes.

  The bytes of a payload, N - 1 of which each worker receives in ``all_gather``, are
  those of :func:`gradcomp.explain`, and those of the collectives in a compiled step,
  which :func:`gradcomp.wire_report` reads, if there are as many devices.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.
    workers: N.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.bytes_are_the_claim(gradcomp.codecs.QSGD(bits=4), workers=2)
  """
  law = "bytes_are_the_claim"
  leaf = leaf_of(codec, x)
  parts = codec.bind(Leaf(leaf.shape)).rounds(leaf.shape)
  agreed = jax.eval_shape(parts[0].codec.agree, leaf)
  rows = trial(codec, leaf).payload.rows
  sent = (workers - 1) * rows.nbytes
  if agreed is not None:
    sent += math.ceil(2 * (workers - 1) / workers * agreed.size * agreed.dtype.itemsize)
  tx = compress(codec, axis_name="data", exchange="all_gather", min_leaf_size=0)
  told = explain(tx, jnp.asarray(leaf), workers=workers)
  if told.bytes_sent != sent + math.ceil(told.bytes_fitting):
    raise BrokenLaw(
      law,
      codec,
      f"send {workers - 1} payloads of {rows.nbytes} bytes, {sent} together",
      f"gradcomp.explain reads {told.bytes_sent} from the trace",
      "`row_words`, and what `encode` returns",
    )
  if len(jax.devices()) < workers:
    return
  report = wire_report(lowered(tx, jnp.asarray(leaf), workers=workers))
  if abs(report.bytes_sent - told.bytes_sent) > len(report.collectives):  # rounded up
    raise BrokenLaw(
      law,
      codec,
      f"have a compiled step send the {told.bytes_sent} bytes that are explained",
      f"its collectives send {report.bytes_sent}",
      "gradcomp.wire_report of the step",
    )
