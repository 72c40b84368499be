"""A switch goes on with what waits, and refuses states that do not fit together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import TopK
from gradcomp.exchange import Hierarchical
from tests.specs import top_k
from tests.support.assertions import says
from tests.support.sparse_steps import (
  N,
  check_conservation,
  gradients,
  redsync,
  trail,
)

switch = gradcomp.wrappers.switch


def test_switch_changes_the_density_in_one_compilation():
  """Dense until step 2, then sparse, then sparser; residuals and momentum go on."""
  densities, steps = [1, 0.25, 0.02], gradients(7)
  found = trail(switch([2, 4], [redsync(d, 0.9) for d in densities]), steps)
  passed = [(output, state.inner) for output, state in found]
  check_conservation(passed, steps, 0.9, True, sparse=lambda step: step >= 2)
  sent = [np.count_nonzero(output["w"][0]) for output, _ in passed]
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  k = [top_k.entries_of(d, 630) for d in densities]
  assert sent[:2] == [630, 630] and waiting[:2] == [0, 0]
  assert all(k[1] <= count <= 4 * k[1] for count in sent[2:4])
  assert all(k[2] <= count <= 4 * k[2] for count in sent[4:])
  assert min(waiting[2:]) > 0
  kept = [state.memory.own[("data",)][1] for _, state in passed]
  assert [int(own.used[0, 0]) for own in kept] == [0, 0, k[1], k[1], k[2], k[2], k[2]]
  assert [int(state.count[0]) for _, state in passed] == list(range(1, 8))


def test_a_residual_that_nothing_keeps_is_sent():
  """Once and for all, by a part without feedback: nothing is lost."""
  plain = gradcomp.dense(axis_name="data", exchange="psum", feedback=None)
  steps, sparse = gradients(3), redsync(0.02, None)
  found = trail(switch([1, 2], [sparse, plain, sparse]), steps)
  passed = [(output, state.inner) for output, state in found]
  check_conservation(passed, steps, None, False)
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  assert waiting[0] > 600 and waiting[1] == 0 and waiting[2] > 600


TWO = [optax.identity()] * 2


@pytest.mark.parametrize(
  "boundaries, said",
  [
    *(
      ([x] if isinstance(x, int | float) else x, f"{x}")
      for x in (0, -1, 1.5, True, [2, 2], [3, 2], [5, 2**31])
    ),
    (3, "3"),
  ],
  ids=str,
)
def test_bad_boundaries_are_named(boundaries, said):
  with pytest.raises(ValueError, match=says("`boundaries`", "ascending", said)):
    switch(boundaries, TWO)


@pytest.mark.parametrize("boundaries", [[], [1, 2]])
def test_too_few_or_many_transformations_are_named(boundaries):
  parts = "`transformations`", "one more", f"{len(boundaries)} boundaries", "2"
  with pytest.raises(ValueError, match=says(*parts)):
    switch(boundaries, TWO)


@pytest.mark.parametrize(
  "other",
  [
    optax.trace(0.9),
    optax.scale_by_adam(),
    gradcomp.compress(TopK(), exchange=Hierarchical(group_size=2), axis_name="data"),
    redsync(0.02, exchange="two_shot"),
  ],
  ids=["trace", "adam", "hierarchical", "two_shot"],
)
def test_states_that_do_not_fit_together(other):
  tx, params = switch([3], [redsync(0.02), other]), {"w": jnp.ones((N, 9, 70))}
  with pytest.raises(ValueError, match=says("`transformations`", "must keep")):
    jax.eval_shape(jax.vmap(tx.init, axis_name="data"), params)


def test_a_parameter_may_be_named_like_what_owners_keep():
  """Only their own residuals must not wait through a transformation without them."""
  tx = switch([3], [redsync(0.02), redsync(0.02, None)])
  jax.eval_shape(tx.init, {".server_residual": jnp.ones((9, 70))})
