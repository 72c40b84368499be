"""Options, states and parameters that local steps refuse, and records of them."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp.codecs import Dense, TopK
from tests.support import modes
from tests.support.cases.local import ADAM, LEAVES, NESTEROV, N, decaying, local, placed
from tests.support.cases.zero import tree


def stepped_with_a_mean(params, state):
  """A step whose statistics all workers would average in each step."""
  step = gradcomp.make_train_step(
    lambda p, m, x: (jnp.sum(p["w"]) * x.mean(), m),
    local(ADAM, NESTEROV, Dense()),
    axis_name="data",
    mesh=modes.mesh(N),
    options=gradcomp.TrainOptions(model_state="mean"),
  )
  step.eval_shape(params, state, jnp.ones(1), jnp.ones(N))


def test_a_bad_state_or_parameter_is_an_error():
  tx, params = local(ADAM, NESTEROV, Dense()), {"w": jnp.ones(3)}
  parts = {x: local(ADAM, NESTEROV, Dense(), fragments=x) for x in (2, 3)}
  mapped = jax.vmap(parts[2].init, axis_name="data")
  own, state, _ = placed(tx, params)
  more = tree(0, LEAVES)
  three = placed(parts[3], more)[1]
  for error, message, call in (
    (ValueError, "`axis_name` must be an axis that init can", lambda: tx.init(params)),
    (
      TypeError,
      "must have a real float dtype",
      lambda: tx.init({"w": jnp.ones(3, jnp.complex64)}),
    ),
    (
      ValueError,
      "`fragments` must be at most the number of",
      lambda: mapped({"w": jnp.ones((2, 3))}),
    ),
    (
      ValueError,
      "must be that of one worker",
      lambda: gradcomp.local.local_params(own, state),
    ),
    (
      TypeError,
      "`state` must be a gradcomp.state.LocalStepsState",
      lambda: tx.update(params, (), params),
    ),
    (ValueError, "`params` must be given", lambda: tx.update(params, state)),
    (
      ValueError,
      "must be made for 1 fragments, got 3",
      lambda: tx.update(more, three, more),
    ),
    (
      ValueError,
      '`model_state` must be "local" or None',
      lambda: stepped_with_a_mean(own, state),
    ),
  ):
    with pytest.raises(error, match=message):
      call()


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
