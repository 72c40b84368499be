"""Orbax saves and restores whole trainings, which go on to the same bits."""

import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD, PowerSGD
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support import modes, saved
from tests.support.cases import exchange as exchange_cases
from tests.support.cases import recipe

N = 4


def given(steps=4):
  """Gradients of a leaf that is compressed and one that stays dense."""
  trees = [exchange_cases.small_gradients(N, seed) for seed in range(steps)]
  return [{"w": tree["a"], "b": tree["b"]} for tree in trees]


def compressed(codec, exchange, feedback="error", **options):
  exchange = modes.grouped(exchange)
  options = {"exchange": exchange, "feedback": feedback, "min_leaf_size": 10} | options
  return gradcomp.compress(codec, axis_name="data", **options)


def redsync(density, **options):
  options = {"exchange": "all_gather", "min_leaf_size": 10} | options
  return gradcomp.redsync(density, axis_name="data", **options)


QSGD4 = QSGD(bits=4, bucket_size=32)
# What each kind of state has that others have not.
KEPT = {
  "owners": compressed(QSGD4, "two_shot", "momentum"),
  "codes": compressed(
    QSGD4, "all_gather", gradcomp.ErrorFeedback(residual_dtype="int8")
  ),
  "levels": compressed(QSGD(bits=3, bucket_size=32, levels="nonuniform"), "two_shot"),
  "thresholds": redsync(0.1, selection="sampled"),
  "turn": redsync(0.1, quantize="asq"),
  "factors": compressed(PowerSGD(rank=1), "psum"),
  "shares": zero(optax.adam(0.1), grads=QSGD4, params=QSGD4, axis_name="data"),
  "round": gradcomp.local.local_steps(
    optax.adam(0.1),
    optax.sgd(0.7, 0.9, nesterov=True),
    axis_name="data",
    every=4,
    codec=QSGD4,
    options=gradcomp.local.LocalOptions(fragments=2, delay=1, min_leaf_size=10),
  ),
  "switch": gradcomp.wrappers.switch([3], [redsync(1.0), redsync(0.1, quantize="asq")]),
  "guard": gradcomp.skip_nonfinite(compressed(QSGD4, "two_shot"), 2, axis_name="data"),
}
QUICK = [
  *(("owners", "shard_map"), ("codes", "shard_map")),
  *(("levels", "explicit"), ("switch", "vmap")),
]


THIRD = optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()
MICRO = {
  "behind": optax.chain(KEPT["owners"], THIRD),
  "around": optax.MultiSteps(
    optax.chain(KEPT["owners"], optax.sgd(0.1)), 3
  ).gradient_transformation(),
}


@pytest.mark.parametrize(
  "kind, mode",
  [
    *QUICK,
    *slow(*((x, m) for x in KEPT for m in modes.modes_for(N) if (x, m) not in QUICK)),
  ],
)
def test_what_a_state_keeps_is_all_that_a_training_needs(kind, mode, tmp_path):
  """With half of the steps behind it; the third is the last before the switch."""
  optimizer = optax.chain(KEPT[kind], optax.sgd(0.1, momentum=0.9))
  saved.assert_goes_on(mode, optimizer, given(), tmp_path)


@pytest.mark.parametrize(
  "place, mode",
  slow(("behind", "explicit"), *((x, m) for x in MICRO for m in ("vmap", "pmap"))),
)
def test_in_the_middle_of_micro_steps(place, mode, tmp_path):
  """Gradients that wait for the third step are saved, around a worker's own ones."""
  saved.assert_goes_on(mode, MICRO[place], given(), tmp_path)


def with_feedback():
  """Every exchange with residuals in all modes, and with momentum in one.

  Groups do not know of whose momentum they have sent a part.
  """
  for codec, exchange in exchange_cases.CASES:
    yield from ((codec, exchange, "error", mode) for mode in modes.modes_for(N))
    if exchange != "hierarchical" or not codec.facts.drops:
      yield codec, exchange, "momentum", "vmap"


@pytest.mark.parametrize(
  "codec, exchange, feedback, mode", exchange_cases.plain_and_slow(with_feedback())
)
def test_every_exchange_and_feedback(codec, exchange, feedback, mode, tmp_path):
  optimizer = compressed(codec, exchange, feedback)
  saved.assert_goes_on(mode, optimizer, given(3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes.modes_for(N))
@pytest.mark.parametrize("name", recipe.RECIPES)
def test_every_recipe(name, mode, tmp_path):
  exchange = recipe.make(name, axis_name="data", min_leaf_size=10)
  optimizer = optax.chain(exchange, optax.adam(0.1))
  saved.assert_goes_on(mode, optimizer, given(3), tmp_path)


def test_the_examples_draw_the_batches_again_that_were_used(tmp_path):
  """And have the notes beside the state; nothing is done where there is no folder."""
  from examples.lib.checkpoints import Saved

  def resumed(folder):
    batches = iter("abcdef")
    with Saved(folder, every=2, steps=5, record=record) as kept:
      done, state, notes = kept.restore(new, batches, "none yet")
      for step in range(done + 1, 6):
        if step == 4:
          break
        state = {"w": state["w"] + 1}
        kept.save(step, state, {"seen": next(batches)})
    return done, int(state["w"][0]), notes, next(batches)

  new = {"w": jnp.zeros(2)}
  tx = compressed(QSGD4, "all_gather")
  record = gradcomp.checkpoint.record(tx, {"w": jnp.zeros((9, 70))}, workers=N)
  assert resumed(None) == (0, 3, "none yet", "d")
  assert resumed(tmp_path / "a") == (0, 3, "none yet", "d")
  assert resumed(tmp_path / "a") == (2, 3, {"seen": "b"}, "d")
  record = record | {"format": 0}
  with pytest.raises(ValueError, match="of the format 0"):
    resumed(tmp_path / "a")
