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
from gradcomp._src.report.collectives import KINDS
from gradcomp._src.report.reader import functions
from gradcomp._src.testing.broken import Findings, difference, law
from gradcomp._src.testing.leaves import KEY, leaf_of
from gradcomp._src.testing.trial import batch, decode, encode, trial

# Of JAX's primitives, without the endings that they have in typed maps.
_COLLECTIVES = {"axis_index", "pbroadcast", "psum2", "ragged_all_to_all", *KINDS}


@law()
def is_a_value(codec: LeafCodec) -> Findings:
  """A codec is a frozen dataclass: hashable, equal to its copy, printable, no function.

  ``optax.inject_hyperparams`` would take a function for a schedule, and JAX compiles
  anew for each codec that is not equal to the last.

  Example:
    >>> gradcomp.testing.laws.is_a_value(gradcomp.codecs.QSGD(bits=4))
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


@law()
def facts_are_plain(codec: LeafCodec) -> Findings:
  """Facts are plain numbers that do not depend on a leaf's values.

  They are bools and positive integers, and a float from 0 to 1 for ``contraction``.

  Example:
    >>> gradcomp.testing.laws.facts_are_plain(gradcomp.codecs.TopK(density=0.1))
  """
  bound = codec.bind(Leaf(leaf_of(codec, None).shape))
  facts: list[tuple[str, Any, type[int]]] = [
    *((name, getattr(codec, name), bool) for name in ("unbiased", "needs_key")),
    *((x, getattr(bound, x), int) for x in ("tile_size", "row_words")),
  ]
  for name, value, kind in facts:
    plain = type(value) is kind and (kind is bool or value > 0)
    found = None if plain else f"it is {value!r} of {type(value).__name__}"
    sign = "" if kind is bool else "positive "
    expected = f"have a {sign}{kind.__name__} for `{name}`"
    yield codec, expected, found, f"the property `{name}`"
  share = codec.contraction
  found = None if type(share) is float and 0 <= share <= 1 else f"it is {share!r}"
  expected = "have a float from 0 to 1 for `contraction`"
  yield codec, expected, found, "the property `contraction`"


@law(look="`encode`")
def is_pure(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Encoding and decoding are pure: shapes from shapes, no collectives, no effects.

  They are traced twice to equal programs: tracing draws no random numbers.

  Example:
    >>> gradcomp.testing.laws.is_pure(gradcomp.codecs.Natural())
  """
  leaf = leaf_of(codec, x)
  alone = "encode and decode without collectives"

  def traced() -> ClosedJaxpr:  # a new function each time, because JAX caches traces
    both = lambda x, key: decode(codec, encode(codec, x, key), x)
    return jax.make_jaxpr(both)(leaf, KEY)

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
  changed = any(map(difference, first.consts, again.consts))
  if changed or _printed(first) != _printed(again):
    look = "what `encode` draws or remembers in Python: take `key`, or `context`"
    found = "the second trace is another one"
    yield codec, "trace to the same program each time", found, look


def _printed(program: ClosedJaxpr) -> str:
  """Returns a program without the addresses of kernels, which are parameters."""
  return re.sub(r" at 0x[0-9a-f]+", "", str(program.jaxpr))


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
  """Yields the names of the primitives in a program, and in those within it."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name.removesuffix("_invariant")
    for inner in functions(equation):
      yield from _primitives(inner)


@law(look="products that jit adds without rounding them first")
def same_bits_without_jit(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Eager calls give the bits of compiled ones, and leave their inputs unchanged.

  Example:
    >>> codec = gradcomp.codecs.Dense(dtype=jnp.bfloat16)
    >>> gradcomp.testing.laws.same_bits_without_jit(codec)
  """
  leaf = leaf_of(codec, x)
  given = jnp.asarray(leaf)
  payload = encode(codec, given, KEY)
  value = decode(codec, payload, given)
  wanted = trial(codec, leaf)
  same = "give the same bits without jax.jit"
  yield codec, same, difference(np.asarray(payload.rows), wanted.payload.rows)
  yield codec, same, difference(value, wanted.value, bits=True)
  if given.is_deleted() or difference(given, leaf):
    yield codec, same, "the leaf has changed", "donated or mutated arguments"


@law(look="`encode`")
def batches_are_independent(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """``jax.vmap`` over leaves and keys is a loop over them.

  Example:
    >>> gradcomp.testing.laws.batches_are_independent(gradcomp.codecs.Natural())
  """
  leaves, keys = _pair(leaf_of(codec, x))
  found = batch(codec, leaves, keys)
  for i in range(2):
    alone = trial(codec, leaves[i], keys[i]).payload.rows
    told = difference(found.rows[i], alone, of=f"the rows of leaf {i}")
    yield codec, "encode each leaf under jax.vmap as it encodes it alone", told


@law(look="`encode_leaf`")
def sent_and_unsent_are_the_leaf(
  codec: LeafCodec, x: ArrayLike | None = None
) -> Findings:
  """The sent and the unsent part add up to the leaf, if encoding returns both.

  Example:
    >>> gradcomp.testing.laws.sent_and_unsent_are_the_leaf(gradcomp.codecs.OneBit())
  """
  leaves, keys = _pair(leaf_of(codec, x))
  unsent = batch(codec, leaves, keys).unsent
  if unsent is None:  # the exchange subtracts what it decodes
    return
  for i in range(2):
    # One subtraction: the sum of both parts is rounded once.
    wanted = leaves[i] - trial(codec, leaves[i], keys[i]).value
    told = difference(unsent[i].reshape(wanted.shape), wanted)
    yield codec, "return x - decode(encode(x)) as the residual", told


def _pair(leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns two different leaves and two different keys."""
  return np.stack([leaf, 3 * leaf[::-1]]), np.stack([KEY, KEY + 1])
