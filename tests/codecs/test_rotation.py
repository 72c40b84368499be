"""Rotated tiles: what they are, that sums are taken of them, and what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.kernels.common import rotation
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.specs import dithers, exchange, qsgd
from tests.specs import rotation as rotation_spec
from tests.support import laws, modes

GROUPS = (8, 32)
BUCKET = 64
LAYOUT = dict(bits=4, bucket_size=BUCKET)

rotate, unrotate = (
  jax.jit(f, static_argnums=(1, 2)) for f in (rotation.rotate, rotation.unrotate)
)


@pytest.mark.parametrize("group", GROUPS)
def test_a_rotation_is_a_hadamard_matrix_with_signs(group):
  """Of integers, all sums of which are exact."""
  x = np.random.default_rng(0).integers(-9, 10, 8 * BUCKET).astype(np.float32) * group
  signed = x * rotation_spec.signs(x.size)
  of_groups = lambda a: np.asarray(a).reshape(group, -1)
  expected = rotation_spec.matrix(group) @ of_groups(signed) / group
  rotated = rotate(x.reshape(-1, 8 * BUCKET), 8, group)
  np.testing.assert_array_equal(of_groups(rotated), expected)
  np.testing.assert_array_equal(np.asarray(unrotate(rotated, 8, group)).ravel(), x)
  # A constant is spread: none of its sums is all of it.
  constant = rotate(np.ones((1, 8 * BUCKET), np.float32), 8, group)
  assert np.abs(constant).max() <= 0.5


@pytest.mark.parametrize("group", [8, *slow(32)])
def test_owners_add_rotated_tiles(group):
  """The whole arithmetic of the page: rotated first, and rotated back last."""
  codec = QSGD(**LAYOUT, rotate=group, implementation="xla")
  x = np.stack([laws.gaussian(2 * codec.tile_size + 9, seed) for seed in range(2)])
  tx = gradcomp.compress(codec, axis_name="data", exchange="two_shot", key=7)
  (output,), _ = modes.run("vmap", tx, [{"w": jnp.asarray(x)}])
  rule = dict(levels="sign_magnitude", **LAYOUT)

  def coded(tiles, key=None):
    rounding = "nearest" if key is None else "stochastic"
    rows = qsgd.encode(tiles, key=key, norm="max", rounding=rounding, **rule)
    values = qsgd.decode(rows, rows.shape[0] * codec.tile_size, **rule)
    return values.reshape(-1, codec.tile_size)

  keys = [dithers.leaf_dither(7, 0, "['w']", worker) for worker in range(2)]
  rotated = [rotation_spec.rotate(own, group=group, **LAYOUT) for own in x]
  sent = np.stack([*map(coded, rotated, keys)])
  # Owners keep what their rounding to nearest loses.
  mean = exchange.two_shot(sent, lambda mean, owner: coded(mean.ravel())).ravel()
  expected = rotation_spec.unrotate(mean, group=group, **LAYOUT)[: x.shape[1]]
  np.testing.assert_array_equal(output["w"][0], expected)


@pytest.mark.parametrize("group", GROUPS)
def test_stochastic_rounding_stays_unbiased(group):
  codec = QSGD(bits=4, bucket_size=32, rotate=group, implementation="xla")
  mean_is_the_leaf(codec, laws.gaussian(300))


def error(codec, x):
  found = np.float64(laws.round_trip(codec, x))
  return np.square(found - x).sum() / np.square(np.float64(x)).sum()


def test_errors_of_heavy_tails():
  """Student's t with 3 degrees of freedom, 4 bits: the median of samples of 49,152.

  The power of such numbers has no finite variance, so that means would not settle.
  """
  samples = np.float32(
    [np.random.default_rng(i).standard_t(3, 49152) for i in range(5)]
  )
  median = lambda **hyper: np.median([error(QSGD(bits=4, **hyper), x) for x in samples])
  plain, eight, more = (median(rotate=group) for group in (None, *GROUPS))
  assert 0.23 < plain < 0.27
  assert 0.1 < eight < 0.15
  assert more < 0.5 * eight
  rms = dict(norm="rms", levels="uniform", rounding="nearest")
  assert median(rotate=32, **rms) < 0.25 * eight


def test_errors_of_gaussian_gradients_stay():
  """They are as Gaussian as before; 2^16 elements show differences of 2 %."""
  x = laws.gaussian(2**16)
  plain, eight, more = (error(QSGD(bits=4, rotate=g), x) for g in (None, *GROUPS))
  assert abs(eight / plain - 1) < 0.02
  assert abs(more / plain - 1) < 0.02
