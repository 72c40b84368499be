"""The state of local steps is saved, moved to other workers, and checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import Dense, TopK
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import ADAM, LEAVES, NESTEROV, N, decaying, local
from tests.support.cases.zero import gradients, last, loss_fn, sharded, tree


@pytest.mark.parametrize(
  "options",
  [
    {"every": 4},
    {"every": 8, "fragments": 2, "delay": 3, "mixing": 0.5},
    {"every": 2, "start": 3},
  ],
  ids=["apart", "arriving", "first"],
)
def test_resumed_in_the_midst_of_a_round_it_goes_on_with_the_same_bits(
  options, tmp_path
):
  """Through Orbax, where workers are apart, and where an exchange has not arrived."""
  tx = local(ADAM, NESTEROV, TopK(density=0.05), feedback=decaying(0.95), **options)
  params, state, mesh = sharded(tx, tree(0, LEAVES))
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  batches = np.random.default_rng(0).normal(size=(11, N)).astype(np.float32)
  held = [(params, state)]
  for batch in batches:
    params, state, _ = step(*held[-1], batch)
    held.append((params, state))
  again = saved.through_orbax(held[6], tmp_path)
  for batch, expected in zip(batches[6:], held[7:], strict=True):
    params, state, _ = step(*again, batch)
    again = params, state
    assert_same_bits(again, expected)
  assert step._cache_size() == 1


def test_another_number_of_workers_goes_on_behind_an_exchange():
  """Residuals keep their sum, and new workers get the inner state of old ones."""
  tx = local(ADAM, NESTEROV, TopK(density=0.1))
  params = tree(0, {"w": (20, 50)})
  _, state = last("shard_map", tx, params, gradients(3, {"w": (20, 50)}))
  specs = gradcomp.state_specs(state, axis_name="data")
  whole = lambda x, spec: x.reshape(-1, *x.shape[2:]) if spec != P() else x[0]
  state = jax.tree.map(whole, state, specs)
  how = dict(axis_name="data", old_workers=N, workers=6)
  moved = gradcomp.reshard_state(tx, params, state, **how)
  old, new = (x.own.inner_state[0].mu["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1), old.reshape(N, -1)[[0, 1, 2, 3, 0, 1]])
  old, new = (x.fragments[0].exchange.residual["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1).sum(0), old.reshape(N, -1).sum(0))
  away = jax.tree.map(lambda x: x + 1, state.own.by_axes[("data",)][0])
  own = {("data",): (away, state.own.inner_state)}
  state = state._replace(own=state.own._replace(by_axes=own))
  with pytest.raises(ValueError, match="must be that behind an exchange"):
    gradcomp.reshard_state(tx, params, state, **how)


def test_a_record_says_what_the_state_belongs_to():
  def record(workers=N, **options):
    tx = local(ADAM, NESTEROV, TopK(density=0.1), **options)
    return gradcomp.checkpoint.record(tx, tree(0, LEAVES), workers=workers)

  gradcomp.checkpoint.check_record(record(), record(every=5))
  for what, old in {
    "number of gradcomp transformations": record(fragments=3),
    "residual_decay": record(feedback=decaying(0.5)),
    "number of workers": record(workers=8),
    "delay": record(delay=1),
  }.items():
    with pytest.raises(ValueError, match=what):
      gradcomp.checkpoint.check_record(old, record())


def test_a_bad_state_is_an_error():
  tx = local(ADAM, NESTEROV, Dense())
  placed, state, _ = sharded(tx, {"w": jnp.ones(3)})
  with pytest.raises(ValueError, match="must be made for 1 fragments, got 3"):
    three = local(ADAM, NESTEROV, Dense(), fragments=3)
    more = tree(0, LEAVES)
    tx.update(more, sharded(three, more)[1], more)
  step = gradcomp.make_train_step(
    lambda p, m, x: (jnp.sum(p["w"]) * x.mean(), m),
    tx,
    axis_name="data",
    mesh=modes.mesh(N),
    options=gradcomp.TrainOptions(model_state="mean"),
  )
  with pytest.raises(ValueError, match='`model_state` must be "local" or None'):
    step(placed, state, jnp.ones(1), jnp.ones(N))
