"""What scan takes beside layers, and maps over whole models around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import mapped, numbers
from tests.support.cases.scan import whole

N = 4
PLAIN = dict(axis_name="data", codec=Dense())
LAYER = lambda x, w: (x @ w, None)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
@pytest.mark.parametrize("mode", ["shard_map", "vmap"])
def test_all_that_a_scan_may_take(mode, policy):
  """Carries of several kinds, outputs, keys a layer, and arrays that a body reads.

  All are as with ``lax.scan``, and so are the gradients of what is not exchanged.
  """
  layers, x, own = numbers(3, 8, 8), numbers(N, 2, 8), numbers(N, 8)
  keys = jax.random.split(jax.random.key(0), 3)

  def loss(scan, layers, x, own):
    rows = jnp.arange(2)

    def body(carry, layer):
      x, number = carry
      w, key = layer
      noise = jax.random.normal(key, (8,))
      x = jnp.sin(x @ w + own * noise) * (rows[:, None] + number)
      return (x, number + 1), {"x": x, "number": number}

    (x, number), ys = scan(body, (x, jnp.int32(1)), (layers, keys))
    return jnp.mean(x) + jnp.mean(ys["x"] ** 2), (x, number, ys)

  def both(x, own):
    ours = lambda *given: parallel.scan(*given, policy=policy, **PLAIN)
    grad = lambda scan: jax.grad(
      lambda *given: loss(scan, *given), (0, 1, 2), has_aux=True
    )
    shared = jnp.asarray(layers)
    theirs, aux = grad(lax.scan)(varying(shared), x, own)
    got, found = grad(ours)(shared, x, own)
    plain, _ = ours(lambda x, w: (x @ w, None), x, shared), None
    want = lax.scan(lambda x, w: (x @ w, None), x, varying(shared))
    return got, (lax.pmean(theirs[0], "data"), *theirs[1:]), (found, aux), (plain, want)

  def varying(x):
    return lax.pcast(x, "data", to="varying") if mode == "shard_map" else x

  got, want, values, plain = mapped(mode, both, N)(x, own)
  assert_same_bits(values[0], values[1])
  assert_same_bits(plain[0], plain[1])
  for ours, theirs in zip(got, want, strict=True):
    # The two programs compute the products of a layer in orders of their own.
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_several_models_are_mapped_over_and_scans_without_a_gradient_too():
  """Each model gets the bits that it would alone."""
  x, layers = whole(N, 2, 8), whole(2, 3, 8, 8, seed=1)

  def of_all(x, layers):
    loss = lambda layers, x: jnp.sum(parallel.scan(LAYER, x, layers, **PLAIN)[0])
    grad = lambda x: jax.grad(loss)(layers, x)
    return jax.vmap(grad, axis_name="data")(x)

  got = jax.jit(jax.vmap(of_all, in_axes=(None, 0)))(x, layers)
  want = [jax.jit(of_all)(x, each) for each in layers]
  assert_same_bits(got, jnp.stack(want))
  scan = lambda x: parallel.scan(LAYER, x, layers[0], **PLAIN)[0]
  values = jax.vmap(lambda x: jax.vmap(scan)(x), axis_name="data")
  assert np.isfinite(values(jnp.asarray(x))).all()
