"""Tools of all laws: ``law`` that makes them, descriptions, leaves and encodings."""

import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from gradcomp._src.codecs.protocol import LeafCodec, payload_of
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Payload
from gradcomp._src.floats.dtypes import has_smaller_range

P = ParamSpec("P")
# What the subject must do, and a text of what it does instead, None or False where it
# holds. Then a place to look at, if it is not the law's.
Finding = tuple[str, object] | tuple[str, object, str]
Findings = Generator[Finding, None, None]
Transformation = optax.GradientTransformation
Gradients = Sequence[Any]  # trees with leaves [N, ...], one tree a step

# Words of the golden ratio and of a hash, because no bit of them is special. Of NumPy:
# an array of JAX would start a backend, before a process has joined others.
KEY = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)

SIZES = (0, 1, 2, 3, 31, 33, 127, 200)


class BrokenLaw(AssertionError):
  """A law that a codec or a transformation does not hold.

  Attributes:
    law: the name of the law, a function of ``gradcomp.testing.laws``.

  Example:
    >>> str(BrokenLaw("a_law", "Codec()", "be even", "7 is odd", "`encode`"))
    'a_law: Codec() must be even, but 7 is odd; look at `encode`.'
  """

  def __init__(self, law: str, subject: object, expected: str, found: str, look: str):
    super().__init__(f"{law}: {subject} must {expected}, but {found}; look at {look}.")
    self.law = law


def law(
  example: str, look: str
) -> Callable[[Callable[P, Findings]], Callable[P, None]]:
  """Makes a law of findings; it raises the first broken one, and names all errors."""

  def declared(function: Callable[P, Findings]) -> Callable[P, None]:
    name, signature = function.__name__, inspect.signature(function)

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> None:
      findings = function(*args, **kwargs)
      given = signature.bind(*args, **kwargs).arguments
      try:
        for expected, found, *elsewhere in findings:
          if found:
            subject = given.get("codec", "the transformation")  # of a run
            place = elsewhere[0] if elsewhere else look
            # In the law, so that a traceback shows its line, and the error that it saw.
            findings.throw(BrokenLaw(name, subject, expected, str(found), place))
      except BrokenLaw:
        raise
      except Exception as error:
        told = f"{name}: {error}"
        error.args = (told,)
        if str(error) != told:  # its text is not that of its arguments
          raise RuntimeError(f"{name}: {error!r}") from error
        raise

    own = signature.replace(return_annotation=None)
    held.__signature__ = own  # type: ignore[attr-defined]
    call = f"\n\n  Example:\n    >>> {name}(gradcomp.{example})\n  "
    held.__doc__ = (held.__doc__ or "").rstrip() + call
    return held

  return declared


def difference(
  got: Any, expected: Any, *, of: str = "", bits: bool = False
) -> str | None:
  """Describes the first element in which two arrays differ; None for equal ones."""
  # With `bits` zeros of both signs differ. All NaN are equal.
  got, expected = np.asarray(got), np.asarray(expected)
  of = of and f"of {of} "
  if (got.shape, got.dtype) != (expected.shape, expected.dtype):
    return f"{of}{described(got)} came in place of {described(expected)}"
  # Types of half precision are no floats for NumPy, but compare as such.
  same = (got == expected) | ((got != got) & (expected != expected))
  if bits and got.dtype.kind not in "iub":
    signs = (np.signbit(x.astype(np.float64)) for x in (got, expected))
    same &= np.equal(*signs) | (got != got)
  found = first_wrong(~same, got, expected, of=f" of {described(got)}")
  return found and of + found


def first_wrong(
  wrong: np.ndarray, got: np.ndarray, expected: np.ndarray, *, of: str = ""
) -> str | None:
  """Describes the first of the elements where ``wrong`` is True, and counts them."""
  wrong, got, expected = map(np.atleast_1d, (wrong, got, expected))
  if not wrong.any():
    return None
  at = tuple(np.argwhere(wrong)[0].tolist())
  what = f"element {list(at)}{of} is {got[at]} and not {expected[at]}"
  return f"{what} ({np.sum(wrong)} of {wrong.size} are wrong)"


def described(x: Any) -> str:
  """Returns the dtype and the shape of an array, like ``float32[3,4]``."""
  return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  others = map(jax.tree.leaves, trees)
  every = zip(jax.tree_util.tree_leaves_with_path(first), *others, strict=True)
  return [(jax.tree_util.keystr(path), x, *rest) for (path, x), *rest in every]


def gaussian(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Returns Gaussian numbers, ``float32``, equal for equal seeds."""
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def near_the_top(shape: tuple[int, ...], seed: int, dtype: DTypeLike) -> np.ndarray:
  """Returns gradients ``[N, ...]`` of equal signs; sums of three overflow the dtype."""
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], shape[1:])
  numbers = signs * rng.uniform(0.5, 0.95, shape) * float(jnp.finfo(dtype).max)
  return numbers.astype(dtype).astype(np.float32)


def gradients_like(params: Any, workers: int, seed: int = 0) -> Any:
  """Returns Gaussian gradients of all workers, leaves ``[N, ...]``.

  In dtypes with a smaller range than float32 they are near its end. Parameters are
  arrays, or their shapes and dtypes. Other seeds give other numbers.

  Example:
    >>> gradients_like({"w": jnp.zeros((2, 3))}, workers=4)["w"].shape
    (4, 2, 3)
  """
  numbers = itertools.count(1000 * seed)

  def make(x: jax.Array) -> jax.Array:
    given = (workers, *x.shape), next(numbers)
    small = jnp.issubdtype(x.dtype, jnp.floating) and has_smaller_range(x.dtype)
    found = near_the_top(*given, x.dtype) if small else gaussian(*given)
    return jnp.asarray(found.astype(x.dtype))

  return jax.tree.map(make, params)


def tile_of(codec: LeafCodec) -> int | None:
  """Returns the elements of a row; None if they depend on the leaf."""
  found = {codec.bind(Leaf(shape)).tile_size for shape in ((6, 13), (45, 46))}
  return found.pop() if len(found) == 1 else None


def leaf_of(codec: LeafCodec, x: ArrayLike | None = None) -> np.ndarray:
  """Returns the leaf; by default Gaussian, of two rows and a part of a third."""
  if x is not None:
    return np.asarray(x)
  tile = tile_of(codec)
  return gaussian((45, 46) if tile is None else (2 * tile + 77,))


def first_context(codec: LeafCodec, leaf: Leaf, key: ArrayLike = KEY) -> Context:
  """Returns the context of a leaf's codec in the first step of a worker."""
  memory = codec.bind(leaf).init(leaf, jnp.zeros(2, jnp.uint32))
  return Context(jnp.asarray(key), memory=memory, step=jnp.zeros([], jnp.int32))


def encode(
  codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY, context: Context | None = None
) -> Payload:
  """Encodes a leaf, by default with the context of a worker's first step."""
  leaf = Leaf(x.shape)
  given = (context or first_context(codec, leaf))._replace(key=jnp.asarray(key))
  return payload_of(codec.bind(leaf), x.astype(jnp.float32), given)


def decode(codec: LeafCodec, payload: Payload, like: jax.Array) -> jax.Array:
  return codec.bind(Leaf(like.shape)).decode(payload, like=like)


def round_trip(codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY) -> jax.Array:
  return decode(codec, encode(codec, x, key), x)


# By a smaller program than a trial's.
returned = jax.jit(round_trip, static_argnums=0)


class Trial(NamedTuple):
  """The encoding and the decodings of one leaf."""

  payload: Payload
  value: Any
  together: Any  # the tiles of its rows, decoded at once
  alone: Any  # each of them by itself


def trial(codec: LeafCodec, x: ArrayLike, key: ArrayLike = KEY) -> Trial:
  """Returns the trial of a leaf in NumPy's arrays, by a program compiled once."""
  return jax.tree.map(np.asarray, _trial(codec, x, key))


@functools.partial(jax.jit, static_argnums=0)
def _trial(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Trial:
  payload = encode(codec, x, key)
  rows, stats = payload
  lines = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(rows), x.shape[1])), stats)
  total = codec.bind(Leaf(x.shape)).sums
  tiles = lambda row, line: total.gathered(row[None], line, 1.0)(0, row.shape[0])
  alone = lambda row: tiles(*jax.tree.map(lambda part: part[None], row))[0]
  value = decode(codec, payload, x)
  return Trial(payload, value, tiles(rows, lines), jax.lax.map(alone, (rows, lines)))


@functools.partial(jax.jit, static_argnums=0)
def batch(codec: LeafCodec, x: jax.Array, keys: jax.Array) -> Encoded:
  """Encodes leaves ``[leaves, ...]`` by ``jax.vmap``."""
  leaf = Leaf(x.shape[1:])
  bound = codec.bind(leaf)

  def one(x: jax.Array, key: jax.Array) -> Encoded:
    given = first_context(codec, leaf, key)._replace(agreed=bound.agree(x))
    return bound.encode_leaf(x.astype(jnp.float32), given, keep=True)._replace(own=())

  return jax.vmap(one)(x, keys)
