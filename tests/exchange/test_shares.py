"""Sparse leaves: shares of ranges, pieces, parts of cut leaves, and their memories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import TopK
from tests.specs.methods import sparse
from tests.support import laws, modes, sparse_steps
from tests.support.assertions import assert_same_bits
from tests.support.sparse_steps import SIZE, N, gradients, trail, transformation

SAMPLED = TopK(density=0.05, selection="sampled", search_every=2)


@pytest.mark.parametrize(
  "hyper, exchange, rows",
  [
    (dict(selection="threshold"), "all_gather", 1),
    pytest.param(dict(quantize="mean"), "two_shot", N, marks=pytest.mark.slow),
  ],
  ids=["threshold", "two_shot"],
)
def test_nothing_is_lost_and_momentum_is_that_of_what_waits(hyper, exchange, rows):
  codec, steps = TopK(density=sparse_steps.DENSITY, **hyper), gradients(6)
  passed = trail(transformation(codec, exchange, 0.9, True), steps)
  sparse_steps.check_conservation(passed, steps, 0.9, True)
  _, state = passed[-1]
  assert bool(state.server_residual) == (exchange == "two_shot")
  # Something waits and, but where a second stage sends all of it, something was sent.
  assert np.count_nonzero(state.residual["w"]) > 100
  used = np.asarray(state.memory.own[("data",)][2].used)
  assert used.shape == (N, rows) and used.all()


def test_owners_of_ranges_send_the_mean_of_the_page():
  """Bit for bit, for three workers, whose third no binary fraction is."""
  workers = 3
  steps = [{"w": jnp.asarray(g["w"])} for g in gradients(4, workers)]
  residual = np.zeros((workers, SIZE), np.float32)
  owned = np.zeros((workers, SIZE // workers), np.float32)
  tx = transformation(TopK(density=sparse_steps.DENSITY), "two_shot")
  outputs, rest, kept = modes.run_all("vmap", tx, steps)
  for gradient, output in zip(steps, outputs, strict=True):
    corrected = residual + np.asarray(gradient["w"]).reshape(workers, SIZE)
    mean, residual = sparse.two_shot(corrected, sparse_steps.DENSITY, owned)
    got = np.asarray(output["w"]).reshape(workers, SIZE)
    np.testing.assert_array_equal(got, np.stack([mean] * workers))
  np.testing.assert_array_equal(np.reshape(rest["w"], residual.shape), residual)
  np.testing.assert_array_equal(np.ravel(kept[("data",)][0]), owned.ravel())


def test_pieces_send_what_the_whole_sends():
  """A message for each leaf: the same mean, and the same is kept."""
  make = functools.partial(transformation, SAMPLED, "all_gather", 0.9, True)
  whole, pieces = (make(message_bytes=size) for size in (None, 0))
  like = jax.tree.map(lambda x: x[0], gradients(1)[0])
  counts = [gradcomp.explain(tx, like, workers=N).messages for tx in (whole, pieces)]
  assert counts == [1, 3]
  steps = gradients(3)
  for one, several in zip(trail(whole, steps), trail(pieces, steps), strict=True):
    assert_same_bits(one, several)


def test_parts_of_a_leaf_are_selected_from_apart():
  """Each device has a part of a leaf sharded over a model axis, and its memory."""
  workers, axes = 2, ("data", "model")
  tx = transformation(SAMPLED, "all_gather", 0.9, True)
  steps = laws.gaussian((3, workers, 20, 64))
  halves = [{"a": x[..., :32], "b": x[..., 32:]} for x in steps]
  mesh = jax.make_mesh((workers, 2), axes, (AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    place = NamedSharding(mesh, P(None, "model"))
    state = tx.init({"w": jax.device_put(jnp.zeros((20, 64)), place)})
    update = jax.jit(lambda x, state: tx.update(unreduce({"w": x}, "data"), state))
    for step, (output, own) in zip(steps, trail(tx, halves), strict=True):
      spread = NamedSharding(mesh, P("data", None, "model"))
      mean, state = update(jax.device_put(step / np.float32(workers), spread), state)
      assert mean["w"].sharding.spec == P(None, "model")
      expected = np.concatenate([output["a"][0], output["b"][0]], axis=1)
      np.testing.assert_array_equal(mean["w"], expected)
      used = np.asarray(state.memory.own[axes][0].used).reshape(workers, 2, -1)
      for part in range(2):
        kept = own.memory.own[("data",)][part]
        np.testing.assert_array_equal(used[:, part], kept.used)


def test_explain_says_how_many_slots_were_used():
  """A mean over workers: of one all elements are equal, of which it sends no more."""
  codec = TopK(density=0.05, selection="threshold")
  optimizer = optax.chain(transformation(codec, "all_gather"), optax.sgd(0.1))
  grads = jax.tree.map(jnp.asarray, gradients(1)[0])
  grads |= {"v": grads["v"][:, :300], "w": grads["w"].at[1].set(1.0)}
  params = jax.tree.map(lambda x: x[0], grads)
  state = jax.vmap(optimizer.init, axis_name="data")(grads)
  _, state = jax.jit(jax.vmap(optimizer.update, axis_name="data"))(grads, state)
  sent = {k: (state[0].residual[k] == 0).reshape(N, -1).sum(1) for k in "vw"}
  assert sent["w"][1] == 32 and sent["w"].min() < sent["w"].max()
  # As a map under a mesh would give it: what workers have of their own is stacked.
  own = jax.tree.map(lambda x: x.reshape(-1), state[0].memory)
  state = (state[0]._replace(memory=own), state[1])
  explanation = gradcomp.explain(optimizer, params, workers=N, opt_state=state)
  b, v, w = explanation.leaves
  assert (b.slots, v.slots, w.slots) == (None, 30, 64)
  assert (v.used, w.used) == (sent["v"].mean(), sent["w"].mean())
  lines = [line.split() for line in str(explanation).splitlines()]
  assert lines[0][-2:] == ["slots", "used"]
  assert lines[3][-2:] == ["64", f"{w.used:,.0f}"] and len(lines[1]) < len(lines[3])
  before = gradcomp.explain(optimizer, params, workers=N)
  assert [leaf.used for leaf in before.leaves] == [None] * 3
  with pytest.raises(ValueError, match="`opt_state` must be that of 2 workers"):
    gradcomp.explain(optimizer, params, workers=2, opt_state=state)
