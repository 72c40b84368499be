"""Trainers of other projects send 4 bits, and take the steps they took before."""

import contextlib
import importlib

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import gradcomp
from benchmarks.pages import records
from examples.lib import trainers
from examples.trainers import __main__ as table
from tests.plugins.slow_cases import slow
from tests.support.pages import ROOT

NEWEST = {"maxtext": "data", "levanter": "replica"}  # the axis of the mesh of each
AXES = {"tunix": {"fsdp": 8}, "kauldron": {"devices": 8}, "keras": {"batch": 8}}
AXES |= {"scanned": {"data": 4, "tensor": 2}, "maxtext": {"data": 4, "tensor": 2}}
AXES["levanter"] = {"data": 2, "replica": 4}
NAMES = ["linen", *slow("nnx", "equinox", "tunix", "kauldron", "scanned", "keras")]
NAMES += slow(*NEWEST)
# Of packages that these trainers import.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def train(monkeypatch):
  """Trains, and returns the loss and the bytes over the axis of the workers."""
  impl = jax.config.jax_default_prng_impl  # which MaxText sets

  def run(name, steps, compressed, options=""):
    if name not in ("linen", "nnx", "scanned"):
      pytest.importorskip(name)
    example = importlib.import_module(f"examples.trainers.{name}")
    if options:
      monkeypatch.setattr(example, "OPTIONS", f"{example.OPTIONS} {options}")
    axes = AXES.get(name, {"data": 8})
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), kinds)
    with contextlib.nullcontext() if name in NEWEST else jax.set_mesh(mesh):
      loss, program = example.train(steps, compressed)
    return loss, trainers.sent(program, mesh, NEWEST.get(name, next(iter(axes))))

  yield run
  jax.config.update("jax_default_prng_impl", impl)


@pytest.mark.parametrize("name", NAMES)
def test_sent_densely_steps_are_those_of_the_plain_trainer(name, train, monkeypatch):
  # Steps of fixed size would hide a mean that is a sum, and so would clipping.
  monkeypatch.setattr(optax, "adam", lambda _: optax.sgd(0.1))
  options = "opt_type=sgd gradient_clipping_threshold=2" * (name == "maxtext")
  loss, sent = train(name, 5, False, options)
  _, few = train(name, 1, True, options)
  # 4 of 32 bits and scales, and small leaves in full. But JAX adds up both gradients of
  # an embedding that is the output layer, too.
  assert 0.1 < few / sent < 0.17
  dense = lambda bits, axis_name: gradcomp.dense(axis_name=axis_name)
  monkeypatch.setattr(gradcomp, "qsgd", dense)
  monkeypatch.setattr(gradcomp.codecs, "QSGD", lambda bits: gradcomp.codecs.Dense())
  dense_loss, dense_sent = train(name, 5, True, options)
  # Sums of a batch in another order, over five steps.
  assert dense_loss == pytest.approx(loss, rel=1e-5)
  # Levanter's plain step adds up some gradients over both axes before it cuts them.
  assert dense_sent == pytest.approx(sent, rel=0.3 if name == "levanter" else 0.2)


@pytest.mark.parametrize("name", slow(*NEWEST))
def test_100_steps_of_four_bits_end_near_those_of_float32(name, train):
  loss, _ = train(name, 100, False)
  few, _ = train(name, 100, True)
  assert few < 1.1 * loss + 0.02


def test_examples_are_short_and_in_the_record():
  for name in table.PACKAGES | table.NEWEST:
    assert (ROOT / "examples" / "trainers" / f"{name}.py").read_text().count("\n") <= 60
    title, what, changed = table.about(name)
    record = "trainers-newest.md" if name in table.NEWEST else "trainers.md"
    (row,) = [x for x in records.rows(record) if x["trainer"] == title]
    assert (row["what changes"], row["lines changed"]) == (what, changed)


@pytest.mark.slow
def test_the_llama_of_tunix_constrains_its_activations(monkeypatch):
  """Over the axis of the workers, too; its own test for CPUs would leave that out."""
  llama = pytest.importorskip("tunix.models.llama3.model")
  constrained = lambda x, names: jax.lax.with_sharding_constraint(x, jax.P(*names))
  monkeypatch.setattr(llama, "shard", constrained)
  sizes = {"num_layers": 1, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64}
  heads = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
  config = llama.ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-5)
  mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
  with jax.set_mesh(mesh):
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(model, nnx.Param, ...)
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, 64)

    def loss_fn(params, tokens):
      mask = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (len(tokens), 16, 16))
      places = jnp.broadcast_to(jnp.arange(16), tokens.shape)
      logits, _ = nnx.merge(graph, params, others)(tokens, places, None, mask)
      losses = optax.softmax_cross_entropy_with_integer_labels
      return losses(logits[:, :-1].astype(jnp.float32), tokens[:, 1:]).mean()

    tx = gradcomp.dense(axis_name="fsdp")
    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="fsdp", param_specs=jax.P())
    own = jax.jit(lambda *given: tx.update(grad_fn(*given)[1], tx.init(given[0]))[0])
    found, expected = own(params, tokens), jax.jit(jax.grad(loss_fn))(params, tokens)
  # Sums of a batch in another order.
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
