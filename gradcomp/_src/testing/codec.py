"""Laws of codecs: values and pure functions, their payloads, and decoded numbers."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf, Payload
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import ExchangeName, as_exchange
from gradcomp._src.exchange.collectives import form
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.report.collectives import KINDS
from gradcomp._src.report.explain import explain
from gradcomp._src.testing import kit, modes
from gradcomp._src.testing.kit import Findings, described, difference, first_wrong, law

__all__ = ["batches_are_independent", "bytes_are_the_claim", "constants_are_exact"]
__all__ += ["facts_are_plain", "half_precision_is_computed_in_float32"]
__all__ += ["half_precision_keeps_its_range", "is_a_value", "is_pure"]
__all__ += ["large_numbers_keep_their_size", "non_finite_elements_are_seen"]
__all__ += ["odd_sizes_work", "padding_never_leaks", "payload_is_rows_of_words"]
__all__ += ["rows_stand_alone", "same_bits_without_jit", "sent_and_unsent_are_the_leaf"]
__all__ += ["shapes_and_dtypes_return", "tiny_numbers_stay_finite"]
__all__ += ["zeros_behind_change_nothing", "zeros_decode_to_zeros"]

Given = ArrayLike | None  # None for the default leaf

# Of JAX's primitives, without the endings that they have in typed maps.
_COLLECTIVES = {"axis_index", "pbroadcast", "psum2", "ragged_all_to_all", *KINDS}
_TINY = np.array([1e-45, -1e-41, 1.1754942e-38, -(2.0**-126), 2.0**-120, 0, -0.0], "f")
_UNIT = 2.0**-24  # the smallest number of float16
_TOP = float(jnp.finfo(jnp.float16).max)


@law("codecs.QSGD(bits=4)", "@dataclasses.dataclass(frozen=True, kw_only=True)")
def is_a_value(codec: LeafCodec) -> Findings:
  """A codec is a frozen dataclass: hashable, equal to its copy, printable, no function.

  ``optax.inject_hyperparams`` takes functions for schedules, and JAX compiles anew for
  each codec that differs.
  """
  given: Any = codec
  yield "be a dataclass", not dataclasses.is_dataclass(given) and "it is none"
  frozen = given.__dataclass_params__.frozen
  yield "be a frozen dataclass", not frozen and "it is not frozen"
  for field in dataclasses.fields(given):
    found = field.init and not field.kw_only and f"`{field.name}` is positional"
    yield "take its fields by keyword", found
  try:
    number = hash(codec)
  except TypeError as error:
    found = f"hash() says {error}"
    yield "be hashable", found, "fields that are lists, dicts or arrays"
  again = dataclasses.replace(given)
  other = not (again == codec and hash(again) == number)
  yield "be equal to its copy, by == and hash", other and "it is not", "eq=True"
  yield "not be callable", callable(codec) and "it has __call__", "its methods"
  plain = repr(codec).startswith(f"{type(codec).__name__}(")
  yield (
    "print as its type and its fields",
    not plain and f"it is {codec!r}",
    "repr=True",
  )


@law("codecs.TopK(density=0.1)", "its properties")
def facts_are_plain(codec: LeafCodec) -> Findings:
  """Facts are bools, positive integers, and a float from 0 to 1 for ``contraction``."""
  bound = codec.bind(Leaf(kit.leaf_of(codec).shape))
  flag, count = ("bool", 0, 1), ("positive int", 1, math.inf)
  share: tuple[str, float, float] = ("float from 0 to 1", 0, 1)
  own = {"unbiased": flag, "needs_key": flag, "contraction": share}
  facts = own | {"tile_size": count, "row_words": count}
  for name, (kind, least, most) in facts.items():
    value = getattr(codec if name in own else bound, name)
    plain = type(value).__name__ in kind.split() and least <= value <= most
    told = not plain and f"it is {value!r} of {type(value).__name__}"
    yield f"have a {kind} for `{name}`", told


@law("codecs.Natural()", "`encode`")
def is_pure(codec: LeafCodec, x: Given = None) -> Findings:
  """Encoding and decoding are pure: shapes from shapes, no collectives, no effects.

  They are traced twice to equal programs: tracing draws no random numbers.
  """
  leaf, alone = kit.leaf_of(codec, x), "encode and decode without collectives"

  def traced() -> ClosedJaxpr:  # a new function each time, because JAX caches traces
    return jax.make_jaxpr(lambda x, key: kit.round_trip(codec, x, key))(leaf, kit.KEY)

  try:
    first, again = traced(), traced()
  except jax.errors.JAXTypeError as error:
    found = f"its values are asked for: {str(error).splitlines()[0]}"
    look = "Python's if, int() and NumPy's functions of a traced array"
    yield "be traced with shapes alone", found, look
  except NameError as error:
    if "axis" not in str(error):
      raise
    look = "`agree`, whose results the exchange takes the largest of"
    yield alone, f"it asks for an axis of workers: {error}", look
  effects = bool(first.effects) and f"it has {first.effects}"
  yield "have no effects", effects, "callbacks and prints"
  # Without the addresses of kernels, which are parameters.
  texts = [re.sub(r" at 0x[0-9a-f]+", "", str(x.jaxpr)) for x in (first, again)]
  called = {x.removesuffix("_invariant") for x in re.findall(r" = (\w+)", texts[0])}
  called &= _COLLECTIVES
  yield alone, bool(called) and f"it calls {sorted(called)}"
  other = any(map(difference, first.consts, again.consts)) or texts[0] != texts[1]
  look = "what `encode` draws or remembers in Python: take `key`, or `context`"
  told = other and "the second trace is another one"
  yield "trace to the same program each time", told, look


@law("codecs.Dense(dtype=jnp.bfloat16)", "products that jit adds without rounding")
def same_bits_without_jit(codec: LeafCodec, x: Given = None) -> Findings:
  """Eager calls give the bits of compiled ones, and leave their inputs unchanged."""
  leaf, same = kit.leaf_of(codec, x), "give the same bits without jax.jit"
  given, wanted = jnp.asarray(leaf), kit.trial(codec, leaf)
  payload = kit.encode(codec, given)
  value = kit.decode(codec, payload, given)
  yield same, difference(payload.rows, wanted.payload.rows)
  yield same, difference(value, wanted.value, bits=True)
  changed = given.is_deleted() or bool(difference(given, leaf))
  yield same, changed and "the leaf has changed", "donated or mutated arguments"


@law("codecs.Natural()", "`encode`")
def batches_are_independent(codec: LeafCodec, x: Given = None) -> Findings:
  """``jax.vmap`` over leaves and keys is a loop over them."""
  leaves, keys = _pair(codec, x)
  found = kit.batch(codec, leaves, keys).rows
  for i, (own, leaf, key) in enumerate(zip(found, leaves, keys, strict=True)):
    alone = kit.trial(codec, leaf, key).payload.rows
    told = difference(own, alone, of=f"the rows of leaf {i}")
    yield "encode each leaf under jax.vmap as it encodes it alone", told


@law("codecs.OneBit()", "`encode_leaf`")
def sent_and_unsent_are_the_leaf(codec: LeafCodec, x: Given = None) -> Findings:
  """The sent and the unsent part add up to the leaf, if encoding returns both."""
  leaves, keys = _pair(codec, x)
  unsent = kit.batch(codec, leaves, keys).unsent
  if unsent is None:  # the exchange subtracts what it decodes
    return
  for own, leaf, key in zip(unsent, leaves, keys, strict=True):
    # One subtraction: the sum of both parts is rounded once.
    told = difference(own.reshape(leaf.shape), leaf - kit.trial(codec, leaf, key).value)
    yield "return x - decode(encode(x)) as the residual", told


def _pair(codec: LeafCodec, x: Given) -> tuple[np.ndarray, np.ndarray]:
  """Returns two different leaves and two different keys."""
  leaf = kit.leaf_of(codec, x)
  return np.stack([leaf, 3 * leaf[::-1]]), np.stack([kit.KEY, kit.KEY + 1])


@law("codecs.QSGD(bits=4)", "`encode`, and `decode`, which has them from `like`")
def shapes_and_dtypes_return(codec: LeafCodec) -> Findings:
  """A leaf of any shape and float dtype decodes to its own, with x64 enabled too.

  Scalars, empty leaves and odd shapes are traced, and nothing is computed.
  """

  def both_ways(x: jax.Array) -> tuple[Payload, jax.Array]:
    payload = kit.encode(codec, x)
    return payload, kit.decode(codec, payload, x)

  whole, half = jnp.float32, jnp.bfloat16
  words = "encode to a Payload whose `rows` are uint32[rows, words]"
  for shape, dtype, x64 in (((), whole, 0), ((0, 3), whole, 1), ((5, 7), half, 1)):
    like = jax.ShapeDtypeStruct(shape, dtype)
    with jax.enable_x64(bool(x64)):
      payload, value = jax.eval_shape(both_ways, like)
    other = (value.shape, value.dtype) != (shape, dtype)
    expected = f"decode a leaf {described(like)} to its own shape and dtype"
    yield expected, other and f"it decodes to {described(value)}"
    other = not isinstance(payload, Payload)
    yield words, other and f"it encodes to {type(payload).__name__}"
    rows, agreed = payload
    other = rows.dtype != jnp.uint32 or rows.ndim != 2
    yield words, other and f"they are {described(rows)}"
    other = agreed is not None and agreed.dtype not in (jnp.float32, jnp.uint8)
    told = other and f"`agreed` is {described(agreed)}"
    yield "have workers agree on float32 or uint8", told


@law("codecs.OneBit()", "the dtype in which `encode` and `decode` compute")
def half_precision_is_computed_in_float32(codec: LeafCodec) -> Findings:
  """Leaves of half precision decode in their dtype, rounded once from float32."""
  leaves = [kit.gaussian(x).astype(jnp.bfloat16) for x in ((), (3, 3, 8, 16))]
  leaves += [kit.gaussian(x).astype(jnp.float16) for x in (1, (5, 7))]
  value = lambda x: kit.round_trip(codec, x)
  wide = lambda x: value(x.astype(jnp.float32)).astype(x.dtype)
  for found, wanted in jax.jit(lambda xs: [(value(x), wide(x)) for x in xs])(leaves):
    expected = f"decode {described(wanted)} as it decodes the same numbers of float32"
    yield expected, difference(found, wanted)


@law("codecs.Ternary()", "`agree` and `encode`")
def payload_is_rows_of_words(codec: LeafCodec, x: Given = None) -> Findings:
  """A payload is ``uint32[rows, row_words]``, and the agreed numbers."""
  leaf = kit.leaf_of(codec, x)
  bound, (sent, agreed) = codec.bind(Leaf(leaf.shape)), kit.trial(codec, leaf).payload
  rows, words = -(-leaf.size // bound.tile_size), bound.row_words
  claim = f"encode {described(leaf)} to the rows that `tile_size` and `row_words`"
  claim += f" claim, uint32[{rows},{words}]"
  told = f"the payload has {described(sent)}, {sent.nbytes} bytes in"
  told += f" place of {4 * rows * words}"
  other = (sent.shape, sent.dtype) != ((rows, words), np.uint32)
  yield claim, other and told, "`row_words`, or what `encode` stacks"
  other = agreed is not None and agreed.dtype not in (jnp.float32, jnp.uint8)
  yield "have workers agree on float32 or uint8", other and described(agreed)
  shared = jax.eval_shape(bound.agree, leaf)
  told = f"`agree` gives {shared} and the payload {agreed}"
  other = (shared is None) != (agreed is None)
  yield "put what workers agree on, and nothing else, into `agreed`", other and told
  other = agreed is not None and len(agreed) not in (1, rows)
  claim = f"agree on one line for all rows, or for each of {rows}"
  yield claim, other and f"`agreed` is {described(agreed)}"


@law("codecs.EightBit(bucket_size=64)", "`decode_rows`, which may mix rows")
def rows_stand_alone(codec: LeafCodec, x: Given = None) -> Findings:
  """Each row decodes to its own tile without the others, as shares of rows need."""
  found = kit.trial(codec, kit.leaf_of(codec, x))
  told = difference(found.alone, found.together, of="its tiles, [row, ...],")
  yield "decode each row without the others", told


@law("codecs.QSGD(bits=4), workers=2", "`row_words`, and what `encode` returns")
def bytes_are_the_claim(
  codec: LeafCodec, x: Given = None, *, workers: int = 4
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
  other = told.bytes_sent != sent + math.ceil(told.bytes_fitting)
  claim = f"send {workers - 1} payloads of {nbytes} bytes, {sent} together"
  yield claim, other and f"gradcomp.explain reads {told.bytes_sent} from the trace"


@law("codecs.OneBit()", "`encode_rows` and `decode_rows` for a bucket whose scale is 0")
def zeros_decode_to_zeros(codec: LeafCodec, x: Given = None) -> Findings:
  """A leaf of zeros decodes to zeros, which fill up rows."""
  zeros = np.zeros_like(kit.leaf_of(codec, x))
  value = kit.trial(codec, zeros).value
  yield "decode a leaf of zeros to zeros", difference(value, zeros)


@law("codecs.QSGD(bits=4), (1.0, 3e38)", "the largest level of a bucket, and its scale")
def constants_are_exact(
  codec: LeafCodec, values: tuple[float, ...], x: Given = None
) -> Findings:
  """A leaf of one value decodes exactly, for ``values`` that a codec is exact for."""
  for value in values:
    constant = np.full_like(kit.leaf_of(codec, x), value, np.float32)
    found = kit.trial(codec, constant).value
    yield f"decode a leaf of {value} alone to {value}", difference(found, constant)


@law("codecs.EightBit()", "the division by a scale")
def tiny_numbers_stay_finite(codec: LeafCodec, x: Given = None) -> Findings:
  """Subnormal numbers decode to finite ones of at most 1, never to NaN."""
  # A scale that underflows, or its reciprocal that overflows, would spoil a bucket.
  shape = kit.leaf_of(codec, x).shape
  for leaf in (np.resize(_TINY, shape), np.full(shape, np.float32(1e-40))):
    value = kit.trial(codec, leaf).value
    # NaN is not at most 1 either.
    found = first_wrong(~(np.abs(value) <= 1), value, leaf)
    yield "decode subnormal numbers to finite ones of at most 1", found


@law("codecs.QSGD(bits=4), bad=np.inf", "what `encode_rows` makes of inf and NaN")
def non_finite_elements_are_seen(
  codec: LeafCodec,
  x: Given = None,
  bad: float = np.nan,
  *,
  spoils: int | str | None = "any",
  unclipped: LeafCodec | None = None,
) -> Findings:
  """A NaN or an infinity decodes to one, never to a number; the rest stays.

  Args:
    x: a finite leaf.
    bad: the new value of one of its elements: NaN or an infinity.
    spoils: the elements that are not finite then; all others must keep their bits.
      ``"any"``: some in the element's row, and any others. The number of consecutive
      elements that all become NaN; None for the whole leaf, ``"column"`` for its
      column. ``"itself"``: only it, with its own value. ``"sent"``: it is sent as it
      is, and may displace others. ``"row"``: some sent elements of its row.
    unclipped: the codec for the rest of a leaf that is not finite, if another.
  """
  leaf = kit.leaf_of(codec, x)
  position, dirty = leaf.size // 2, leaf.copy()
  dirty.flat[position] = bad
  found, clean = (kit.trial(codec, given).value.ravel() for given in (dirty, leaf))
  if unclipped is not None:
    clean = np.asarray(kit.returned(unclipped, leaf)).ravel()
  at, index = found[position], np.arange(leaf.size)
  sizes: dict[Any, int] = {None: leaf.size, "itself": 1}
  row = sizes.get(spoils, codec.bind(Leaf(leaf.shape)).tile_size)
  number = index // (spoils if isinstance(spoils, int) else row)
  if spoils == "column":
    number = index % (leaf.size // leaf.shape[0])
  spoiled, unseen = number == number[position], None
  if spoils in ("itself", "sent"):
    if not (at == bad or (at != at and bad != bad)):
      unseen = f"element {position} became {at}"
  elif spoils in ("any", "row"):
    if np.isfinite(found[spoiled]).all():
      unseen = f"element {position} became {at}, and its row is finite"
  else:
    unseen = first_wrong(spoiled & ~np.isnan(found), found, np.full_like(found, np.nan))
    unseen = unseen and f"in the same bucket {unseen}"
  yield f"never replace {bad} by a number", unseen
  kept = (found == clean) | ((found != found) & (clean != clean))
  if spoils == "any":
    spoiled = spoiled | ~np.isfinite(found)
  elif spoils == "sent":
    # It may take the place of others. These are sent, in 16 bits or more, or zero.
    near = np.abs(found - leaf.ravel()) <= 2.0**-8 * np.abs(leaf.ravel())
    kept |= spoiled & (near | (found == 0))
    spoiled = index == position
  changed = first_wrong(~kept & ~spoiled, found, clean)
  yield f"leave what {bad} at {position} does not spoil as it is", changed


@law("codecs.OneBit(), sizes=(0, 33)", "the last row, which a leaf does not fill")
def odd_sizes_work(codec: LeafCodec, sizes: Sequence[int] = kit.SIZES) -> Findings:
  """Leaves of any size decode to finite numbers in their shape; zeros to zeros."""
  tried = [kit.gaussian(size, seed=size) for size in sizes]
  zeros = [np.zeros_like(leaf) for leaf in tried]
  run = jax.jit(lambda tried: [kit.round_trip(codec, x) for x in tried])
  for leaf, value, zero in zip(zeros, run(tried), run(zeros), strict=True):
    expected = f"decode a leaf of {leaf.size} elements to as many finite ones"
    other = value.shape != leaf.shape
    yield expected, other and f"it becomes {described(value)}"
    yield expected, not np.isfinite(value).all() and f"it becomes {value}"
    yield expected, difference(zero, leaf, of="as many zeros")


@law("codecs.OneBit()", "what fills the last row in `encode`, and which elements count")
def padding_never_leaks(codec: LeafCodec) -> Findings:
  """A leaf that ends within a row has no larger error for it.

  If a codec is exact for leaves of one magnitude that fill rows, it is exact where they
  end within a row: padding counts in no scale and no mean.
  """
  tile = kit.tile_of(codec)
  if tile is None:  # rows are as long as the leaf
    return
  decoded = lambda x: np.asarray(kit.returned(codec, x))
  # Sums of the first are exact, and the others are no fractions of any padding.
  for value, sign in ((0.125, 1), (0.125, -1), (0.3, 1), (-3.1, 1)):
    whole = np.full(2 * tile, value, np.float32)
    whole[1::2] *= sign
    if difference(decoded(whole), whole):
      continue
    short = whole[: tile + tile // 3 + 1]
    found = decoded(short)
    wrong = difference(found, short)
    # A codec that rotates a leaf together with the zeros after it has the same bits if
    # they are elements, and elements that it changes are not smaller on average. A mean
    # in which zeros count is: by a third or more, where a row or a bucket is filled to
    # two thirds at most.
    padded = np.pad(short, (0, whole.size - short.size))
    if wrong and not difference(found, decoded(padded)[: short.size]):
      other = found != short
      if abs(np.mean(found[other] / short[other]) - 1) <= 0.25:
        continue
    expected = f"decode {short.size} elements of one magnitude as exactly as"
    yield f"{expected} {whole.size}, which fill rows of {tile}", wrong


@law("codecs.QSGD(bits=4)", "what fills the last row, or CheckOptions.own_statistics")
def zeros_behind_change_nothing(codec: LeafCodec, x: Given = None) -> Findings:
  """A leaf that ends within a tile has the payload of the leaf padded with zeros.

  It does not hold for statistics of the leaf's own elements, like means: for such
  codecs :func:`padding_never_leaks` does.
  """
  leaf = kit.leaf_of(codec, x)
  bound = codec.bind(Leaf(leaf.shape))
  tile, encode = bound.tile_size, jax.jit(lambda x: kit.encode(bound, x))
  padded = encode(np.pad(leaf.reshape(-1), (0, -leaf.size % tile)))
  found = kit.trial(codec, leaf).payload
  whole = f"encode {described(leaf)} as with zeros behind it, to whole tiles of {tile}"
  for part, wanted in zip(*map(jax.tree.leaves, (found, padded)), strict=True):
    yield whole, difference(part, wanted, of="its payload")


@law("codecs.QSGD(bits=4)", "`largest`, and bounds that numbers are cut to")
def large_numbers_keep_their_size(codec: LeafCodec) -> Findings:
  """A leaf times a power of two decodes to that power of two times the decoded leaf.

  This holds to a hundredth of the largest number, for 2^12, and for 2^40 with float32
  numbers in rows.
  """
  x = kit.leaf_of(codec)
  sent = lambda scale: np.float64(kit.trial(codec, x * np.float32(scale)).value) / scale
  expected = sent(1)
  for power in (12,) if codec.bind(Leaf(x.shape)).largest else (12, 40):
    found = sent(2.0**power)
    wrong = ~(np.abs(found - expected) <= 0.01 * np.abs(x).max())
    told = first_wrong(wrong, found, expected, of=f", over 2^{power},")
    yield f"send 2^{power} x as 2^{power} times what it sends of x", told


@law('codecs.Dense(), "two_shot"', "`largest`, and casts without a scale")
def half_precision_keeps_its_range(
  codec: LeafCodec, exchange: ExchangeName | Exchange = "ring", *, workers: int = 4
) -> Findings:
  """A mean of float16 gradients is right near the largest number, and the smallest.

  Unlike the mean, a sum of N addends may overflow, and an Nth of one underflow. The
  mean must follow gradients multiplied by a power of two, to a hundredth of the
  largest, plus the smallest number of float16. Too large means are the largest number.
  """
  given: Any = {"exchange": exchange, "feedback": None, "min_leaf_size": 0}
  tx = compress(codec, axis_name="data", **given)
  shape = (workers, *kit.leaf_of(codec).shape)
  run = lambda x: modes.run("vmap", tx, [np.float16(x)])
  mean = lambda x: np.asarray(run(x).outputs[0], np.float64)[0]
  top = kit.near_the_top(shape, 0, jnp.float16)
  # The workers agree, so that no rounding on the way changes what a codec selects.
  units = np.random.default_rng(0).integers(-8, 9, shape[1:]) * _UNIT
  units = np.broadcast_to(units, shape)
  way = f"over {as_exchange(exchange).name} with {workers} workers"
  for given, power, place in ((top, 2.0**-8, "top"), (units, 2.0**18, "smallest")):
    expected, found = mean(given * power) / power, mean(given)
    bound = 0.01 * np.abs(given).max() + _UNIT
    wrong = ~(np.abs(found - np.clip(expected, -_TOP, _TOP)) <= bound)
    duty = f"send float16 gradients near the {place} number as it sends others, {way}"
    yield duty, first_wrong(wrong, found, expected, of=" of the mean")
