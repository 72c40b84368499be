"""Distributed Lion is the paper's, bit for bit, and sends one bit an element."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.contrib import lion, scale_by_lion
from gradcomp.testing import check_transformation, laws
from tests.oracles import sign
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_floats, says

B1, B2, STEPS = 0.9, 0.99, 4
SETTINGS = [*itertools.product(["majority", "mean"], ["all_gather", "two_shot"])]


def mesh(workers):
  auto = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((workers,), ("data",), auto, devices=jax.devices()[:workers])


def gradients(workers, steps=STEPS, size=2100):
  rng = np.random.default_rng(workers)
  return rng.standard_normal((steps, workers, size)).astype(np.float32)


def mix(g, m, b):
  return np.float32(b) * m + np.float32(1 - b) * g


def by_hand(grads, kind, every=None):
  """Each step's direction, and the momenta at the end, from the paper."""
  m = np.zeros_like(grads[0])
  found = []
  for step, g in enumerate(grads, 1):
    own = [sign.sign(x, bucket_size=64, scale="one") for x in mix(g, m, B1)]
    found.append(sign.vote(own, kind))
    m = mix(g, m, B2)
    if every and step % every == 0:
      # The plain mean is the backend's: a power of two of workers, and no NaN.
      m = np.broadcast_to(m.sum(axis=0, dtype=np.float32) / len(m), m.shape)
  return found, m


def run(tx, grads):
  outputs, state = gradcomp.testing.modes.run(
    "vmap", tx, [{"w": jnp.asarray(g)} for g in grads]
  )
  return [np.asarray(x["w"][0]) for x in outputs], np.asarray(state.velocity["w"])


@pytest.mark.parametrize("workers", [3, *slow(2, 8)])
@pytest.mark.parametrize("vote, exchange", SETTINGS)
def test_directions_and_momenta_are_the_papers(vote, exchange, workers):
  tx = scale_by_lion(axis_name="data", vote=vote, exchange=exchange)
  grads = gradients(workers)
  outputs, momenta = run(tx, grads)
  expected, own = by_hand(grads, vote)
  for a, b in zip(outputs, expected, strict=True):
    assert_same_floats(a, b)
  assert_same_floats(momenta, own)


def test_momenta_are_averaged_in_every_kth_step():
  tx = scale_by_lion(axis_name="data", sync_momentum=2)
  grads = gradients(2)
  outputs, momenta = run(tx, grads)
  expected, own = by_hand(grads, "majority", every=2)
  for a, b in zip(outputs, expected, strict=True):
    assert_same_floats(a, b)
  assert_same_floats(momenta, own)
  assert_same_floats(momenta[0], momenta[1])
  outputs, momenta = run(tx, grads[:3])
  assert (momenta[0] != momenta[1]).any()


def test_one_worker_is_optaxs_lion():
  """Schedule, decay and mask included: all operations are rounded one by one."""
  given = dict(b1=B1, b2=B2, weight_decay=0.1, mask={"w": True, "b": False})
  rate = optax.linear_schedule(0.1, 0.01, 4)
  ours, theirs = lion(rate, **given), optax.lion(rate, **given)
  params = mine = {"w": jnp.linspace(-1.0, 1.0, 600), "b": jnp.ones(3)}
  state, own = theirs.init(params), ours.init(mine)
  for g in gradients(1, size=603)[:, 0]:
    grads = {"w": jnp.asarray(g[:600]), "b": jnp.asarray(g[600:])}
    updates, state = theirs.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    updates, own = ours.update(grads, own, mine)
    mine = optax.apply_updates(mine, updates)
  jax.tree.map(assert_same_floats, mine, params)
  assert_same_floats(own[0].velocity["w"], state[0].mu["w"])


def test_signum_and_signsgd_are_settings():
  grads = gradients(3)
  sgd = [sign.vote(np.where(g < 0, -1, 1), "majority") for g in grads]
  for a, b in zip(
    run(scale_by_lion(axis_name="data", b1=0, b2=0), grads)[0], sgd, strict=True
  ):
    assert_same_floats(a, b)
  signum = scale_by_lion(axis_name="data", b1=0.9, b2=0.9)
  m = np.zeros_like(grads[0])
  for g, found in zip(grads, run(signum, grads)[0], strict=True):
    m = mix(g, m, 0.9)  # the new momentum, whose sign is sent
    assert_same_floats(found, sign.vote(np.where(m < 0, -1, 1), "majority"))


def test_a_gradient_that_is_not_finite_leaves_momenta():
  tx = scale_by_lion(axis_name="data")
  grads = gradients(3, steps=2)
  grads[1, 0, 70] = np.nan
  outputs, momenta = run(tx, grads)
  _, before = by_hand(grads[:1], "majority")
  assert np.isnan(outputs[1][64:128]).all() and np.isfinite(outputs[1][:64]).all()
  assert_same_floats(momenta[:, 64:128], before[:, 64:128])


def test_every_law():
  """All modes have the same bits, the workers agree, and bytes are explained."""
  check_transformation(scale_by_lion(axis_name="data"), steps=3)


@pytest.mark.slow
def test_every_law_of_means_in_two_stages():
  tx = scale_by_lion(axis_name="data", vote="mean", exchange="two_shot")
  check_transformation(tx, steps=3)


def test_averaged_momenta_have_the_same_bits_in_every_mode():
  """All laws but that of bytes, which compiles a step without its state."""
  tx = scale_by_lion(axis_name="data", sync_momentum=2)
  rng = np.random.default_rng(2)
  steps = [
    {"w": jnp.asarray(rng.standard_normal((4, 9, 70)), jnp.float32)} for _ in range(3)
  ]
  laws.state_is_stable(tx, steps)
  laws.workers_agree(tx, steps)
  laws.same_bits_in_every_mode(tx, steps)


@functools.cache
def sent_bits(vote, exchange, every=None):
  """Bits an element that a worker of four sends, as the compiled step has them."""
  tx = scale_by_lion(
    axis_name="data", vote=vote, exchange=exchange, sync_momentum=every
  )
  size = 2**18

  def step(g):
    update, state = tx.update(g[0], tx.init(g[0]))
    return update, state.velocity

  mapped = jax.shard_map(
    step, mesh=mesh(4), in_specs=P("data"), out_specs=(P(), P("data"))
  )
  compiled = (
    jax.jit(mapped).lower(jax.ShapeDtypeStruct((4, size), jnp.float32)).compile()
  )
  report = gradcomp.wire_report(compiled)
  return 8 * report.bytes_sent / size


@pytest.mark.parametrize("vote, exchange", SETTINGS)
def test_bits_on_the_wire(vote, exchange):
  payload = 66 / 64  # signs, and two bits for each bucket of 64
  back = 2 if vote == "majority" else 4  # ceil(log2(2 * 4 + 2))
  expected = 3 * payload if exchange == "all_gather" else 3 / 4 * (payload + back)
  assert sent_bits(vote, exchange) == expected


def test_explain_knows_how_often_momenta_are_averaged():
  params = jax.ShapeDtypeStruct((2**18,), jnp.float32)

  def told(every):
    tx = scale_by_lion(axis_name="data", exchange="two_shot", sync_momentum=every)
    return gradcomp.explain(tx, params, workers=4)

  signs, dense = told(None).bytes_sent, 2 * 3 / 4 * 4 * 2**18
  assert told(10).bytes_sent == signs + dense
  assert told(10).bytes_per_step == signs + dense / 10
  assert sent_bits("majority", "two_shot", 1) == 8 * (signs + dense) / 2**18


def test_a_state_goes_on_with_other_workers():
  """The mean of momenta stays, and two that meet in one worker are averaged."""
  tx = lion(0.1, axis_name="data")
  params = {"w": jnp.ones(512)}
  states = {}
  for n in (4, 2):
    with jax.set_mesh(mesh(n)):
      states[n] = tx.init(params)
  own = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
  state = states[4]
  velocity = jax.device_put(own.ravel(), state[0].velocity["w"].sharding)
  state = (state[0]._replace(velocity={"w": velocity}), *state[1:])
  with jax.set_mesh(mesh(2)):
    moved = gradcomp.reshard_state(
      tx, params, state, axis_name="data", old_workers=4, workers=2, keep="mean"
    )
  found = np.asarray(moved[0].velocity["w"]).reshape(2, 512)
  assert_same_floats(found, (own[:2] + own[2:]) / 2)


def test_mistakes():
  with pytest.raises(ValueError, match=says("`b1`", "below 1", "1.0")):
    lion(0.1, b1=1.0)
  with pytest.raises(ValueError, match=says("`sync_momentum`", "steps", "0")):
    lion(0.1, axis_name="data", sync_momentum=0)
  with pytest.raises(ValueError, match=says("`sync_momentum`", "axis_name=")):
    lion(0.1, sync_momentum=3)
  with pytest.raises(ValueError, match=says("`vote`", "most")):
    lion(0.1, vote="most")
