"""The blocks of the language model in one loop are the blocks one after the other."""

import functools

import jax
import numpy as np
import optax
import pytest

from examples import language_model
from examples.lib import texts
from examples.lib.methods import METHODS, make_exchange, weights
from examples.lib.training import Task, compile_step, functions, init_state
from tests.plugins.slow_cases import slow
from tests.support import modes

SIZES = dict(width=32, heads=2, layers=3)
TOKENS = np.random.default_rng(0).integers(16, size=(8, 9)).astype(np.uint8)
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]
SENT = [("f32", "none"), ("qsgd-4", "error"), *slow(("blocktop", "error"))]


@functools.cache
def both(**options):
  """The networks with and without a loop, and equal parameters of each."""
  make = functools.partial(texts.Transformer, 16, **SIZES, **options)
  made = [make(stacked=True), make(stacked=False)]
  params = jax.device_get(jax.jit(functions(made[0], BATCH[0]).init)(jax.random.key(1)))
  apart = {name: x for name, x in params.items() if name != "blocks"}
  for i in range(3):
    apart[f"block{i}"] = jax.tree.map(lambda x, i=i: x[i], params["blocks"])
  return made, (params, apart)


def test_each_block_drops_units_of_its_own():
  (made, _), (params, _) = both(dropout=0.5)

  @jax.jit
  def train(key):
    seen = []

    def scan(body, x, layers):
      seen.append(jax.random.key_data(layers[1]))
      return jax.lax.scan(body, x, layers)

    return functions(made, BATCH[0]).train(params, BATCH[0], key, scan=scan), *seen

  before, after = train(jax.random.key(1)), train(jax.random.key(2))
  assert not np.array_equal(before[0], after[0])
  assert all(len(np.unique(keys, axis=0)) == 3 for _, keys in (before, after))


@pytest.mark.parametrize("codec, feedback", SENT)
def test_steps_are_those_of_unrolled_blocks(codec, feedback):
  """Within what rounds: float32 to rounding; codes may fall on the other side."""
  mesh, losses, sent = modes.mesh(4), [], []
  line = f"--model transformer --codec {codec} --feedback {feedback}"
  for scan, model, now in zip((" --scan", ""), *both(), strict=True):
    args = language_model.make_parser().parse_args((line + scan).split())
    compress = language_model.scanned if args.scan else language_model.compressed
    exchange = make_exchange(METHODS[codec], args, compress, seed=0)
    # In float32, plain descent keeps the size of each gradient.
    descent = optax.sgd(0.5) if codec == "f32" else optax.adam(1e-2)
    optimizer, task = optax.chain(exchange, descent), Task(model, BATCH, mesh)
    step, wire = compile_step(task, optimizer, BATCH)
    sent.append(wire.bytes_sent)
    now = jax.device_put(now, jax.NamedSharding(mesh, jax.P()))
    state, batch = init_state(task, optimizer, now), task.place(BATCH)
    losses.append([])
    for _ in range(8):
      now, state, metrics = step(now, state, batch)
      losses[-1].append(float(metrics["loss"]))
  np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-5)
  # Adam's first steps have the size of the rate whatever the gradient is, so that
  # rounding differently costs little of what eight steps gain.
  np.testing.assert_allclose(*losses, rtol=1e-4 if codec == "f32" else 0.1)
  assert losses[0][-1] < 0.9 * losses[0][0]
  # Rows of a block fill up by themselves, and not with those of others.
  assert sent[1] <= sent[0]


def test_labels_and_decay_know_the_stack():
  _, (params, apart) = both()
  labels = texts.in_blocks(params)
  assert set(jax.tree.leaves(labels["blocks"])) == {"blocks"}
  assert set(jax.tree.leaves([labels["embed"], labels["norm"]])) == {"rest"}
  decay, each = weights(params), weights(apart)
  assert decay["blocks"] == each["block0"] and decay["embed"] == each["embed"]
