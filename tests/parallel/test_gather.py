"""Weights in shards of workers: shapes, axes of a mesh, and what is not finite.

What a gather sends and what it keeps is in ``test_gather_scatter``, and in loops of
layers in ``test_scan``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit, OneBit
from gradcomp.parallel import gather
from tests.parallel.table_collectives import gathering
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import assert_rounded, mapped, numbers

N = 4
EIGHT = laws.here(EightBit(bucket_size=32))
COARSE = laws.here(QSGD(bits=2, bucket_size=32, rounding="nearest"))
PLAIN = dict(params=None, grads=None)
RANDOM, ONE_BIT = map(laws.here, (QSGD(bits=4, bucket_size=32), OneBit(bucket_size=32)))


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_any_shape_and_dtype(mode):
  """Flat shards take all: fewer than N elements, primes, a scalar; half precision."""
  shapes = {(): np.float32, (3,): np.float32, (7, 11): jnp.bfloat16, (5,): np.float16}
  whole = [numbers(*shape).astype(dtype) for shape, dtype in shapes.items()]
  pad = lambda w: np.pad(w.reshape(-1), (0, -w.size % N)).reshape(N, -1)
  cut = [pad(w) for w in whole]

  def function(shards, weights):
    results = []
    for w, shape, x in zip(shards, shapes, weights, strict=True):
      residual = parallel.gather_residual(w, axis_name="data")
      loss = lambda w, e, shape=shape, x=x: jnp.sum(
        x * gather(w, axis_name="data", shape=shape, residual=e, **PLAIN)
      )
      y = gather(w, axis_name="data", shape=shape, params=EIGHT, grads=None)
      results.append((y, *jax.grad(loss, (0, 1))(w, residual)))
    return results

  found = mapped(mode, function, N)(cut, [np.stack([w] * N) for w in whole])
  near = lambda a, b: np.testing.assert_allclose(
    np.float32(a), np.float32(b), rtol=0.1, atol=0.1
  )
  for w, shard, (y, dw, new) in zip(whole, cut, jax.device_get(found), strict=True):
    assert y.dtype == dw.dtype == w.dtype and y.shape[1:] == w.shape
    assert_same_bits(y[1:], np.stack([y[0]] * (N - 1)))
    near(y[0], w)
    near(dw, N * np.float32(shard))  # zeros where nothing was
    assert new.dtype == np.float32 and new.shape == (N, shard.size)


@pytest.mark.parametrize("codec", [RANDOM, *slow(EIGHT, ONE_BIT)], ids=laws.name)
def test_a_nan_is_seen_by_its_owner_and_stays_out_of_residuals(codec):
  """Also one of the owner's own part."""
  w, old, cotangent = numbers(N, 64), numbers(N, 64 * N, seed=1), numbers(N, 64 * N)
  cotangent[1, 70 + 64] = np.nan  # of worker 2's part
  cotangent[3, 64 * 3 + 5] = np.inf  # its own
  options = dict(params=None, grads=codec, key=jax.random.key(0))
  _, dw, new = map(
    np.asarray, mapped("vmap", gathering(**options), N)(w, old, cotangent)
  )
  assert np.isnan(dw[2, :32]).all() and not np.isfinite(dw[3, 5])
  assert np.isfinite(dw[:2]).all() and np.isfinite(dw[2, 32:]).all()
  assert np.isfinite(new).all()
  assert_same_bits(new[1, 128:160], old[1, 128:160])
  assert new[3, 64 * 3 + 5] == old[3, 64 * 3 + 5]
  assert (new[2, :32] != old[2, :32]).all()


BOTH = P(("host", "chip"))
# By the axes of a gather: the spec of its shards. Those of chips differ between hosts
# by their type, or are equal, and JAX adds up their gradients where types are checked.
AXES = {"differ": P("chip"), "both": BOTH, "equal": P("chip")}


@pytest.mark.parametrize("check_vma", [True, False])
def test_axes_of_a_mesh(check_vma):
  """Over one of two, where gradients stay per host; and over both together."""
  mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), ("host", "chip"))
  w, x = numbers(8, 3), numbers(N, 8, 3)
  cases = [name for name in AXES if check_vma or name != "equal"]

  def grads(shards, residual, x):
    found = {}
    for name in cases:
      over = ("host", "chip") if name == "both" else "chip"
      options = dict(axis_name=over, params=None, grads=COARSE)
      loss = lambda w, e, given=options: jnp.sum(x[0] * gather(w, residual=e, **given))
      own = shards[name]
      if check_vma and name == "differ":
        own = jax.lax.pcast(own, "host", to="varying")
      found[name] = jax.grad(loss, (0, 1))(own, residual)
    return found

  specs = {name: AXES[name] for name in cases}
  out = {name: (P("chip") if name == "equal" else BOTH, BOTH) for name in cases}
  step = jax.shard_map(
    grads, mesh=mesh, in_specs=(specs, BOTH, BOTH), out_specs=out, check_vma=check_vma
  )
  given = dict.fromkeys(cases, w), np.zeros((N * 8, 3), np.float32), x
  found = jax.device_get(jax.jit(step)(*given))
  for name, (dw, new) in found.items():
    new = new.reshape(N, 8, 3)
    if name == "differ":  # [hosts, 8, 3]
      sums = new.reshape(2, 2, 8, 3).sum(1)
      assert_rounded(dw.reshape(2, 8, 3) + sums, x.reshape(2, 2, 8, 3).sum(1))
    else:
      assert_rounded(dw.reshape(8, 3) + new.sum(0), x.sum(0))
