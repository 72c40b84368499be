"""Laws of errors: contractions, residuals that they bound, and no growth."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core.transform import compress
from gradcomp._src.testing import leaves
from gradcomp._src.testing.broken import Findings, law
from gradcomp._src.testing.trial import round_trip

_DRAWS = 16  # keys, for the mean over random numbers
_SLACK = 1.05  # of a mean over as many keys as that, and of leaves as short as these


@law(look="`decode_rows`, and the order and the scale of elements; or `contraction`")
def errors_are_contractions(
  codec: LeafCodec, x: ArrayLike | None = None, *, most_error: float | None = None
) -> Findings:
  """A leaf loses no more of its energy than the codec states: ``1 - contraction``.

  The squared error over the squared length is tried on a Gaussian leaf, and on one with
  another magnitude at each position. It is the mean over 16 keys, if the codec draws,
  and 5 % more are allowed. An unbiased codec passes: its contraction is of residuals
  alone, and :func:`mean_is_the_leaf` is its law.

  Args:
    codec: the codec.
    x: a leaf of the shape to try.
    most_error: the largest share, in place of ``1 - contraction``.

  Example:
    >>> gradcomp.testing.laws.errors_are_contractions(gradcomp.codecs.OneBit())
  """
  if codec.unbiased:
    return
  both = _leaves(codec, x)
  stated = 1 - codec.bind(Leaf(both.shape[1:])).contraction
  most = min(1.0, stated) if most_error is None else most_error
  lost, _ = _sent(codec, both)
  for share, kind in zip(lost, ("normal", "different"), strict=True):
    told = None if share <= _SLACK * most + 1e-6 else f"it loses {share:.3g}"
    yield codec, f"lose at most {most:.3g} of the energy of {kind} numbers", told


@law(look="`decode_rows`, and the scale of what it returns")
def decoded_leaves_do_not_grow(
  codec: LeafCodec, x: ArrayLike | None = None, *, most: float = 0.005
) -> Findings:
  r"""A decoded leaf that is sent again does not become larger.

  With :math:`y = Q(x)` it is :math:`\langle y, Q(y) \rangle \le (1 + most) |y|^2`,
  for the normal leaf and the keys of :func:`errors_are_contractions`. A codec whose
  levels y has sends y as it is, and one that shortens a leaf shortens y. An unbiased
  codec passes, by the same law as there.

  Example:
    >>> gradcomp.testing.laws.decoded_leaves_do_not_grow(gradcomp.codecs.OneBit())
  """
  if codec.unbiased:
    return
  _, (grown, _) = _sent(codec, _leaves(codec, x))
  seen = f"they come back as {grown:.4g} of what they were"
  expected = f"send decoded normal numbers again as at most {1 + most:.4g} of them"
  yield codec, expected, None if grown <= 1 + most else seen


def _leaves(codec: LeafCodec, x: ArrayLike | None) -> np.ndarray:
  """Returns a Gaussian leaf, and one with another magnitude at each position."""
  shape = leaves.leaf_of(codec, x).shape
  normal, size = leaves.gaussian(shape), math.prod(shape)
  magnitudes = (1 + np.random.default_rng(1).permutation(size)) / max(size, 1)
  apart = np.copysign(magnitudes.astype(np.float32).reshape(shape), normal)
  return np.stack([normal, apart])


def _sent(codec: LeafCodec, both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the share of energy that leaves lose, and the growth of decoded ones."""
  count = np.arange(_DRAWS if codec.needs_key else 1, dtype=np.uint32)
  keys = np.stack([leaves.KEY[0] + count, leaves.KEY[1] + count], axis=1)
  sums = np.asarray(_energies(codec, both, keys), np.float64).mean(axis=0)
  given, lost, sent, again = sums.T
  some = lambda x: np.where(x > 0, x, 1)
  return lost / some(given), np.where(sent > 0, again / some(sent), 1)


@functools.partial(jax.jit, static_argnums=0)
def _energies(codec: LeafCodec, both: jax.Array, keys: jax.Array) -> jax.Array:
  """Returns the energies of leaves, errors and decoded leaves, ``[keys, 2, 4]``."""

  def one(x: jax.Array, key: jax.Array) -> jax.Array:
    y = round_trip(codec, x, key)
    again = jnp.vdot(y, round_trip(codec, y, key ^ 1))
    return jnp.stack([jnp.vdot(x, x), jnp.sum((x - y) ** 2), jnp.vdot(y, y), again])

  each = lambda key: jax.lax.map(lambda x: one(x, key), both)
  return jax.lax.map(each, keys)


@law(look="`contraction`, for which the codec may lose too much")
def residuals_are_bounded(
  codec: LeafCodec, x: ArrayLike | None = None, *, steps: int = 200
) -> Findings:
  r"""Residuals of error feedback keep the bound that ``contraction`` gives, c.

  Of fresh normal gradients the energy of a residual is at most :math:`(1 - c) / c`
  times that of a gradient, and so is it of one gradient again and again, if a codec is
  unbiased. Of a biased one it is at most :math:`r^2 / (1 - r)^2` with :math:`r =
  \sqrt{1 - c}`. The law compares means over the last 10 steps, and allows a tenth more.
  A codec with a contraction of 0 passes, because error feedback refuses it.

  Args:
    codec: the codec.
    x: a leaf of the shape of the gradients, by default (64, 128).
    steps: how often gradients are sent.

  Example:
    >>> codec = gradcomp.codecs.OneBit()
    >>> gradcomp.testing.laws.residuals_are_bounded(codec, steps=50)
  """
  shape = (64, 128) if x is None else np.shape(x)
  c = codec.bind(Leaf(shape)).contraction
  if codec.contraction <= 0:
    return
  given: Any = {"exchange": "local", "feedback": "error", "min_leaf_size": 0}
  tx = compress(codec, **given)

  @jax.jit
  def run(key: jax.Array) -> jax.Array:
    first = jax.random.normal(key, shape)

    def energies(fresh: jax.Array) -> jax.Array:
      def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        gradient = jnp.where(fresh, jax.random.normal(key, shape), first)
        _, state = tx.update(gradient, state)
        return state, jnp.sum(state.residual**2)

      return jax.lax.scan(step, tx.init(first), jax.random.split(key, steps))[1]

    fresh = jnp.array([True, False])
    return jax.lax.map(energies, fresh) / jnp.sum(first**2)

  found = np.asarray(run(jax.random.key(0)), np.float64)[:, -10:].mean(axis=1)
  root = math.sqrt(1 - c)
  same = root**2 / (1 - root) ** 2 if c and not codec.unbiased else (1 - c) / c
  for energy, most, kind in zip(
    found, ((1 - c) / c, same), ("fresh", "equal"), strict=True
  ):
    seen = f"it has {energy:.3g} times"
    expected = f"keep a residual of at most {most:.3g} times the energy of {kind}"
    expected += f" gradients, as a contraction of {c:.3g} says"
    yield codec, expected, None if energy <= 1.1 * most + 1e-6 else seen
