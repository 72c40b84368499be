"""Sparse leaves in pieces have the mean of the whole; cut leaves are sent by parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.exchange.layout import default_min_leaf_size
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import Dense, RandomK, TopK
from tests.support.assertions import assert_same_bits
from tests.support.sparse_steps import N, gradients, trail, transformation

SAMPLED = TopK(density=0.05, selection="sampled", search_every=2)


def test_pieces_send_what_the_whole_sends():
  """A message for each leaf: the same mean, and the same is kept."""
  options = dict(momentum=0.9, nesterov=True)
  whole, pieces = (
    transformation(SAMPLED, "all_gather", message_bytes=size, **options)
    for size in (None, 0)
  )
  like = {
    k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in gradients(1)[0].items()
  }
  counts = [gradcomp.explain(tx, like, workers=N).messages for tx in (whole, pieces)]
  assert counts == [1, 3]
  steps = gradients(3)
  for one, several in zip(trail(whole, steps), trail(pieces, steps), strict=True):
    assert_same_bits(one, several)


def test_parts_of_a_leaf_are_selected_from_apart():
  """Each device has a part of a leaf sharded over a model axis, and its memory."""
  workers, axes = 2, ("data", "model")
  tx = transformation(SAMPLED, "all_gather", 0.9, True)
  rng = np.random.default_rng(0)
  steps = [rng.standard_normal((workers, 20, 64)).astype(np.float32) for _ in range(3)]
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


@pytest.mark.parametrize("codec", [TopK(density=0.01), RandomK(density=0.01)])
def test_leaves_below_a_hundredth_of_a_percent_are_dense(codec):
  """Of a million elements, those of leaves that together hold less than a hundred."""
  sizes = [40, 50, 60, 5000, 994_850]
  assert sum(sizes) == 10**6
  assert default_min_leaf_size(sizes, drops=codec.facts.drops) == 60
  assert default_min_leaf_size(sizes) == 5000
  assert default_min_leaf_size([99, 999_901], drops=True) == 999_901
  assert default_min_leaf_size([100, 999_900], drops=True) == 100
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
  leaves = gradcomp.explain(tx, like, workers=N).leaves
  assert [leaf.codec == Dense() for leaf in leaves] == [True, True, False, False, False]


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
