"""EF21: workers and owners follow gradients by estimates that a codec corrects."""

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp import codecs
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.exchange import Hierarchical
from tests.plugins.slow_cases import slow
from tests.specs import top_k
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import largest

N = 4
TOP = codecs.TopK(density=0.1, selection="exact")
ONE_BIT = codecs.OneBit(bucket_size=32)
NEAREST = codecs.QSGD(bits=2, bucket_size=32, rounding="nearest")


def ef21(codec, exchange="all_gather", **options):
  given = {"axis_name": "data", "feedback": "ef21", "min_leaf_size": 0} | options
  return gradcomp.compress(codec, **given | {"exchange": exchange})


def integers(steps):
  """Gradients of N workers: sums of such integers, and Nths of them, are exact."""
  rng = np.random.default_rng(0)
  x = rng.integers(-(2**19), 2**19, (steps, N, 600)).astype(np.float32)
  return [{"w": step} for step in x]


def paper(gradients, density):
  """Algorithm 2 of EF21 in NumPy, with TopK: each step's h, and h_i at last."""
  own, shared, found = 0.0, 0.0, []
  for gradient in np.asarray([x["w"] for x in gradients], np.float64):
    difference = gradient - own
    sent, _ = largest(difference, top_k.entries_of(density, gradient.shape[1]))
    own = own + sent
    shared = shared + sent.mean(axis=0)
    found.append(shared)
  return found, own


@pytest.mark.parametrize("mode", ["vmap", "shard_map", *slow("pmap", modes.EXPLICIT)])
def test_each_step_is_the_papers(mode):
  """A gradient that stays arrives whole, after ten steps of a tenth of it each."""
  *others, last = integers(12)
  gradients = others + [last] * 10
  outputs, state = modes.run_with_state(mode, ef21(TOP), gradients)
  shared, own = paper(gradients, TOP.density)
  for output, expected in zip(outputs, shared, strict=True):
    np.testing.assert_array_equal(output["w"], np.broadcast_to(expected, (N, 600)))
  np.testing.assert_array_equal(-np.asarray(state.residual["w"]), own)
  np.testing.assert_array_equal(state.estimate["w"], outputs[-1]["w"])
  np.testing.assert_array_equal(outputs[-1]["w"][0], last["w"].mean(axis=0))
  assert np.any(outputs[-3]["w"] != outputs[-1]["w"])


GROUPS = Hierarchical(group_size=2)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    *((ONE_BIT, "two_shot"), (NEAREST, "ring"), *slow((ONE_BIT, GROUPS))),
    *slow((TOP, "all_gather"), (PowerSGD(rank=1), "psum")),
  ],
  ids=str,
)
def test_what_a_biased_codec_loses_vanishes(codec, exchange):
  """A gradient that stays is followed ever closer. With residuals the error stays."""
  x = np.random.default_rng(1).standard_normal((N, 20, 32)).astype(np.float32)
  errors = {}
  for feedback in ("ef21", "error"):
    tx = ef21(codec, exchange, feedback=feedback)
    outputs, _ = modes.run_with_state("vmap", tx, [{"w": x}] * 120)
    lost = np.asarray(outputs[-1]["w"][0]) - x.mean(axis=0)
    errors[feedback] = np.linalg.norm(lost) / np.linalg.norm(x.mean(axis=0))
  assert errors["ef21"] < 1e-4 < 1e-2 < errors["error"]


def test_what_is_not_finite_changes_no_estimate():
  gradients = integers(3)
  gradients[-1]["w"][1, 7] = np.nan
  outputs, state = modes.run_with_state("vmap", ef21(TOP), gradients)
  _, before = modes.run_with_state("vmap", ef21(TOP), gradients[:-1])
  assert np.isnan(outputs[-1]["w"][:, 7]).all()
  for name in ("residual", "estimate"):
    old, new = (np.asarray(getattr(x, name)["w"]) for x in (before, state))
    assert_same_bits(new[:, 7], old[:, 7])
    assert np.any(new != old) and np.isfinite(new).all()


@pytest.mark.parametrize("workers, keep", [(2, "addends"), (4, "sum"), (6, "sum")])
def test_other_workers_begin_with_the_shared_estimate(workers, keep):
  """So the mean of their own is the shared one, to the bit."""
  params = {"w": np.zeros((12, 50)), "one": np.zeros(())}
  tx = ef21(NEAREST, "two_shot")
  shapes = gradcomp.checkpoint.state_shapes(tx, params, workers=N, axis_name="data")
  rng = np.random.default_rng(2)
  state = jax.tree.map(lambda x: rng.integers(1, 9, x.shape).astype(x.dtype), shapes)
  moved = gradcomp.reshard_state(
    tx, params, state, axis_name="data", old_workers=N, workers=workers, keep=keep
  )
  assert_same_bits(moved.estimate, state.estimate)
  if workers == N:
    assert_same_bits(moved.residual, state.residual)
    return
  for name, shared in state.estimate.items():
    expected = np.float32(-1 / (workers if keep == "addends" else 1)) * shared
    for own in np.split(np.asarray(moved.residual[name]), workers):
      np.testing.assert_array_equal(own, expected.reshape(own.shape))
  assert not any(x.any() for x in jax.tree.leaves(moved.server_residual))


def test_bytes_are_those_of_error_feedback():
  both = [ef21(TOP, "two_shot", feedback=x) for x in ("ef21", "error")]
  params = {"w": np.zeros((8, 512))}
  said = [gradcomp.explain(tx, params, workers=N).bytes_sent for tx in both]
  assert said[0] == said[1]


def test_momentum_of_a_bucket_that_is_not_finite_stays():
  """A codec that sends all elements masks no momentum, and keeps nothing of a NaN."""
  codec = codecs.QSGD(bits=8, bucket_size=32, rounding="nearest")
  feedback = gradcomp.MomentumFeedback(decay=0.5)
  tx = gradcomp.compress(codec, feedback=feedback, min_leaf_size=0)
  clean = np.linspace(1.0, 2.0, 256, dtype=np.float32).reshape(8, 32)
  spoiled, update = clean.copy(), jax.jit(tx.update)
  spoiled[2, 5] = np.nan
  _, before = update(clean, tx.init(clean))
  _, after = update(spoiled, before)
  expected = np.float32(0.5) * clean + clean
  expected[2] = clean[2]
  np.testing.assert_array_equal(before.velocity, clean)
  np.testing.assert_array_equal(after.velocity, expected)
