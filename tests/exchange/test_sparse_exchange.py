"""Exchanges of sparse codecs lose nothing, and their means are the page's."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp import MomentumFeedback
from gradcomp.codecs import RandomK, TopK
from tests.plugins.slow_cases import slow
from tests.specs import dithers, random_k, sparse, top_k
from tests.specs import exchange as oracle_exchange
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.sparse_steps import (
  DENSITY,
  SIZE,
  N,
  check_conservation,
  gradients,
  owned_of,
  trail,
  transformation,
)

EXACT = TopK(density=DENSITY)
# Each with the exchange, and m and the kind of momentum: how many rows of a leaf each
# worker selects from, and remembers.
ROWS = {
  (EXACT, "all_gather", None, False): 1,
  (TopK(density=DENSITY, selection="threshold"), "all_gather", 0.9, True): 1,
  (TopK(density=DENSITY, quantize="asq"), "all_gather", 0.9, False): 1,
  (TopK(density=DENSITY, quantize="mean"), "two_shot", 0.7, True): N,
  (TopK(density=DENSITY, quantize="asq"), "two_shot", None, False): N,
  (TopK(density=DENSITY, selection="sampled"), "two_shot", 0.9, False): N,
  (TopK(density=DENSITY, dtype=jnp.bfloat16), "hierarchical", None, False): 0,
  (RandomK(density=DENSITY), "psum", 0.9, False): 0,
  (RandomK(density=DENSITY), "all_gather", None, False): 0,
}
CASES = list(ROWS)
# Each takes seconds to compile: every mode with some of the cases.
IN_MODES = {
  CASES[1]: ("shard_map", modes.EXPLICIT),
  CASES[4]: ("shard_map_unchecked", "pmap", modes.EXPLICIT),
  CASES[6]: ("shard_map",),
  CASES[7]: ("shard_map", modes.EXPLICIT),
}


def short_name(case):
  codec, exchange = case[:2]
  kind = (getattr(codec, name, None) for name in ("selection", "quantize"))
  return "-".join([type(codec).__name__, *map(str, kind), exchange])


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=pytest.mark.slow if i in (0, 2, 3, 4, 5, 7, 8) else ())
    for i, case in enumerate(CASES)
  ],
  ids=short_name,
)
def test_nothing_is_lost(case):
  _, exchange, momentum, nesterov = case
  steps = gradients(6)
  passed = trail(transformation(*case), steps)
  check_conservation(passed, steps, momentum, nesterov)
  _, state = passed[-1]
  assert bool(state.server_residual) == (exchange in ("two_shot", "hierarchical"))
  # Something waits and, but where a second stage sends all of it, something was sent.
  assert np.count_nonzero(state.residual["w"]) > 100
  assert (state.memory is not None) == (ROWS[case] > 0)
  if ROWS[case]:
    used = np.asarray(state.memory.own[("data",)][2].used)
    assert used.shape == (N, ROWS[case]) and used.all()


@pytest.mark.parametrize(
  "case, places",
  [
    pytest.param(
      case,
      places,
      id=short_name(case),
      marks=pytest.mark.slow if case in (CASES[4], CASES[6]) else (),
    )
    for case, places in IN_MODES.items()
  ],
)
def test_every_mode_has_the_same_bits(case, places):
  """On every worker; the turns of `asq` too."""
  tx, steps = transformation(*case), gradients(3)
  steps = [jax.tree.map(jnp.asarray, {k: g[k] for k in "bw"}) for g in steps]
  expected = modes.run_all("vmap", tx, steps)
  for mode in places:
    assert_same_bits(modes.run_all(mode, tx, steps), expected)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_the_mean_is_the_oracles(exchange):
  """Bit for bit, for three workers, whose third no binary fraction is."""
  workers = 3
  steps = [{k: g[k] for k in "bw"} for g in gradients(4, workers)]
  steps = [jax.tree.map(jnp.asarray, g) for g in steps]
  tx = transformation(EXACT, exchange)
  expected, residual = [], np.zeros((workers, SIZE), np.float32)
  owned = np.zeros((workers, SIZE // workers), np.float32)
  for gradient in steps:
    corrected = residual + np.asarray(gradient["w"]).reshape(workers, SIZE)
    if exchange == "all_gather":
      mean, residual = sparse.all_gather(corrected, DENSITY)
    else:
      mean, residual = sparse.two_shot(corrected, DENSITY, owned)
    expected.append(mean)
  for mode in ("vmap", "shard_map"):
    outputs, rest, kept = modes.run_all(mode, tx, steps)
    for output, mean, gradient in zip(outputs, expected, steps, strict=True):
      for i in range(workers):
        np.testing.assert_array_equal(output["w"][i].ravel(), mean)
        np.testing.assert_array_equal(
          output["b"][i], oracle_exchange.all_gather(gradient["b"])
        )
    np.testing.assert_array_equal(np.reshape(rest["w"], residual.shape), residual)
    if exchange == "two_shot":
      np.testing.assert_array_equal(np.ravel(kept[("data",)][0]), owned.ravel())
    else:
      assert not kept


def test_random_k_sends_the_same_elements_from_all():
  """Those of the key that all workers share, which change from step to step."""
  steps = gradients(3)
  passed = trail(transformation(RandomK(density=DENSITY), "psum", key=7), steps)
  seen = set()
  for number, (output, _) in enumerate(passed):
    for name in ("v", "w"):
      key = dithers.leaf_key(7, number, f"['{name}']")
      place = random_k.positions(key, 1, SIZE, DENSITY)[0]
      sent = np.flatnonzero(output[name][0])
      np.testing.assert_array_equal(sent, place[place < SIZE])
      seen.add(tuple(sent))
  assert len(seen) == 6
  first = np.mean(np.float64(steps[0]["v"]), axis=0)
  sent = np.flatnonzero(passed[0][0]["v"][0])
  # Three additions and a division of at most 4 or 5 each.
  np.testing.assert_allclose(passed[0][0]["v"][0][sent], first[sent], 0, 4 * 2.0**-21)


@pytest.mark.parametrize("quantize", [None, "asq"])
def test_local_is_what_each_worker_would_do_alone(quantize):
  codec = TopK(density=DENSITY, quantize=quantize)
  steps = gradients(3)
  passed = trail(transformation(codec, "local", 0.9, True), steps)
  options = dict(feedback=MomentumFeedback(nesterov=True), min_leaf_size=64)
  alone = gradcomp.compress(codec, **options)
  update = jax.jit(alone.update)
  for i in range(2):
    state = alone.init({k: v[i] for k, v in steps[0].items()})
    for gradient, (together, both) in zip(steps, passed, strict=True):
      output, state = update({k: v[i] for k, v in gradient.items()}, state)
      for name in output:
        np.testing.assert_array_equal(output[name], together[name][i])
        np.testing.assert_array_equal(state.velocity[name], both.velocity[name][i])


@pytest.mark.parametrize(
  "exchange, bad", [("all_gather", np.inf), ("two_shot", np.nan)]
)
def test_what_is_not_finite_reaches_all_and_nothing_that_is_kept(exchange, bad):
  steps = gradients(2)
  steps[1]["w"][2, 5, 7] = bad
  (_, old), (output, state) = trail(transformation(EXACT, exchange, 0.9), steps)
  assert not np.isfinite(output["w"][:, 5, 7]).any()
  dirty = ~np.isfinite(output["w"])
  assert dirty.sum() == N
  for name in ("residual", "velocity"):
    new, before = getattr(state, name)["w"], getattr(old, name)["w"]
    np.testing.assert_array_equal(new[:, 5, 7], before[:, 5, 7])
    chex.assert_tree_all_finite(new)
    assert (new != before).any()
  if exchange == "two_shot":
    chex.assert_tree_all_finite(owned_of(state, "w"))


SHAPES = {"b": (50,), "w": (300, 301)}
LIKE = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}


@pytest.mark.parametrize(
  "codec, exchange, kinds",
  [
    *slow((TopK(density=0.01), "all_gather", ["all-gather"])),
    (TopK(density=0.01, quantize="asq"), "two_shot", ["all-gather", "all-to-all"]),
    (RandomK(density=0.01), "psum", ["all-reduce"]),
  ],
  ids=["TopK-all_gather", "TopK-two_shot", "RandomK-psum"],
)
def test_explain_says_what_is_sent(codec, exchange, kinds):
  """One message of words a stage: lengths, positions and values of all leaves."""
  workers, size = 3, 300 * 301
  tx = transformation(codec, exchange, 0.9)
  mesh = modes.mesh(workers)
  with jax.set_mesh(mesh):
    state = jax.eval_shape(tx.init, LIKE)
  specs = gradcomp.state_specs(state, axis_name="data")
  local = lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state)
  P = jax.sharding.PartitionSpec
  update = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
  )
  grads = {
    k: jax.ShapeDtypeStruct((workers, *s), jnp.float32) for k, s in SHAPES.items()
  }
  report = gradcomp.wire_report(jax.jit(update).lower(grads, state))
  sent = report.collectives
  assert sorted({c.kind for c in sent}) == kinds
  assert {c.dtype for c in sent} == {"f32" if exchange == "psum" else "u32"}
  explanation = gradcomp.explain(tx, LIKE, workers=workers)
  rounded = sum(c.times for c in sent)
  assert 0 <= report.bytes_sent - explanation.bytes_sent <= rounded
  # By hand, from the page: b is one dense row of 128 words.
  k = top_k.entries_of(0.01, size)
  if exchange == "all_gather":
    words = 128 + 2 + -(-k // 2) + k
    assert explanation.bytes_sent == 4 * words * (workers - 1)
  elif exchange == "two_shot":
    k = top_k.entries_of(0.01, -(-size // 3))
    row = 1 + -(-k // 2) + 1
    # The dense row is one of three shares; the others are filled.
    assert explanation.bytes_sent == 2 * 4 * (128 + row) * (workers - 1)
  else:
    slots = -(-size // random_k.stride_of(0.01, size))
    assert explanation.bytes_sent == -(-4 * 2 * 2 * (slots + 128) // 3)


@functools.cache
def sent_bytes(density, exchange, workers):
  like = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
  tx = gradcomp.redsync(density, axis_name="data", exchange=exchange)
  (leaf,) = gradcomp.explain(tx, like, workers=workers).leaves
  return leaf.exchange, float(leaf.bytes_sent)


def test_two_shots_bytes_do_not_grow_with_the_workers():
  """2 (N-1)/N c, and rounding up in N ranges; all_gather's are (N-1) c."""
  two_shot = [sent_bytes(0.01, "two_shot", n)[1] for n in (4, 16, 64)]
  assert two_shot[0] == pytest.approx(2 * 3 / 4 * 60_000, rel=0.02)
  assert two_shot[2] < 2 * 60_000 * 1.05
  gathered = [sent_bytes(0.01, "all_gather", n)[1] for n in (4, 64)]
  assert gathered[1] == 21 * gathered[0]


def test_auto_gathers_until_a_plain_mean_sends_less():
  """c N < 8 n: here c is 10,000 entries of 6 bytes and 16 blocks of 4."""
  last = 8_000_000 // 60_064
  assert sent_bytes(0.01, "auto", last)[0] == "all_gather"
  assert sent_bytes(0.01, "auto", last + 1)[0] == "two_shot"
  assert sent_bytes(0.01, "auto", 2)[0] == "all_gather"
  assert sent_bytes(0.5, "auto", 8)[0] == "two_shot"
  assert sent_bytes(0.7, "auto", 2)[0] == "psum"  # positions make it more than dense
