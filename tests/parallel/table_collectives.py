"""A table of collectives: programs for each codec, and for each place in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.cases.parallel import CODECS, KEY, mapped, numbers, with_gradient

N = 4
SHAPE = (3, 200)  # no whole rows
DRAWN = jax.random.wrap_key_data(np.array(KEY, np.uint32))
RING = [(0, 2), (2, 1), (1, 3), (3, 0)]
X, WEIGHTS = numbers(N, *SHAPE, seed=3), numbers(N, 3, 200 * N, seed=4)
OLD = 0.1 * numbers(N, 3, 200 * N, seed=5)

# Codecs, and whether a worker's own part is sent as it is, or as others get it.
FEW = ("bf16", "eight_bit_buckets", "qsgd8", "float_cast", "ternary", "natural")
EXACT = [(name, "exact") for name in FEW] + slow(
  *[(name, "exact") for name in CODECS if name not in FEW]
)
ROWS = EXACT + slow(*[(name, "coded") for name in CODECS])


def gathering(**options):
  """``(w, residual, cotangent) -> (whole, dw, new residual)`` of a gather."""

  def run(w, residual, cotangent):
    function = lambda w, e: parallel.gather(w, axis_name="data", residual=e, **options)
    whole, back = jax.vjp(function, w, residual)
    return whole, *back(cotangent)

  return run


@functools.cache
def run(name, own):
  """What collectives with a codec return, with the key ``KEY``, by their names."""
  codec = laws.here(CODECS[name])
  key = DRAWN if codec.needs_key else None
  options = dict(axis_name="data", codec=codec, key=key)
  axis = dict(axis=1, own=own)
  gather = lambda x: parallel.all_gather(x, **options, **axis)
  both = dict(params=codec, grads=laws.kept(codec), axis=1, key=key)

  def every(x, weights, old):
    return {
      "all_gather": with_gradient(gather, None)(x, weights),
      "psum_scatter": parallel.psum_scatter(weights, **options, **axis),
      "psum": parallel.psum(x, **options),
      "gather": gathering(**both)(x, old, weights),
    }

  return jax.tree.map(np.asarray, mapped("vmap", every, N)(X, WEIGHTS, OLD))


FLOATS = dict(axis_name="data", codec=Dense())
WHOLE = dict(axis=1, params=None, grads=None)
whole = lambda x: lax.all_gather(x, "data", axis=1, tiled=True)
# Our options, the collective of JAX, and the weights of the loss.
PAIRS = {
  "all_gather": (FLOATS | {"axis": 1}, whole, WEIGHTS),
  "psum_scatter": (
    FLOATS | {"axis": -1},
    lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
    X[:, :, :50],
  ),
  "all_to_all": (
    FLOATS | {"split_axis": 1, "concat_axis": 0},
    lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
    X.reshape(N, 12, 50),
  ),
  "ppermute": (
    FLOATS | {"perm": RING},
    lambda x: lax.ppermute(x, "data", RING),
    X[::-1],
  ),
  "gather": (WHOLE | {"axis_name": "data"}, whole, WEIGHTS),
}


@functools.cache
def plain(mode):
  """Values and gradients in float32: of ours and JAX's, and of what JAX has not.

  ``sum_gradients`` is a psum the other way round: the weights of a psum's loss, and the
  argument of ``sum_gradients``, are equal on all workers.
  """
  equal, z = WEIGHTS[0, :, :200], X + 1j * X[::-1]

  def every(x, weights, old, z, dz):
    found = {}
    for name, (options, theirs, _) in PAIRS.items():
      ours = functools.partial(getattr(parallel, name), **options)
      ways = [with_gradient(way, None) for way in (ours, theirs)]
      found[name] = [way(x, weights[name]) for way in ways]
    value, back = jax.vjp(whole, z)
    found["complex"] = (value, *back(dz))
    entry = lambda x: parallel.sum_gradients(x, **FLOATS)
    found["psum"] = with_gradient(lambda x: parallel.psum(x, **FLOATS), equal)(x)
    found["sum_gradients"] = with_gradient(entry, x)(jnp.asarray(equal))
    found["kept"] = gathering(**WHOLE)(x, old, weights["gather"])
    pairs = jnp.stack([old, old], -1)
    found["kept complex"] = gathering(**WHOLE | {"axis": -1})(z, pairs, dz)
    return found

  weights = {name: pair[2] for name, pair in PAIRS.items()}
  given = X, weights, OLD, z, WEIGHTS - 2j * WEIGHTS[::-1]
  return equal, jax.tree.map(np.asarray, mapped(mode, every, N)(*given))
