"""Random bits are the cipher's, and each leaf, step and transformation has its own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.random import threefry_2x32

import gradcomp
from gradcomp._src.kernels.common import dithers
from gradcomp.exchange import TwoShot
from gradcomp.kernels import random_lanes
from tests.plugins.slow_cases import slow
from tests.specs import dithers as spec
from tests.support import laws, modes
from tests.support.assertions import rank

LANES, BITS, BLOCK = 8, 16, 64  # that share a block, of a lane, of a block


def test_threefry_is_the_pages_and_jaxs_own():
  key = np.array([123, 456], np.uint32)
  counter = np.arange(2000, dtype=np.uint32) * np.uint32(2654435761)
  given = counter[:1000], counter[1000:]
  for rounds in (8, 13, 20):
    found = jax.jit(functools.partial(dithers.threefry2x32, rounds=rounds))(key, given)
    expected = np.stack(spec.threefry2x32(key, *given, rounds))
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(np.concatenate(found), threefry_2x32(key, counter))


def test_lanes_are_the_pages_wherever_their_rows_begin():
  """Quarters of blocks and of their sums; of ten, which are planes of three bits."""
  dither = np.array([*laws.KEY, spec.mask(5) * 0x10001], np.uint32)
  draw = jax.jit(random_lanes, static_argnums=(1, 2), static_argnames="first_row")
  got = np.stack(draw(dither, (3, 64), 10, first_row=5), axis=1)
  key = (*laws.KEY.tolist(), spec.mask(5))
  expected = spec.random_lanes(key, 3, bits=3, bucket_size=64, first_row=5)
  np.testing.assert_array_equal(got, expected)


def test_masks_are_the_pages():
  traced = jax.jit(jax.vmap(dithers.mask))(jnp.arange(300))
  expected = [spec.mask(i) for i in range(300)]
  assert traced.tolist() == expected
  assert [int(dithers.mask(i)) for i in range(300)] == expected
  # Half of the pairs lie on either side of any half, quarter, eighth...
  for count in (2, 4, 8, 16):
    places = [(0x5A5A ^ m) * count >> 16 for m in expected[: 2 * count : 2]]
    assert sorted(places) == list(range(count))


def test_any_two_lanes_of_a_block_are_independent():
  """Each is linear in the block's 64 bits over GF(2), and matrices have full rank."""
  units = np.uint64(1) << np.arange(BLOCK, dtype=np.uint64)
  a, b = (units & 0xFFFFFFFF).astype(np.uint32), (units >> 32).astype(np.uint32)
  shifts = np.arange(BITS, dtype=np.uint32)[:, None]
  matrices = (np.stack(spec.lanes_of(a, b))[:, None] >> shifts & 1).astype(int)
  rows = [["".join(map(str, row)) for row in matrix] for matrix in matrices]
  rank_of = lambda some: rank(int(row, 2) for i in some for row in rows[i])

  a, b = np.random.default_rng(0).integers(2**32, size=(2, 1000), dtype=np.uint32)
  block = a + (b.astype(np.uint64) << 32)
  bits = (block >> np.arange(BLOCK, dtype=np.uint64)[:, None] & 1).astype(int)
  linear = ((matrices @ bits % 2) << np.arange(BITS)[:, None]).sum(1)
  parts = spec.lanes_of(a, b)
  np.testing.assert_array_equal(parts, linear)

  for count in (1, 2):
    some = itertools.combinations(range(LANES), count)
    assert {rank_of(lanes) for lanes in some} == {count * BITS}
  # The only triples that are not independent, each of which sums to zero.
  triples = itertools.combinations(range(LANES), 3)
  dependent = {lanes for lanes in triples if rank_of(lanes) < 3 * BITS}
  assert dependent == {(0, 2, 4), (1, 3, 5), (0, 3, 6), (1, 2, 7)}
  for i, j, k in dependent:
    np.testing.assert_array_equal(parts[i] ^ parts[j], parts[k])
  assert rank_of(range(LANES)) == BLOCK


SIZE, WORKERS, STEPS = 4096, 2, 2
X = laws.gaussian(SIZE)


def composed(how, **options):
  """One transformation of leaves a and b, or two that share the work."""
  make = functools.partial(gradcomp.qsgd, axis_name="data", **options)
  if how == "one":
    return make(bits=4)
  if how == "masked":
    masks = {"a": True, "b": False}, {"a": False, "b": True}
    return optax.chain(*(optax.masked(make(bits=4), mask) for mask in masks))
  parts = {"first": make(bits=4), "second": make(bits=4 if how == "partition" else 2)}
  return optax.partition(parts, {"a": "first", "b": "second"})


def outputs(tx, names="ab"):
  """What each worker gets of equal leaves in each step, by leaf, worker and step."""
  grads = {name: np.stack([X] * WORKERS) for name in names}
  found, _ = modes.run_with_state("vmap", tx, [grads] * STEPS)
  return {
    (name, worker, step): np.asarray(output[name][worker])
    for step, output in enumerate(found)
    for name, worker in itertools.product(names, range(WORKERS))
  }


def assert_independent(streams, opposed=lambda *pair: False):
  """Correlations of independent errors are 1 / sqrt(SIZE) at one sigma.

  Of some hundred pairs, one is beyond 5 sigma with probability 1e-4. Workers that are
  opposed err to other sides, with a correlation of a half.
  """
  errors = {name: x - X for name, x in streams.items()}
  for a, b in itertools.combinations(errors, 2):
    middle, most = (-0.5, 0.05) if opposed(a, b) else (0, 5 / SIZE**0.5)
    assert abs(np.corrcoef(errors[a], errors[b])[0, 1] - middle) < most, (a, b)


@functools.cache
def streams_of(how):
  return outputs(composed(how, exchange="local"))


COMPOSITIONS = ["one", "partition", "partition, other bits", "masked"]


@pytest.mark.parametrize("how", COMPOSITIONS)
def test_leaves_and_steps_are_independent_and_workers_opposed(how):
  assert_independent(streams_of(how), lambda a, b: a[::2] == b[::2])


@pytest.mark.parametrize("how", ["one", *slow(*COMPOSITIONS[1:])])
def test_workers_are_independent_with_independent_dithers(how):
  assert_independent(outputs(composed(how, exchange="local", dither="independent")))


@pytest.mark.parametrize(
  "exchange, dither",
  [(TwoShot(feedback=False), "shared"), *slow(("ring", "independent"))],
)
def test_later_stages_are_independent(exchange, dither):
  """Each encodes sums again. All workers have the same mean."""
  found = outputs(composed("partition", exchange=exchange, dither=dither))
  assert_independent({key: x for key, x in found.items() if key[1] == 0})


def test_a_leaf_draws_the_same_whoever_else_is_there():
  """Alone, in front of another, behind another, in a transformation of its own."""
  expected = streams_of("one")
  others = [outputs(composed("one", exchange="local"), names) for names in ("a", "0ab")]
  for found in (*others, streams_of("partition"), streams_of("masked")):
    for key in found.keys() & expected.keys():
      np.testing.assert_array_equal(found[key], expected[key])
