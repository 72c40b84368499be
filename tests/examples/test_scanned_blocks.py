"""The blocks of the language model in one loop are the blocks one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import language_model
from examples.lib import networks
from examples.lib.calling import functions
from examples.lib.methods import in_blocks, make_exchange
from examples.lib.optimizers import weights
from examples.lib.training import Task, compile_step, init_state
from tests.plugins.slow_cases import slow
from tests.support import modes

SIZES = dict(width=32, heads=2, layers=3)
TOKENS = np.random.default_rng(0).integers(16, size=(8, 9)).astype(np.uint8)
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


@functools.cache
def both(**options):
  """The functions of the network with and without a loop, and parameters of both."""
  made = [
    networks.Transformer(16, stacked=x, **SIZES, **options) for x in (True, False)
  ]
  loop, unrolled = (functions(x, BATCH[0]) for x in made)
  params = jax.device_get(jax.jit(loop.init)(jax.random.key(1)))
  rest = {name: x for name, x in params.items() if name != "blocks"}
  one = lambda i: jax.tree.map(lambda x: x[i], params["blocks"])
  return loop, unrolled, params, rest | {f"block{i}": one(i) for i in range(3)}


def test_a_loop_has_the_logits_and_gradients_of_unrolled_blocks():
  loop, unrolled, params, apart = both()
  shapes = jax.tree.map(jnp.shape, jax.eval_shape(unrolled.init, jax.random.key(0)))
  assert jax.tree.map(jnp.shape, apart) == shapes
  loss = lambda run: lambda params: jnp.mean(run.train(params, BATCH[0], None) ** 2)
  grad = lambda run: jax.value_and_grad(loss(run))
  both_of = jax.jit(lambda params, apart: (grad(loop)(params), grad(unrolled)(apart)))
  (value, grads), (want, expected) = jax.device_get(both_of(params, apart))
  # XLA fuses other operations in a loop: some ulp of float32, over three blocks.
  np.testing.assert_allclose(value, want, rtol=1e-5)
  for i in range(3):
    own = jax.tree.map(lambda x, i=i: x[i], grads["blocks"])
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
      own,
      expected[f"block{i}"],
    )


def test_each_block_drops_units_of_its_own():
  """With the same parameters in all blocks, and nothing but dropout between them."""
  loop, _, params, _ = both(dropout=0.5)

  @jax.jit
  def train(key):
    seen = []

    def scan(body, x, layers):
      _, keys = layers
      seen.append(jax.random.key_data(keys))
      return jax.lax.scan(body, x, layers)

    return loop.train(params, BATCH[0], key, scan=scan), seen

  before, after = train(jax.random.key(1)), train(jax.random.key(2))
  assert not np.array_equal(before[0], after[0])
  seen = before[1] + after[1]
  assert len(seen) == 2 and all(len(np.unique(keys, axis=0)) == 3 for keys in seen)
  assert np.array_equal(
    loop.test(params, None, BATCH[0]), loop.test(params, None, BATCH[0])
  )


def options_of(*given):
  return language_model.make_parser().parse_args(["--model", "transformer", *given])


@pytest.mark.parametrize(
  "codec, feedback",
  [("qsgd-4", "error"), *slow(("f32", "none"), ("blocktop", "error"))],
)
def test_steps_are_those_of_unrolled_blocks(codec, feedback):
  """Within what rounds: float32 to rounding; codes may fall on the other side."""
  workers = 4
  mesh, losses, sent = modes.mesh(workers), [], []
  _, _, params, apart = both()
  for given, first in ((["--scan"], params), ([], apart)):
    args = options_of("--codec", codec, "--feedback", feedback, *given)
    method = language_model.methods.METHODS[codec]
    optimizer = optax.chain(make_exchange(method, args, seed=0), optax.adam(1e-2))
    model = networks.Transformer(16, stacked=args.scan, **SIZES)
    task = Task(model, BATCH, mesh)
    step, wire = compile_step(task, optimizer, BATCH)
    sent.append(wire.bytes_sent)
    place = jax.NamedSharding(mesh, jax.P())
    now = jax.device_put(jax.tree.map(np.array, first), place)
    state, batch = init_state(task, optimizer, now), task.place(BATCH)
    run = []
    for _ in range(8):
      now, state, metrics = step(now, state, batch)
      run.append(float(metrics["loss"]))
    losses.append(run)
  np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-5)
  # Adam's first steps have the size of the rate whatever the gradient is, so that
  # rounding differently costs little of what eight steps gain.
  np.testing.assert_allclose(*losses, rtol=1e-3 if codec == "f32" else 0.1)
  assert losses[0][-1] < 0.9 * losses[0][0]
  # Rows of a block fill up by themselves, and not with those of others.
  assert sent[1] <= sent[0]


def test_labels_and_decay_know_the_stack():
  *_, params, apart = both()
  labels = in_blocks(params)
  assert set(jax.tree.leaves(labels["blocks"])) == {"blocks"}
  assert set(jax.tree.leaves([labels["embed"], labels["norm"]])) == {"rest"}
  decay, each = weights(params), weights(apart)
  assert decay["blocks"] == each["block0"]
  assert decay["embed"] == each["embed"]


REFUSED = [
  (["--model", "lstm", "--codec", "f32"], "a model without blocks"),
  (["--codec", "redsync"], "does not go with redsync"),
  (["--codec", "topk-1"], "does not go with topk-1"),
  (["--codec", "qsgd-4-nonuniform"], "does not go with qsgd-4-nonuniform"),
  (["--codec", "none"], "does not go with none"),
  (["--local-steps", "4", "--codec", "f32"], "--local-steps does not go"),
  (["--parallel", "zero"], "--scan does not go with --parallel zero"),
]


@pytest.mark.parametrize("given, words", REFUSED)
def test_options_that_do_not_go_with_a_loop_are_refused(given, words, capsys):
  with pytest.raises(SystemExit):
    language_model.main(["--model", "transformer", "--scan", *given])
  assert words in capsys.readouterr().err
