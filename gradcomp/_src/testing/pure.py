"""Laws of codecs as values and as pure functions."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.testing.broken import BrokenLaw, difference
from gradcomp._src.testing.leaves import KEY, leaf_of
from gradcomp._src.testing.trial import batch, decode, encode, trial

# Of JAX's primitives, without the endings that they have in typed maps.
_COLLECTIVES = frozenset(
  "all_gather all_to_all axis_index pbroadcast pmax pmin ppermute psum psum2 "
  "ragged_all_to_all reduce_scatter".split()
)


def is_a_value(codec: LeafCodec) -> None:
  """A codec is a frozen dataclass: hashable, equal to its copy, printable, no function.

  Its fields are given by keyword. ``optax.inject_hyperparams`` would take a function
  for a schedule, and JAX compiles anew for each codec that is not equal to the last.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.is_a_value(gradcomp.codecs.QSGD(bits=4))
  """
  kind = type(codec).__name__

  def fail(expected: str, found: str, look: str) -> BrokenLaw:
    return BrokenLaw("is_a_value", kind, expected, found, look)

  parameters = getattr(type(codec), "__dataclass_params__", None)
  if parameters is None or not parameters.frozen:
    what = "no dataclass" if parameters is None else "not frozen"
    cure = "@dataclasses.dataclass(frozen=True, kw_only=True)"
    raise fail("be a frozen dataclass", f"it is {what}", cure)
  given: Any = codec
  for field in dataclasses.fields(given):
    if field.init and not field.kw_only:
      raise fail(
        "take its fields by keyword", f"`{field.name}` is positional", "kw_only=True"
      )
  try:
    number = hash(codec)
  except TypeError as error:
    raise fail(
      "be hashable", f"hash() says {error}", "fields that are lists, dicts or arrays"
    ) from error
  again = dataclasses.replace(given)
  if not (again == codec and hash(again) == number):
    raise fail("be equal to its copy, by == and hash", "it is not", "eq=True")
  if callable(codec):
    raise fail("not be callable", "it has __call__", "its methods")
  if not repr(codec).startswith(f"{kind}("):
    raise fail("print as its type and its fields", f"it is {codec!r}", "repr=True")


def facts_are_plain(codec: LeafCodec) -> None:
  """Facts are bools and positive integers that do not depend on a leaf's values.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.facts_are_plain(gradcomp.codecs.TopK(density=0.1))
  """
  facts: list[tuple[str, Any, type]] = [
    (f"`{name}`", getattr(codec, name), bool) for name in ("unbiased", "needs_key")
  ]
  shape = leaf_of(codec, None).shape
  for part in codec.bind(Leaf(shape)).rounds(shape):
    for name in ("tile_size", "row_words"):
      facts.append((f"`{name}`", getattr(part.codec, name), int))
  for name, value, kind in facts:
    positive = kind is bool or (isinstance(value, int) and value > 0)
    plain = positive and type(value) is kind
    if not plain:
      raise BrokenLaw(
        "facts_are_plain",
        codec,
        f"have a {'bool' if kind is bool else 'positive int'} for {name}",
        f"it is {value!r} of {type(value).__name__}",
        f"the property {name}",
      )


def is_pure(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """Encoding and decoding are pure: shapes from shapes, no collectives, no effects.

  They are traced twice to equal programs: tracing draws no random numbers.

  Args:
    codec: the codec.
    x: a leaf of the shape to try; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.is_pure(gradcomp.codecs.Natural())
  """
  leaf = leaf_of(codec, x)

  def fail(expected: str, found: str, look: str) -> BrokenLaw:
    return BrokenLaw("is_pure", codec, expected, found, look)

  def both(x: jax.Array, key: jax.Array) -> jax.Array:
    return decode(codec, encode(codec, x, key), x)

  try:
    # Two functions, because JAX caches traces.
    first, again = (
      jax.make_jaxpr(lambda x, key: both(x, key))(leaf, KEY) for _ in range(2)
    )
  except jax.errors.JAXTypeError as error:
    raise fail(
      "be traced with shapes alone",
      f"its values are asked for: {str(error).splitlines()[0]}",
      "Python's if, int() and NumPy's functions of a traced array",
    ) from error
  except NameError as error:
    if "axis" not in str(error):
      raise
    raise fail(
      "encode and decode without collectives",
      f"it asks for an axis of workers: {error}",
      "`agree`, whose results the exchange takes the largest of",
    ) from error
  if first.effects:
    raise fail("have no effects", f"it has {first.effects}", "callbacks and prints")
  found = sorted(_primitives(first.jaxpr) & _COLLECTIVES)
  if found:
    raise fail("encode and decode without collectives", f"it calls {found}", "`encode`")
  if _printed(first) != _printed(again) or any(
    difference(one, other)
    for one, other in zip(first.consts, again.consts, strict=True)
  ):
    raise fail(
      "trace to the same program each time",
      "the second trace is another one",
      "what `encode` draws or remembers in Python: take `key`, or `context`",
    )


def _printed(program: ClosedJaxpr) -> str:
  """Returns a program without the addresses of kernels, which are parameters."""
  return re.sub(r" at 0x[0-9a-f]+", "", str(program.jaxpr))


def _primitives(jaxpr: Jaxpr) -> set[str]:
  """Returns the names of the primitives in a program."""
  return {
    equation.primitive.name.removesuffix("_invariant") for equation in _equations(jaxpr)
  }


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for part in value if isinstance(value, tuple | list) else (value,):
        inner = part.jaxpr if isinstance(part, ClosedJaxpr) else part
        if isinstance(inner, Jaxpr):
          yield from _equations(inner)


def same_bits_without_jit(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """Eager calls give the bits of compiled ones, and leave their inputs unchanged.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.same_bits_without_jit(gradcomp.codecs.Dense(dtype=jnp.bfloat16))
  """
  leaf = leaf_of(codec, x)
  given = jnp.asarray(leaf)
  payload = encode(codec, given, KEY)
  value = decode(codec, payload, given)
  expected = trial(codec, leaf)
  look = "products that jit adds without rounding them first"
  told = difference(np.asarray(payload.rows), expected.payload.rows)
  if told is None and (other := difference(value, expected.value, bits=True)):
    told = other
  if told is None and (given.is_deleted() or difference(given, leaf)):
    told, look = "the leaf has changed", "donated or mutated arguments"
  if told:
    raise BrokenLaw(
      "same_bits_without_jit", codec, "give the same bits without jax.jit", told, look
    )


def batches_are_independent(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """``jax.vmap`` over leaves and keys is a loop over them.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.batches_are_independent(gradcomp.codecs.Natural())
  """
  leaves, keys = _pair(leaf_of(codec, x))
  found = batch(codec, leaves, keys)
  for i in range(2):
    alone = trial(codec, leaves[i], keys[i])
    if told := difference(found.rows[i], alone.payload.rows):
      raise BrokenLaw(
        "batches_are_independent",
        codec,
        "encode each leaf under jax.vmap as it encodes it alone",
        f"of the rows of leaf {i} {told}",
        "`encode`",
      )


def sent_and_unsent_are_the_leaf(codec: LeafCodec, x: ArrayLike | None = None) -> None:
  """The sent and the unsent part add up to the leaf, if encoding returns both.

  Args:
    codec: the codec.
    x: a leaf; by default one that ends within a tile.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.sent_and_unsent_are_the_leaf(gradcomp.codecs.OneBit())
  """
  leaves, keys = _pair(leaf_of(codec, x))
  unsent = batch(codec, leaves, keys).unsent
  if unsent is None:  # the exchange subtracts what it decodes
    return
  for i in range(2):
    # One subtraction: the sum of both parts is rounded once.
    expected = leaves[i] - trial(codec, leaves[i], keys[i]).value
    if told := difference(unsent[i].reshape(expected.shape), expected):
      raise BrokenLaw(
        "sent_and_unsent_are_the_leaf",
        codec,
        "return x - decode(encode(x)) as the residual",
        told,
        "`encode_leaf`",
      )


def _pair(leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns two different leaves and two different keys."""
  return np.stack([leaf, 3 * leaf[::-1]]), np.stack([KEY, KEY + 1])
