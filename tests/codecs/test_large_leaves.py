"""A CPU goes through large leaves in the shape of their tiles, with the same bits.

But not through those that JAX may sharded over Auto axes.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import ErrorFeedback, MomentumFeedback
from gradcomp._src.codecs import protocol
from gradcomp._src.exchange import layout
from gradcomp._src.kernels import materialize
from gradcomp._src.kernels.materialize import LARGE
from gradcomp.codecs import QSGD, EightBit, FloatCast, Natural, OneBit, Ternary, TopK
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.support import laws, modes

WORKERS = 2
SHAPE = (LARGE // 256, 256)  # whole tiles of every codec here

CASES = [
  (QSGD(bits=4), "all_gather", ErrorFeedback()),
  (QSGD(bits=4, share_scale=True), "all_gather", ErrorFeedback()),
  (FloatCast(), "two_shot", ErrorFeedback()),
  (OneBit(), "two_shot", MomentumFeedback(residual_dtype="bfloat16")),
  (TopK(density=0.01), "all_gather", MomentumFeedback(nesterov=True)),
  *slow(
    (TopK(density=0.01), "two_shot", MomentumFeedback(residual_dtype="bfloat16")),
    (TopK(density=0.01, quantize="mean"), "all_gather", ErrorFeedback()),
    (TopK(density=0.01), "all_gather", ErrorFeedback(residual_dtype="bfloat16")),
    (TopK(density=0.01), "all_gather", ErrorFeedback(residual_dtype="int8")),
    (OneBit(), "two_shot", MomentumFeedback()),
    (OneBit(), "all_gather", ErrorFeedback()),
    (OneBit(), "all_gather", ErrorFeedback(residual_dtype="int8")),
    (laws.kept(Ternary()), "psum", ErrorFeedback()),
    (EightBit(), "ring", ErrorFeedback()),
    (QSGD(bits=4, levels="nonuniform"), "two_shot", MomentumFeedback()),
  ),
]


def run(codec, exchange, feedback):
  """Means of two steps, of which one has a NaN and an infinity, and what is kept."""
  steps = laws.gaussian((2, WORKERS, *SHAPE))
  steps[1, 0, 3, 5], steps[1, 1, 100, 7] = np.nan, np.inf
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback=feedback)
  outputs, state = modes.run_with_state("shard_map", tx, list(steps))
  return jax.device_get((outputs, (state.residual, state.velocity)))


@pytest.mark.parametrize(("codec", "exchange", "feedback"), CASES, ids=str)
def test_they_have_the_bits_of_small_leaves(codec, exchange, feedback, monkeypatch):
  large = run(codec, exchange, feedback)
  for module in (layout, materialize):
    monkeypatch.setattr(module, "LARGE", 2 * LARGE)
  small = run(codec, exchange, feedback)
  jax.tree.map(np.testing.assert_array_equal, large, small)
  means, kept = large
  assert np.isnan(means[1]).any()
  for x in jax.tree.leaves(kept):
    assert np.isfinite(x.astype(np.float32)).all()


@pytest.mark.parametrize("codec", [QSGD(bits=4), TopK(density=0.01)], ids=str)
def test_the_error_of_a_narrow_mean_joins_the_unsent_part(codec):
  """Addends of plain jit are wider than their mean, of the parameters' dtype."""
  tx = gradcomp.compress(codec, axis_name="data", feedback="error")
  grad_fn = gradcomp.value_and_grad(lambda w, x: jnp.vdot(w, x[0]), axis_name="data")

  def update(w, x):
    grads = grad_fn(w, x)[1]
    assert grads.dtype == jnp.float32
    return tx.update(grads, tx.init(w), w)

  w, x = jnp.ones(SHAPE, jnp.float16), jnp.ones((WORKERS, *SHAPE), jnp.float16)
  with jax.set_mesh(modes.mesh(WORKERS, AxisType.Explicit)):
    x = jax.device_put(x, P("data"))
    mean, state = jax.jit(update).eval_shape(jax.device_put(w, P()), x)
  assert (mean.dtype, state.residual.dtype) == (jnp.float16, jnp.float32)


def compiled(tx, size, workers=None):
  """A step of one leaf, which gives its state before its update."""
  like = jax.ShapeDtypeStruct((size,), jnp.float32)
  state = jax.eval_shape(tx.init, like)
  # The state comes first: JAX gives its memory to the first result of the same shape.
  step = lambda x, state: tx.update(x, state)[::-1]
  if workers is not None:
    specs = (P("data"), P())
    mesh = modes.mesh(workers)
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[::-1])
  return jax.jit(step, donate_argnums=1).lower(like, state).compile()


@pytest.mark.parametrize("codec", [QSGD(bits=4), *slow(OneBit(), FloatCast())], ids=str)
def test_no_unsent_part_is_held(codec):
  """It is computed from the worker's own rows, where it is stored."""
  step = compiled(gradcomp.compress(codec, feedback=ErrorFeedback()), 8 * LARGE)
  assert step.memory_analysis().temp_size_in_bytes < 0.3 * 4 * 8 * LARGE


@pytest.mark.parametrize("codec", [QSGD(bits=4), *slow(Natural())], ids=str)
def test_a_payload_decodes_in_the_shape_of_tiles(codec, monkeypatch):
  """It has the bits of one that is decoded element by element."""
  x = laws.gaussian(SHAPE)
  payload = laws.encoder(codec)(x, laws.KEY)
  decoder = lambda: jax.jit(functools.partial(codec.decode, like=x)).lower(payload)
  large = decoder().compile()
  monkeypatch.setattr(protocol, "LARGE", 2 * LARGE)
  small = decoder().compile()
  np.testing.assert_array_equal(large(payload), small(payload))
  found = [text.as_text().count(" conditional(") for text in (large, small)]
  assert found == [1, 0]


@pytest.mark.parametrize(
  ("codec", "exchange"),
  [
    (Natural(), TwoShot(feedback=False)),
    *slow((FloatCast(), "ring"), (Ternary(), TwoShot(feedback=False))),
  ],
  ids=str,
)
def test_sums_are_written_in_rows_before_they_are_sent(codec, exchange):
  """Else XLA computes their words in the shape of the message, one by one."""
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback=None)
  text = compiled(tx, 8 * WORKERS * LARGE, WORKERS).as_text()
  words = re.findall(r"= \(u32\[\d+,\d+\].*? conditional\(", text)
  assert len(words) == 2  # of the worker's own rows, and of the sums


def test_the_first_of_a_bucket_is_written_before_it_is_compared():
  """Else XLA adds a gradient and its residual anew for each comparison, one by one."""
  tx = gradcomp.compress(OneBit(), feedback=ErrorFeedback())
  text = compiled(tx, 8 * LARGE).as_text()
  sums = [part for part in re.split(r"\n}\n", text) if " reduce(" in part]
  assert sums
  assert not any(" slice(" in part for part in sums)


@pytest.mark.parametrize(
  "codec", [Ternary(), *slow(QSGD(bits=4, share_scale=True))], ids=str
)
def test_words_are_written_under_vmap_too(codec):
  """Else XLA encodes a word anew for each of the codes in it, which are added."""
  tx = gradcomp.compress(codec, axis_name="data", exchange="psum", feedback=None)
  step = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
  like = jax.ShapeDtypeStruct((WORKERS, 8 * LARGE), jnp.float32)
  text = jax.jit(step).lower(like).compile().as_text()
  assert re.findall(rf"= \(u32\[{WORKERS},\d+,\d+\].*? conditional\(", text)


@pytest.mark.parametrize("spec", [P(None, "model"), P()], ids=str)
def test_a_leaf_keeps_its_place_on_auto_axes(spec):
  """In a map of the data axis alone, where XLA places what a train step would.

  Else the second step of a training would be compiled again.
  """
  mesh = jax.make_mesh((WORKERS, 2), ("data", "model"), (AxisType.Auto,) * 2)
  tx = laws.compressed(QSGD(bits=4), "all_gather", ErrorFeedback())
  place = lambda shape, spec: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
  params, grads = place(SHAPE, spec), place((WORKERS, *SHAPE), P("data", *spec))
  with jax.set_mesh(mesh):
    state = tx.init(params)
  update = modes.on_mesh(tx, mesh, state, axis_names={"data"})
  mean, kept = update.lower(grads, state).compile().output_shardings
  assert mean.is_equivalent_to(params.sharding, 2)
  assert kept.residual.is_equivalent_to(state.residual.sharding, 2)
