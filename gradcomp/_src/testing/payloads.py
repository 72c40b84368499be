"""Laws of payloads: their types and shapes, their rows, and their bytes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf, Payload
from gradcomp._src.codecs.tiles import to_tiles
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.lines import form
from gradcomp._src.report.explain import explain
from gradcomp._src.testing.broken import Findings, described, difference, law
from gradcomp._src.testing.leaves import KEY, first_context, gaussian, leaf_of
from gradcomp._src.testing.steps import sent_otherwise
from gradcomp._src.testing.trial import decode, encode, round_trip, trial


@law(look="`decode`, which has them from `like`")
def shapes_and_dtypes_return(codec: LeafCodec) -> Findings:
  """A leaf of any shape and float dtype decodes to its own, with x64 enabled too.

  Scalars, empty leaves and odd shapes are traced, and nothing is computed.

  Example:
    >>> gradcomp.testing.laws.shapes_and_dtypes_return(gradcomp.codecs.QSGD(bits=4))
  """

  def both_ways(x: jax.Array) -> tuple[Payload, jax.Array]:
    payload = encode(codec, x, KEY)
    return payload, decode(codec, payload, x)

  whole, half = jnp.float32, jnp.bfloat16
  for shape, dtype, x64 in (((), whole, 0), ((0, 3), whole, 1), ((5, 7), half, 1)):
    like = jax.ShapeDtypeStruct(shape, dtype)
    with jax.enable_x64(bool(x64)):
      payload, value = jax.eval_shape(both_ways, like)
    same = (value.shape, value.dtype) == (shape, dtype)
    found = None if same else f"it decodes to {described(value)}"
    yield codec, f"decode a leaf {described(like)} to its own shape and dtype", found
    yield from _types(codec, payload)


def _types(codec: LeafCodec, payload: Payload) -> Findings:
  """Yields a finding for a payload that is not made of words and statistics."""
  words = "encode to a gradcomp.codecs.Payload whose `rows` are uint32[rows, words]"
  if not isinstance(payload, Payload):
    yield codec, words, f"it encodes to {type(payload).__name__}", "`encode`"
  if payload.rows.dtype != jnp.uint32 or payload.rows.ndim != 2:
    yield codec, words, f"they are {described(payload.rows)}", "`encode`"
  agreed = payload.agreed
  if agreed is not None and agreed.dtype not in (jnp.float32, jnp.uint8):
    found = f"`agreed` is {described(agreed)}"
    yield codec, "have workers agree on float32 or uint8", found, "`encode`"


@law(look="the dtype in which `encode` and `decode` compute")
def half_precision_is_computed_in_float32(codec: LeafCodec) -> Findings:
  """Leaves of half precision decode in their dtype, rounded once from float32.

  Example:
    >>> codec = gradcomp.codecs.OneBit()
    >>> gradcomp.testing.laws.half_precision_is_computed_in_float32(codec)
  """
  shapes = {"bfloat16": ((), (3, 3, 8, 16)), "float16": ((1,), (5, 7))}
  cast = lambda x, kind: gaussian(x).astype(jnp.dtype(kind))
  leaves = [cast(x, kind) for kind in shapes for x in shapes[kind]]

  @jax.jit
  def run(leaves: list[Any]) -> list[list[jax.Array]]:
    value = lambda x: round_trip(codec, x)
    wide = lambda x: value(x.astype(jnp.float32)).astype(x.dtype)
    return [jax.tree.map(function, leaves) for function in (value, wide)]

  for found, wanted in zip(*run(leaves), strict=True):
    expected = f"decode {described(wanted)} as it decodes the same numbers of float32"
    yield codec, expected, difference(found, wanted)


@law(look="`agree` and `encode`")
def payload_is_rows_of_words(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """A payload is ``uint32[rows, row_words]``, a row for each tile.

  It has statistics, too, if workers agree on some, and only then.

  Example:
    >>> gradcomp.testing.laws.payload_is_rows_of_words(gradcomp.codecs.Ternary())
  """
  leaf = leaf_of(codec, x)
  payload = trial(codec, leaf).payload
  yield from _types(codec, payload)
  bound = codec.bind(Leaf(leaf.shape))
  rows, words = -(-leaf.size // bound.tile_size), bound.row_words
  if payload.rows.shape != (rows, words):
    yield (
      codec,
      f"encode {described(leaf)} to the rows that `tile_size` and `row_words` claim, "
      f"uint32[{rows},{words}]",
      f"the payload has {described(payload.rows)}, {payload.rows.nbytes} bytes in "
      f"place of {4 * rows * words}",
      "`row_words`, or what `encode` stacks",
    )
  shared = jax.eval_shape(bound.agree, leaf)
  if (shared is None) != (payload.agreed is None):
    found = f"`agree` gives {shared} and the payload {payload.agreed}"
    agreed = "put into `payload.agreed` what workers agree on, and nothing else"
    yield codec, agreed, found
  if payload.agreed is not None and payload.agreed.shape[0] not in (1, rows):
    found = f"`agreed` is {described(payload.agreed)}"
    yield codec, f"agree on one line for all rows, or for each of {rows}", found


@law(look="`decode_rows`, which may mix rows")
def rows_stand_alone(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Each row decodes to its own tile without the others, as shares of rows need.

  Example:
    >>> codec = gradcomp.codecs.EightBit(bucket_size=64)
    >>> gradcomp.testing.laws.rows_stand_alone(codec)
  """
  found = trial(codec, leaf_of(codec, x))
  told = difference(found.alone, found.together, of="its tiles, [row, ...],")
  yield codec, "decode each row without the others", told


@law(
  look="what fills the last tile in `encode`; if zeros would count as elements, its "
  "statistics are of the leaf's own, as CheckOptions(own_statistics=True) says"
)
def zeros_behind_change_nothing(
  codec: LeafCodec, x: ArrayLike | None = None, *, by_row: bool = False
) -> Findings:
  """A leaf that ends within a tile has the payload of the leaf padded with zeros.

  It does not hold for statistics of the leaf's own elements, like means: for such
  codecs :func:`padding_never_leaks` does. With ``by_row`` ``encode_rows`` of its tiles
  must give the same rows.

  Example:
    >>> gradcomp.testing.laws.zeros_behind_change_nothing(gradcomp.codecs.QSGD(bits=4))
  """
  leaf = leaf_of(codec, x)
  bound = codec.bind(Leaf(leaf.shape))

  @jax.jit
  def run(padded: jax.Array) -> tuple[Payload, jax.Array]:
    payload = encode(bound, padded, KEY)
    if not by_row:
      return payload, payload.rows
    tiles = to_tiles(padded, bound).reshape(-1, bound.tile_size // 32, 32)
    context = first_context(bound, Leaf(padded.shape))
    return payload, bound.encode_rows(tiles, context)

  tile = bound.tile_size
  padded, rows = run(np.pad(leaf.reshape(-1), (0, -leaf.size % tile)))
  found = trial(codec, leaf).payload
  whole = f"encode {described(leaf)} as with zeros behind it, to whole tiles of {tile}"
  for part, wanted in zip(*map(jax.tree.leaves, (found, padded)), strict=True):
    yield codec, whole, difference(part, wanted, of="its payload")
  told = difference(rows, padded.rows, of="what `encode_rows` gives")
  yield codec, "encode tiles as it encodes a leaf", told, "`encode_rows`"


@law(look="`row_words`, and what `encode` returns")
def bytes_are_the_claim(
  codec: LeafCodec, x: ArrayLike | None = None, *, workers: int = 4
) -> Findings:
  """Explained, encoded and compiled payloads have equal bytes.

  The bytes of N - 1 payloads in ``all_gather`` are those of :func:`gradcomp.explain`,
  and those of :func:`gradcomp.wire_report`, if there are N devices. Long payloads are
  filled to whole lanes of 128 words.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4)
    >>> gradcomp.testing.laws.bytes_are_the_claim(codec, workers=2)
  """
  leaf = leaf_of(codec, x)
  agreed = jax.eval_shape(codec.bind(Leaf(leaf.shape)).agree, leaf)
  rows = trial(codec, leaf).payload.rows
  nbytes = 4 * math.prod(form(rows.size))
  sent = (workers - 1) * nbytes
  if agreed is not None:
    sent += math.ceil(2 * (workers - 1) / workers * agreed.size * agreed.dtype.itemsize)
  tx = compress(codec, axis_name="data", exchange="all_gather", min_leaf_size=0)
  told = explain(tx, jnp.asarray(leaf), workers=workers)
  same = told.bytes_sent == sent + math.ceil(told.bytes_fitting)
  claim = f"send {workers - 1} payloads of {nbytes} bytes, {sent} together"
  found = f"gradcomp.explain reads {told.bytes_sent} from the trace"
  yield codec, claim, None if same else found
  claim = f"have a compiled step send the {told.bytes_sent} bytes that are explained"
  where: Any = {"axis_name": "data", "workers": workers}
  otherwise = sent_otherwise(told.bytes_sent, tx, jnp.asarray(leaf), **where)
  yield codec, claim, otherwise, "gradcomp.wire_report of the step"
