"""Ternary means are exact in every exchange, and levels are fitted to all workers."""

import dataclasses
import re
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, OneBit, Ternary
from tests.plugins.slow_cases import slow
from tests.specs import dithers, ternary
from tests.support import laws, modes
from tests.support.cases.exchange import transformation


@pytest.mark.parametrize(
  "workers, packing",
  [
    (3, "base3"),
    *slow((3, "2bit"), (8, "base3"), (8, "2bit")),
  ],
)
def test_the_mean_of_ternary_gradients_is_exact(packing, workers):
  """Equation 1 of each worker, with the largest scaler of all, and its plain mean.

  Sums of up to eight values of -1, 0 and 1 times one scale, and then 1/N: two products
  in binary32, whatever the exchange.
  """
  codec = Ternary(packing=packing)
  # Of unequal size, so that one worker's scale is everyone's.
  x = np.stack([laws.gaussian(12_345, i) * (1 + i) for i in range(workers)])
  own = [np.float32(np.asarray(jax.jit(codec.agree)(leaf))[0, 0]) for leaf in x]
  shared, rows = max(own), -(-x.shape[1] // codec.tile_size)
  hyper = dict(packing=packing, bucket_size=None)
  total = 0
  for i in range(workers):
    words = ternary.encode(
      x[i],
      key=dithers.leaf_dither(9, 0, "['w']", i),
      scales=np.full((rows, 1), shared),
      limit=own[i],  # 12,345 Gaussian values go beyond 2.5 sigma
      inline=False,
      **hyper,
    )
    scales = np.full((rows, 1), 1, np.float32)
    total += ternary.decode(words, x.shape[1], scales=scales, **hyper)
  assert np.abs(total).max() <= workers
  expected = (total * shared).astype(np.float32) * np.float32(1 / workers)
  for exchange in ("two_shot", "psum", "all_gather"):
    tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, key=9)
    (output,), _ = modes.run("shard_map", tx, [{"w": jnp.asarray(x)}])
    np.testing.assert_array_equal(output["w"][0], expected, err_msg=exchange)


def test_sums_of_ternary_codes_travel_in_few_bits():
  """ceil(log2(2N + 1)) bits, as many as fit in a word: 5 for 8 workers, 6 a word."""
  workers, size = 8, 16 * 512 * 24  # 24 rows, three an owner
  tx = gradcomp.terngrad(axis_name="data", exchange="two_shot")
  like = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
  grads = {"w": jax.ShapeDtypeStruct((workers, size), jnp.float32)}
  update = jax.shard_map(
    lambda g: tx.update({"w": g["w"][0]}, tx.init({"w": g["w"][0]}))[0],
    mesh=modes.mesh(workers),
    in_specs=P("data"),
    out_specs=P(),
  )
  report = gradcomp.wire_report(jax.jit(update).lower(grads))
  assert {c.dtype for c in report.collectives} == {"u32", "s32"}
  first = 7 * 3 * 512 * 4  # three rows of 512 words to each other worker
  second = 7 * 8 * 512 * 4  # 48 buckets, six a word
  assert report.bytes_sent == first + second + 7  # and one scale, all-reduced
  assert gradcomp.explain(tx, like, workers=workers).bytes_sent == report.bytes_sent


def states_of(mode, tx, steps):
  """The memory of every worker after each step."""
  workers = jax.tree.leaves(steps[0])[0].shape[0]
  if mode == "vmap":
    state = jax.vmap(tx.init, axis_name="data")(steps[0])
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
  else:
    mesh = modes.mesh(workers)
    with jax.set_mesh(mesh):
      state = tx.init(jax.tree.map(lambda leaf: leaf[0], steps[0]))
    specs = gradcomp.state_specs(state, axis_name="data")
    local = lambda g, s: tx.update(jax.tree.map(lambda leaf: leaf[0], g), s)
    update = jax.jit(
      jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
      )
    )
  result = []
  for grads in steps:
    _, state = update(grads, state)
    memory = np.asarray(state.memory.shared[()][0])
    result.append(memory if mode == "vmap" else np.stack([memory] * workers))
  return result


def test_levels_are_fitted_to_all_workers_every_few_steps():
  """To the sum of their counts, in the first step and every third, in every mode."""
  workers, codec = 4, QSGD(bits=3, bucket_size=64, levels="nonuniform", refit_every=3)
  rng = np.random.default_rng(0)
  # One worker's gradients are nearly sparse, so that its own levels would be others.
  shape = (workers, 64 * 300)
  steps = [{"w": rng.standard_normal(shape).astype(np.float32)} for _ in range(5)]
  for step, power in zip(steps, (1, 3, 3, 3, 1), strict=True):
    step["w"] = step["w"] ** power
    step["w"][1] = step["w"][1] ** 3
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  fitted = []
  for step in (steps[0], steps[3]):
    counts = sum(np.asarray(codec.measure(jnp.asarray(leaf))) for leaf in step["w"])
    fitted.append(np.asarray(codec.fits.fit(jnp.asarray(counts), codec.init().shared)))
  alone = codec.fits.fit(
    codec.measure(jnp.asarray(steps[0]["w"][1])), codec.init().shared
  )
  assert (fitted[0] != fitted[1]).any() and (fitted[0] != np.asarray(alone)).any()
  for mode in ("vmap", "shard_map"):
    for number, memory in enumerate(states_of(mode, tx, steps)):
      expected = np.stack([fitted[number // 3]] * workers)
      np.testing.assert_array_equal(memory, expected)


def test_a_leaf_that_nobody_encodes_fits_nothing():
  """Nothing is remembered, and nothing is counted."""
  tx = gradcomp.qsgd(bits=3, levels="nonuniform", axis_name="data", min_leaf_size=10**6)
  update = jax.vmap(tx.update, axis_name="data")
  grads = {"w": jnp.asarray(laws.gaussian((2, 512)))}
  state = jax.vmap(tx.init, axis_name="data")(grads)
  assert update(grads, state)[1].memory is None
  assert not re.search(r"i32\[.*psum", str(jax.make_jaxpr(update)(grads, state)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyCounts(QSGD):
  """As if of very many leaves: 2**30 counts in the first bin."""

  most_counted: ClassVar[int] = 2**30

  def measure(self, x):
    return super().measure(x).at[0].set(2**30)


def test_counts_of_many_workers_do_not_overflow():
  """Eight times 2**30 would be zero, as if the first bin were empty."""
  codec = ManyCounts(bits=3, bucket_size=64, levels="nonuniform")
  leaf = jnp.asarray(laws.gaussian(6400))
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  leaves = {"w": jnp.stack([leaf] * 8)}
  state = jax.vmap(tx.init, axis_name="data")(leaves)
  _, state = jax.jit(jax.vmap(tx.update, axis_name="data"))(leaves, state)
  fitted = state.memory.shared[()][0]
  # The first bin is worth two levels; what the others get is settled by what is left.
  np.testing.assert_array_equal(fitted[:, :2] * 256, np.float32([[0, 1]] * 8))


def test_a_state_without_memory_is_refused_and_one_with_it_is_left_alone():
  grads = {"w": jnp.ones((128, 128))}
  fitted, plain = gradcomp.qsgd(bits=3, levels="nonuniform"), gradcomp.qsgd(bits=3)
  with pytest.raises(ValueError, match="`state.memory.shared.*must have"):
    fitted.update(grads, plain.init(grads))
  state = fitted.init(grads)
  _, after = plain.update(grads, state)
  chex.assert_trees_all_equal(after.memory, state.memory)


@pytest.mark.parametrize("exchange", ["two_shot", "ring", "hierarchical"])
def test_means_of_a_short_last_bucket_are_of_its_elements(exchange):
  """Rows know no leaf: what fills them up must not draw means to zero.

  Two elements behind two whole tiles, equal on all workers: both means are exact.
  """
  codec = OneBit()
  x = np.concatenate([laws.gaussian(codec.tile_size), np.float32([2.5, -1.5])])
  tx = transformation(codec, exchange, 4, feedback="error")
  (output,), _ = modes.run("vmap", tx, [{"w": jnp.asarray(np.stack([x] * 4))}])
  np.testing.assert_array_equal(output["w"][:, -2:], np.float32([[2.5, -1.5]] * 4))


def test_alone_a_worker_fits_its_own_levels():
  tx = gradcomp.qsgd(bits=3, levels="nonuniform")
  grads = {"w": jnp.asarray(laws.gaussian(512 * 64))}
  codec = QSGD(bits=3, levels="nonuniform")
  _, state = jax.jit(tx.update)(grads, tx.init(grads))
  expected = codec.fits.fit(codec.measure(grads["w"]), codec.init().shared)
  np.testing.assert_array_equal(state.memory.shared[()][0], expected)
