"""Laws of errors: no bias, keys that decide, errors that cancel, and bounds."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec, decoded, from_tiles, tile_shape
from gradcomp._src.codecs.sums.records import Context, Leaf
from gradcomp._src.core.transform import compress
from gradcomp._src.kernels.common.dithers import dither
from gradcomp._src.testing import kit
from gradcomp._src.testing.kit import Findings, difference, law

__all__ = ["decoded_leaves_do_not_grow", "elements_draw_apart"]
__all__ += ["errors_are_contractions", "errors_of_workers_cancel"]
__all__ += ["key_decides_the_bits", "mean_is_the_leaf", "residuals_are_bounded"]
__all__ += ["workers_choose_alike"]

_DRAWS = 16  # keys, for the mean over random numbers
_SLACK = 1.05  # of a mean over that number of keys, and of short leaves
_Z = 5.0  # standard deviations
_ROWS = 4  # where elements draw apart; the last is cut short


@law("codecs.OneBit()", "`decode_rows`, the order and the scale; or `contraction`")
def errors_are_contractions(
  codec: LeafCodec, x: ArrayLike | None = None, *, most_error: float | None = None
) -> Findings:
  """A leaf loses no more of its energy than the codec states: ``1 - contraction``.

  The squared error over the squared length is tried on a Gaussian leaf, and on one with
  another magnitude at each position: the mean over 16 keys, if the codec draws, with 5
  % more allowed. ``most_error`` is the largest share, in place of ``1 - contraction``.
  An unbiased codec passes: :func:`mean_is_the_leaf` is its law.
  """
  if codec.unbiased:
    return
  leaf = kit.leaf_of(codec, x)
  stated = min(1.0, 1 - codec.bind(Leaf(leaf.shape)).contraction)
  most = stated if most_error is None else most_error
  for share, kind in zip(_sent(codec, leaf)[0], ("normal", "different"), strict=True):
    told = not share <= _SLACK * most + 1e-6 and f"it loses {share:.3g}"
    yield f"lose at most {most:.3g} of the energy of {kind} numbers", told


@law("codecs.OneBit()", "`decode_rows`, and the scale of what it returns")
def decoded_leaves_do_not_grow(
  codec: LeafCodec, x: ArrayLike | None = None, *, most: float = 0.005
) -> Findings:
  r"""A decoded leaf that is sent again does not become larger.

  With :math:`y = Q(x)` it is :math:`\langle y, Q(y) \rangle \le (1 + most) |y|^2`, for
  the normal leaf and the keys of :func:`errors_are_contractions`. An unbiased codec
  passes, by the same law as there.
  """
  if codec.unbiased:
    return
  _, (grown, _) = _sent(codec, kit.leaf_of(codec, x))
  expected = f"send decoded normal numbers again as at most {1 + most:.4g} of them"
  told = not grown <= 1 + most and f"they come back as {grown:.4g} of what they were"
  yield expected, told


def _sent(codec: LeafCodec, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the shares of energy that leaves lose, and the growth of decoded ones."""
  normal = kit.gaussian(leaf.shape)
  magnitudes = (1 + np.random.default_rng(1).permutation(leaf.size)) / max(leaf.size, 1)
  apart = np.copysign(magnitudes.astype(np.float32).reshape(leaf.shape), normal)
  keys = kit.KEY + np.arange(_DRAWS if codec.needs_key else 1, dtype="u4")[:, None]
  sums = np.asarray(_energies(codec, np.stack([normal, apart]), keys), np.float64)
  given, lost, sent, again = sums.mean(axis=0).T
  some = lambda x: np.where(x > 0, x, 1)
  return lost / some(given), np.where(sent > 0, again / some(sent), 1)


@functools.partial(jax.jit, static_argnums=0)
def _energies(codec: LeafCodec, both: jax.Array, keys: jax.Array) -> jax.Array:
  """Returns the energies of leaves, errors and decoded leaves, ``[keys, 2, 4]``."""

  def one(x: jax.Array, key: jax.Array) -> jax.Array:
    y = kit.round_trip(codec, x, key)
    again = jnp.vdot(y, kit.round_trip(codec, y, key ^ 1))
    return jnp.stack([jnp.vdot(x, x), jnp.sum((x - y) ** 2), jnp.vdot(y, y), again])

  return jax.lax.map(lambda key: jax.lax.map(lambda x: one(x, key), both), keys)


@law("codecs.OneBit(), steps=50", "`contraction`: the codec may lose too much for it")
def residuals_are_bounded(
  codec: LeafCodec, x: ArrayLike | None = None, *, steps: int = 200
) -> Findings:
  r"""Residuals of error feedback keep the bound that ``contraction`` gives, c.

  Of fresh normal gradients the energy of a residual is at most :math:`(1 - c) / c`
  times that of a gradient, and of equal gradients, too, if a codec is unbiased; else at
  most :math:`r^2 / (1 - r)^2` with :math:`r = \sqrt{1 - c}`. The law compares means
  over the last 10 steps, and allows a tenth more. A codec with a contraction of 0
  passes, because error feedback refuses it. By default gradients have the shape (64,
  128).
  """
  shape = (64, 128) if x is None else np.shape(x)
  c = codec.bind(Leaf(shape)).contraction
  if codec.contraction <= 0:
    return
  tx = compress(codec, exchange="local", feedback="error", min_leaf_size=0)

  @jax.jit
  def run(key: jax.Array) -> jax.Array:
    first = jax.random.normal(key, shape)

    def energies(fresh: jax.Array) -> jax.Array:
      def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        gradient = jnp.where(fresh, jax.random.normal(key, shape), first)
        _, state = tx.update(gradient, state)
        return state, jnp.sum(state.residual**2)

      return jax.lax.scan(step, tx.init(first), jax.random.split(key, steps))[1]

    return jax.lax.map(energies, jnp.array([True, False])) / jnp.sum(first**2)

  found = np.asarray(run(jax.random.key(0)), np.float64)[:, -10:].mean(axis=1)
  root = math.sqrt(1 - c)
  same = root**2 / (1 - root) ** 2 if c and not codec.unbiased else (1 - c) / c
  bounds = (("fresh", (1 - c) / c), ("equal", same))
  for energy, (kind, most) in zip(found, bounds, strict=True):
    expected = f"keep a residual of at most {most:.3g} times the energy of {kind}"
    expected += f" gradients, as a contraction of {c:.3g} says"
    told = not energy <= 1.1 * most + 1e-6 and f"it has {energy:.3g} times"
    yield expected, told


@law("codecs.Natural(), draws=200", "how `encode_rows` rounds, or the fact `unbiased`")
def mean_is_the_leaf(  # noqa: PLR0913 - options of users, by keyword
  codec: LeafCodec,
  x: ArrayLike | None = None,
  draws: int = 1000,
  *,
  mean: ArrayLike | None = None,
  step: ArrayLike | None = None,
  context: Context | None = None,
  workers: int = 0,
) -> Findings:
  """The mean of many encodings is the leaf: a z-test of an unbiased codec.

  For every element, ``|mean - x| <= z sigma / sqrt(draws)``, with ``z = 5``; and more
  sharply for the mean error of all elements, and of their magnitudes. With at most 10^4
  elements and the fixed keys a right codec fails with probability 6e-3. Between levels
  a step apart sigma <= step / 2; the grid of 16-bit dithers adds 2^-16 of a step.

  Args:
    x: a leaf; by default 500 Gaussian numbers, the last of them the first ones negated,
      so that most places of a bucket have both signs.
    draws: the number of keys.
    mean: the expected mean of a codec that clips, in place of the leaf.
    step: the steps between levels, of all elements or of each; by default twice the
      largest error.
    context: the context to encode with, by default that of the first step.
    workers: the number of masks to try, each without bias; 0 for none.
  """
  half = kit.gaussian(256)
  leaf = np.concatenate([half, -half])[:500] if x is None else np.asarray(x)

  @jax.jit
  def decoded_by(keys: jax.Array) -> jax.Array:
    x = jnp.asarray(leaf)
    own = context or kit.first_context(codec, Leaf(x.shape))

    def one(key: jax.Array, number: jax.Array) -> jax.Array:
      given = own._replace(dither=dither(key, number)) if workers else own
      return kit.decode(codec, kit.encode(codec, x, key, given), x)

    each = jax.vmap(one, (None, 0))
    return jax.lax.map(lambda key: each(key, jnp.arange(max(workers, 1))), keys)

  expected = f"be unbiased: its mean over {draws} keys is to be the leaf"
  found = np.asarray(decoded_by(_keys(draws)), np.float64)
  yield expected, not np.isfinite(found).all() and "some are not finite"
  if not found.size:
    return
  errors = found - (leaf if mean is None else np.asarray(mean))
  first, second = errors.mean(axis=0), np.square(errors).mean(axis=0)
  size = 2 * np.abs(errors).max(initial=0.0) if step is None else np.asarray(step)
  # An element that rounds up with a probability below about 1 / draws may never do so:
  # its sample sigma is then too small; one more draw of a step covers it.
  slack = (_Z * _Z / draws + 2.0**-16) * size
  bound = np.broadcast_to(_Z * np.sqrt(second / draws) + slack, first.shape)
  pooled = _Z * np.sqrt(second.sum() / draws) / first.size + 2.0**-16 * np.max(size)
  # The means are ``[masks, *leaf]``.
  i = int(np.argmax(np.abs(first) - bound))
  element = f"that of element {i % leaf.size}, {leaf.flat[i % leaf.size]},"
  shrunk = first * np.sign(leaf)
  biases = [(element, first.ravel()[i], bound.ravel()[i])]
  biases += [("the mean of all errors", first.mean(), pooled)]
  biases += [("the mean of magnitudes", shrunk.mean(), pooled)]
  for what, off, most in biases:
    told = f"{what} is off by {off:.3g}, where chance gives at most {most:.3g}"
    yield expected, not abs(off) <= most and told


def _keys(draws: int) -> jax.Array:
  words = np.arange(draws, dtype=np.uint32)
  return jnp.asarray(np.stack([np.full_like(words, kit.KEY[0]), words], axis=1))


@law("codecs.QSGD(bits=4)", "`encode`")
def key_decides_the_bits(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Equal keys give equal rows, and other keys give others."""
  leaf = kit.leaf_of(codec, x)
  rows = [kit.trial(codec, leaf, kit.KEY + i).payload.rows for i in (0, 0, 1)]
  yield "encode alike by one key", difference(rows[1], rows[0])
  differ = difference(rows[0], rows[2]) is not None
  expected = "draw by its key" if codec.needs_key else "draw nothing"
  told = f"another key gives {'other rows' if differ else 'the same rows'}"
  yield expected, differ != codec.needs_key and told, "the fact `needs_key`"


@law("codecs.RandomK(density=0.1)", "`encode`, which may choose by `key` alone")
def workers_choose_alike(codec: LeafCodec, x: ArrayLike | None = None) -> Findings:
  """Where payloads add up entry by entry, all workers send the same elements.

  It is for codecs whose sums have ``same_draws``, such as ``RandomK``: a key of all
  workers chooses the elements, for any values and masks of a worker.
  """
  leaf = kit.leaf_of(codec, x)
  total = codec.bind(Leaf(leaf.shape)).sums
  if not total.facts.same_draws:
    return

  @jax.jit
  def positions(x: jax.Array, worker: jax.Array) -> jax.Array | None:
    drawn = dither(jnp.asarray(kit.KEY), worker)
    context = kit.first_context(codec, Leaf(x.shape))._replace(dither=drawn)
    return total.sent_at(kit.encode(codec, x, kit.KEY, context).rows, x.size)

  both = [positions(y, i) for i, y in ((1, 1 - 2 * leaf), (0, leaf))]
  if both[0] is not None:
    told = difference(*map(np.sort, both), of="the positions of worker 1")
    yield "send the same elements from all workers, to be added by place", told


@law("codecs.QSGD(bits=4), most=0.51", "`context.dither[2]`, to be XORed with lanes")
def errors_of_workers_cancel(
  codec: LeafCodec, most: float = 1.0, *, workers: int = 8, size: int = 2**14
) -> Findings:
  """With shared dithers the error of the mean has at most the variance without.

  The law compares the squared error of the workers' sum with the sum of their squared
  errors: the ratio is 1 for independent errors, down to half for an even number of
  workers, and up to N if workers do not apply their masks. It allows five standard
  deviations more than ``most``, for Gaussian leaves. Only an unbiased codec that needs
  a key can break it.
  """
  facts = codec.bind(Leaf((size,))).facts
  if not codec.needs_key or not codec.unbiased or facts.same_draws:
    return
  x = kit.gaussian((workers, size))
  given: Any = {"exchange": "local", "feedback": None, "min_leaf_size": 0}
  tx = compress(codec, axis_name="data", **given)
  sent = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))(x)
  ratio, spread = variance_of_sums(np.asarray(sent, np.float64) - x, axis=0)
  expected = f"have errors whose sum over {workers} workers has at most {most} of"
  told = f"it has {ratio:.3f}, give or take {spread:.3f}"
  wrong = bool(ratio > most + _Z * spread)
  yield f"{expected} the variance of independent ones", wrong and told


def variance_of_sums(errors: np.ndarray, axis: int) -> tuple[float, float]:
  """Returns the mean square of sums over the sum of mean squares, and its deviation."""
  above, below = np.square(errors.sum(axis)), np.square(errors).sum(axis)
  ratio = float(above.sum() / below.sum()) if below.any() else 0.0
  spread = np.sqrt(np.square(above - ratio * below).sum()) / max(below.sum(), 1e-300)
  return ratio, float(spread)


@law("codecs.QSGD(bits=4)", "the shape that `encode_rows` draws for, and its lanes")
def elements_draw_apart(codec: LeafCodec, draws: int = 32) -> Findings:
  """No two elements round by the same random bits, in any row or plane.

  The law sends positive numbers, the same ones in every bucket, by ``draws`` keys, and
  adds up the errors of all buckets at one place, and of all elements of a bucket: the
  variance of a sum must be the sum of variances, to five standard deviations. A codec
  that needs no key passes, and one whose rows depend on the leaf.
  """
  tile = kit.tile_of(codec)
  if not codec.needs_key or tile is None:
    return
  size = _ROWS * tile
  bound: Any = codec.bind(Leaf((size,)))
  if bound.facts.same_draws:
    return
  width = tile_shape(bound)[-1]
  # In the tiles, where a codec rounds: one that rotates has other elements there.
  tiles = np.resize(np.abs(kit.gaussian(width)), (_ROWS, *tile_shape(bound)))
  like = jax.ShapeDtypeStruct((size - width // 2,), jnp.float32)
  x = jax.jit(lambda tiles: from_tiles(tiles, like, bound))(tiles)

  @jax.jit
  def sent(x: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.lax.map(lambda key: decoded(bound, kit.encode(codec, x, key)), keys)

  found = np.asarray(sent(x, _keys(draws)), np.float64)
  errors = (found - found.mean(axis=0)).reshape(draws, -1, width)
  for axis, these in ((1, "at one place of all buckets"), (2, "of a bucket")):
    ratio, spread = variance_of_sums(errors, axis)
    told = f"the errors {these} have a sum with {ratio:.3f} times the variance of"
    told += f" independent ones, give or take {spread:.3f}"
    duty = "draw for each element anew, so that errors are independent"
    yield duty, ratio > 1 + _Z * spread and told
