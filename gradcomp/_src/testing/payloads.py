"""Laws of codecs as values and pure functions, and of their payloads."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf, Payload
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.lines import form
from gradcomp._src.report.collectives import KINDS
from gradcomp._src.report.explain import explain
from gradcomp._src.report.reader import functions
from gradcomp._src.testing import leaves as kit
from gradcomp._src.testing.broken import Findings, described, difference, law

__all__ = ["batches_are_independent", "bytes_are_the_claim", "facts_are_plain"]
__all__ += ["half_precision_is_computed_in_float32", "is_a_value", "is_pure"]
__all__ += ["payload_is_rows_of_words", "rows_stand_alone", "same_bits_without_jit"]
__all__ += ["sent_and_unsent_are_the_leaf", "shapes_and_dtypes_return"]
__all__ += ["zeros_behind_change_nothing"]

# Of JAX's primitives, without the endings that they have in typed maps.
_COLLECTIVES = {"axis_index", "pbroadcast", "psum2", "ragged_all_to_all", *KINDS}


@law("codecs.QSGD(bits=4)")
def is_a_value(codec: LeafCodec) -> Findings:
  """A codec is a frozen dataclass: hashable, equal to its copy, printable, no function.

  ``optax.inject_hyperparams`` takes functions for schedules, and JAX compiles anew for
  each codec that differs.
  """
  kind = type(codec).__name__
  parameters = getattr(type(codec), "__dataclass_params__", None)
  if parameters is None or not parameters.frozen:
    found = f"it is {'no dataclass' if parameters is None else 'not frozen'}"
    cure = "@dataclasses.dataclass(frozen=True, kw_only=True)"
    yield kind, "be a frozen dataclass", found, cure
  given: Any = codec
  for field in dataclasses.fields(given):
    if field.init and not field.kw_only:
      found = f"`{field.name}` is positional"
      yield kind, "take its fields by keyword", found, "kw_only=True"
  try:
    number = hash(codec)
  except TypeError as error:
    fields = "fields that are lists, dicts or arrays"
    yield kind, "be hashable", f"hash() says {error}", fields
  again = dataclasses.replace(given)
  if not (again == codec and hash(again) == number):
    yield kind, "be equal to its copy, by == and hash", "it is not", "eq=True"
  if callable(codec):
    yield kind, "not be callable", "it has __call__", "its methods"
  if not repr(codec).startswith(f"{kind}("):
    yield kind, "print as its type and its fields", f"it is {codec!r}", "repr=True"


@law("codecs.TopK(density=0.1)")
def facts_are_plain(codec: LeafCodec) -> Findings:
  """Facts are bools, positive integers, and a float from 0 to 1 for ``contraction``."""
  bound = codec.bind(Leaf(kit.leaf_of(codec, None).shape))
  flag, count = ("bool", 0, 1), ("positive int", 1, math.inf)
  share: tuple[str, float, float] = ("float from 0 to 1", 0, 1)
  own = {"unbiased": flag, "needs_key": flag, "contraction": share}
  facts = own | {"tile_size": count, "row_words": count}
  for name, (kind, least, most) in facts.items():
    value = getattr(codec if name in own else bound, name)
    plain = type(value).__name__ in kind.split() and least <= value <= most
    found = None if plain else f"it is {value!r} of {type(value).__name__}"
    yield codec, f"have a {kind} for `{name}`", found, f"the property `{name}`"


@law("codecs.Natural()", "`encode`")
def is_pure(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Encoding and decoding are pure: shapes from shapes, no collectives, no effects.

  They are traced twice to equal programs: tracing draws no random numbers.
  """
  leaf = kit.leaf_of(codec, x)
  alone = "encode and decode without collectives"

  def traced() -> ClosedJaxpr:  # a new function each time, because JAX caches traces
    both = lambda x, key: kit.decode(codec, kit.encode(codec, x, key), x)
    return jax.make_jaxpr(both)(leaf, kit.KEY)

  try:
    first, again = traced(), traced()
  except jax.errors.JAXTypeError as error:
    found = f"its values are asked for: {str(error).splitlines()[0]}"
    look = "Python's if, int() and NumPy's functions of a traced array"
    yield codec, "be traced with shapes alone", found, look
  except NameError as error:
    if "axis" not in str(error):
      raise
    look = "`agree`, whose results the exchange takes the largest of"
    yield codec, alone, f"it asks for an axis of workers: {error}", look
  if first.effects:
    yield codec, "have no effects", f"it has {first.effects}", "callbacks and prints"
  if called := sorted(set(_primitives(first.jaxpr)) & _COLLECTIVES):
    yield codec, alone, f"it calls {called}"
  # Without the addresses of kernels, which are parameters.
  texts = [re.sub(r" at 0x[0-9a-f]+", "", str(x.jaxpr)) for x in (first, again)]
  if any(map(difference, first.consts, again.consts)) or texts[0] != texts[1]:
    look = "what `encode` draws or remembers in Python: take `key`, or `context`"
    found = "the second trace is another one"
    yield codec, "trace to the same program each time", found, look


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
  """Yields the names of the primitives in a program, and in those within it."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name.removesuffix("_invariant")
    for inner in functions(equation):
      yield from _primitives(inner)


@law(
  "codecs.Dense(dtype=jnp.bfloat16)",
  "products that jit adds without rounding them first",
)
def same_bits_without_jit(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Eager calls give the bits of compiled ones, and leave their inputs unchanged."""
  leaf = kit.leaf_of(codec, x)
  given = jnp.asarray(leaf)
  payload = kit.encode(codec, given, kit.KEY)
  value = kit.decode(codec, payload, given)
  wanted = kit.trial(codec, leaf)
  same = "give the same bits without jax.jit"
  yield codec, same, difference(np.asarray(payload.rows), wanted.payload.rows)
  yield codec, same, difference(value, wanted.value, bits=True)
  if given.is_deleted() or difference(given, leaf):
    yield codec, same, "the leaf has changed", "donated or mutated arguments"


@law("codecs.Natural()", "`encode`")
def batches_are_independent(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """``jax.vmap`` over leaves and keys is a loop over them."""
  leaves, keys = _pair(kit.leaf_of(codec, x))
  found = kit.batch(codec, leaves, keys)
  for i in range(2):
    alone = kit.trial(codec, leaves[i], keys[i]).payload.rows
    told = difference(found.rows[i], alone, of=f"the rows of leaf {i}")
    yield codec, "encode each leaf under jax.vmap as it encodes it alone", told


@law("codecs.OneBit()", "`encode_leaf`")
def sent_and_unsent_are_the_leaf(
  codec: LeafCodec, x: ArrayLike | None = None
) -> Findings:
  """The sent and the unsent part add up to the leaf, if encoding returns both."""
  leaves, keys = _pair(kit.leaf_of(codec, x))
  unsent = kit.batch(codec, leaves, keys).unsent
  if unsent is None:  # the exchange subtracts what it decodes
    return
  for i in range(2):
    # One subtraction: the sum of both parts is rounded once.
    wanted = leaves[i] - kit.trial(codec, leaves[i], keys[i]).value
    told = difference(unsent[i].reshape(wanted.shape), wanted)
    yield codec, "return x - decode(encode(x)) as the residual", told


def _pair(leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns two different leaves and two different keys."""
  return np.stack([leaf, 3 * leaf[::-1]]), np.stack([kit.KEY, kit.KEY + 1])


@law("codecs.QSGD(bits=4)", "`decode`, which has them from `like`")
def shapes_and_dtypes_return(codec: LeafCodec) -> Findings:
  """A leaf of any shape and float dtype decodes to its own, with x64 enabled too.

  Scalars, empty leaves and odd shapes are traced, and nothing is computed.
  """

  def both_ways(x: jax.Array) -> tuple[Payload, jax.Array]:
    payload = kit.encode(codec, x, kit.KEY)
    return payload, kit.decode(codec, payload, x)

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
  words = "encode to a Payload whose `rows` are uint32[rows, words]"
  if not isinstance(payload, Payload):
    yield codec, words, f"it encodes to {type(payload).__name__}", "`encode`"
  if payload.rows.dtype != jnp.uint32 or payload.rows.ndim != 2:
    yield codec, words, f"they are {described(payload.rows)}", "`encode`"
  agreed = payload.agreed
  if agreed is not None and agreed.dtype not in (jnp.float32, jnp.uint8):
    found = f"`agreed` is {described(agreed)}"
    yield codec, "have workers agree on float32 or uint8", found, "`encode`"


@law("codecs.OneBit()", "the dtype in which `encode` and `decode` compute")
def half_precision_is_computed_in_float32(codec: LeafCodec) -> Findings:
  """Leaves of half precision decode in their dtype, rounded once from float32."""
  shapes = {"bfloat16": ((), (3, 3, 8, 16)), "float16": ((1,), (5, 7))}
  cast = lambda x, kind: kit.gaussian(x).astype(jnp.dtype(kind))
  leaves = [cast(x, kind) for kind in shapes for x in shapes[kind]]

  @jax.jit
  def run(leaves: list[Any]) -> list[list[jax.Array]]:
    value = lambda x: kit.round_trip(codec, x)
    wide = lambda x: value(x.astype(jnp.float32)).astype(x.dtype)
    return [jax.tree.map(function, leaves) for function in (value, wide)]

  for found, wanted in zip(*run(leaves), strict=True):
    expected = f"decode {described(wanted)} as it decodes the same numbers of float32"
    yield codec, expected, difference(found, wanted)


@law("codecs.Ternary()", "`agree` and `encode`")
def payload_is_rows_of_words(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """A payload is ``uint32[rows, row_words]``, and the agreed numbers."""
  leaf = kit.leaf_of(codec, x)
  payload = kit.trial(codec, leaf).payload
  yield from _types(codec, payload)
  bound = codec.bind(Leaf(leaf.shape))
  rows, words = -(-leaf.size // bound.tile_size), bound.row_words
  if payload.rows.shape != (rows, words):
    claim = f"encode {described(leaf)} to the rows that `tile_size` and `row_words`"
    claim += f" claim, uint32[{rows},{words}]"
    found = f"the payload has {described(payload.rows)}, {payload.rows.nbytes} bytes in"
    found += f" place of {4 * rows * words}"
    yield codec, claim, found, "`row_words`, or what `encode` stacks"
  shared = jax.eval_shape(bound.agree, leaf)
  if (shared is None) != (payload.agreed is None):
    found = f"`agree` gives {shared} and the payload {payload.agreed}"
    agreed = "put into `payload.agreed` what workers agree on, and nothing else"
    yield codec, agreed, found
  if payload.agreed is not None and payload.agreed.shape[0] not in (1, rows):
    found = f"`agreed` is {described(payload.agreed)}"
    yield codec, f"agree on one line for all rows, or for each of {rows}", found


@law("codecs.EightBit(bucket_size=64)", "`decode_rows`, which may mix rows")
def rows_stand_alone(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Each row decodes to its own tile without the others, as shares of rows need."""
  found = kit.trial(codec, kit.leaf_of(codec, x))
  told = difference(found.alone, found.together, of="its tiles, [row, ...],")
  yield codec, "decode each row without the others", told


@law(
  "codecs.QSGD(bits=4)",
  "what fills the last tile in `encode`; if zeros would count as elements, its "
  "statistics are of the leaf's own, as CheckOptions(own_statistics=True) says",
)
def zeros_behind_change_nothing(
  codec: LeafCodec, x: ArrayLike | None = None
) -> Findings:
  """A leaf that ends within a tile has the payload of the leaf padded with zeros.

  It does not hold for statistics of the leaf's own elements, like means: for such
  codecs :func:`padding_never_leaks` does.
  """
  leaf = kit.leaf_of(codec, x)
  bound = codec.bind(Leaf(leaf.shape))
  tile, encode = bound.tile_size, jax.jit(lambda x: kit.encode(bound, x, kit.KEY))
  padded = encode(np.pad(leaf.reshape(-1), (0, -leaf.size % tile)))
  found = kit.trial(codec, leaf).payload
  whole = f"encode {described(leaf)} as with zeros behind it, to whole tiles of {tile}"
  for part, wanted in zip(*map(jax.tree.leaves, (found, padded)), strict=True):
    yield codec, whole, difference(part, wanted, of="its payload")


@law("codecs.QSGD(bits=4), workers=2", "`row_words`, and what `encode` returns")
def bytes_are_the_claim(
  codec: LeafCodec, x: ArrayLike | None = None, *, workers: int = 4
) -> Findings:
  """By :func:`gradcomp.explain`, ``all_gather`` sends N - 1 encoded payloads.

  Long payloads are filled to whole lanes of 128 words.
  """
  leaf = kit.leaf_of(codec, x)
  agreed = jax.eval_shape(codec.bind(Leaf(leaf.shape)).agree, leaf)
  nbytes = 4 * math.prod(form(kit.trial(codec, leaf).payload.rows.size))
  sent = (workers - 1) * nbytes
  if agreed is not None:
    sent += math.ceil(2 * (workers - 1) / workers * agreed.size * agreed.dtype.itemsize)
  tx = compress(codec, axis_name="data", exchange="all_gather", min_leaf_size=0)
  told = explain(tx, jnp.asarray(leaf), workers=workers)
  same = told.bytes_sent == sent + math.ceil(told.bytes_fitting)
  claim = f"send {workers - 1} payloads of {nbytes} bytes, {sent} together"
  found = f"gradcomp.explain reads {told.bytes_sent} from the trace"
  yield codec, claim, None if same else found
