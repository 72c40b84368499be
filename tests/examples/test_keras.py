"""Keras trains by its own ``fit()`` with a compressed exchange."""

import jax
import numpy as np
import pytest

import gradcomp
from examples.trainers.keras import program  # chooses JAX for Keras

keras = pytest.importorskip("keras")
layers, P = keras.layers, jax.P
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROWS, WIDTH = 64, 64  # a batch
dense = lambda: gradcomp.dense(axis_name="batch")
four_bits = lambda: gradcomp.qsgd(bits=4, axis_name="batch", feedback="error", key=7)


@pytest.fixture(autouse=True)
def eight_devices():
  with keras.distribution.DataParallel().scope():
    yield


def batches(count):
  """Inputs, and outputs of a fixed network to be learned."""
  rng = np.random.default_rng(0)
  hidden, out = rng.normal(size=(WIDTH, WIDTH)) / 8, rng.normal(size=(WIDTH, 4)) / 8
  x = rng.normal(size=(ROWS * count, WIDTH)).astype(np.float32)
  return x, (np.tanh(x @ hidden) @ out).astype(np.float32)


def made(*between, optimizer=None, exchange=None, loss="mse", **options):
  """A model with layers between, which is compressed if an exchange is given."""
  keras.utils.set_random_seed(0)
  hidden = [layers.Dense(256, "tanh"), *between, layers.Dense(256, "tanh")]
  model = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(4)])
  # Its steps would be of fixed size with Adam, and a mean could be a sum.
  optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
  model.compile(optimizer, loss, **options)
  if exchange is not None:
    gradcomp.contrib.keras(model, exchange)
  return model


def fit(model, x, y, **options):
  """The history of an epoch, whose batches are waited for."""
  wait = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: jax.block_until_ready(model._jax_state)
  )
  options = {"batch_size": ROWS, "shuffle": False, "verbose": 0} | options
  return model.fit(x, y, callbacks=[wait], **options).history


def values(model):
  return [x.numpy() for x in (*model.variables, *model.optimizer.variables)]


def close(model, other):
  """Returns True if weights are equal, but for sums of a batch in another order."""
  pairs = zip(model.get_weights(), other.get_weights(), strict=True)
  return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def bytes_sent(model, x, y):
  """The bytes of a step that a worker sends over the batch's axis."""
  mesh = keras.distribution.distribution().device_mesh.backend_mesh
  report = gradcomp.wire_report(program(model, (x[:ROWS], y[:ROWS])), mesh=mesh)
  return report.by_axis["batch"].bytes_sent


def state_of(model):
  """The variables of an exchange with a residual of each of six leaves."""
  return [x.value for x in model.optimizer.variables[-9:]]


def test_losses_of_100_steps_and_bytes():
  x, y = batches(100)
  models = [made(exchange=exchange) for exchange in (None, dense(), four_bits())]
  plain, same, near = (fit(model, x, y)["loss"][0] for model in models)
  # Sums of a batch in another order.
  assert same == pytest.approx(plain, rel=1e-6)
  assert near == pytest.approx(plain, rel=1e-3)
  plain, same, few = (bytes_sent(model, x, y) for model in models)
  # 4 of 32 bits, scales, and small leaves in full.
  assert same == pytest.approx(plain, rel=1e-3)
  assert few < 0.17 * plain
  count, key, *residuals = state_of(models[2])
  assert (count, key.tolist()) == (100, [0, 7])
  assert count.sharding.spec == key.sharding.spec == P()
  assert [x.sharding.spec for x in residuals] == [P("batch")] * 7


def test_a_model_is_compressed_anew_from_where_it_is():
  x, y = batches(2)
  model = made()
  fit(model, x, y)
  gradcomp.contrib.keras(model, four_bits())
  fit(model, x, y)
  assert state_of(model)[0] == 2
  model.compile("sgd", "mse")
  with pytest.raises(ValueError, match="expected 9"):  # variables of the exchange
    fit(model, x, y)


def test_refusals(monkeypatch):
  refused = pytest.raises(ValueError, match="`model` must be compiled and built, under")
  unbuilt = keras.Sequential([layers.Dense(1)])
  unbuilt.compile("sgd", "mse")
  for model in (unbuilt, keras.Sequential([keras.Input((2,)), layers.Dense(1)])):
    with refused:
      gradcomp.contrib.keras(model, dense())
  model = made()
  # It would call the class's train_step.
  with monkeypatch.context() as patched, refused:
    patched.setattr(keras.config, "is_nnx_enabled", lambda: True)
    gradcomp.contrib.keras(model, dense())
  keras.distribution.set_distribution(None)  # until the fixture's scope ends
  with refused:
    gradcomp.contrib.keras(model, dense())


def test_a_saved_model_continues_with_the_same_bits(tmp_path):
  x, y = batches(4)
  path = tmp_path / "model.keras"
  model, continued = made(exchange=four_bits()), made(exchange=four_bits())
  fit(model, x, y)
  model.save(path)
  continued.load_weights(path)
  plain = keras.saving.load_model(path, compile=False)
  assert all(map(np.array_equal, plain.get_weights(), model.get_weights()))
  assert fit(continued, x, y) == fit(model, x, y)
  assert all(map(np.array_equal, values(continued), values(model)))


OPTIMIZERS = {
  "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=4),
  "clipping": lambda: keras.optimizers.SGD(0.5, clipnorm=0.01, use_ema=True),
  "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_gets_means(name):
  x, y = batches(6)
  make = OPTIMIZERS[name]
  plain, same = made(optimizer=make()), made(optimizer=make(), exchange=dense())
  first = plain.get_weights()[0]
  fit(plain, x, y)
  fit(same, x, y)
  assert close(same, plain)
  assert not np.allclose(first, plain.get_weights()[0], atol=1e-4)
  count, key = (x.value for x in same.optimizer.variables[-2:])
  assert (count, key.tolist()) == (6, [0, 0])


def test_each_worker_draws_its_own_dropout():
  """The gradient of a weight counts the rows that it was kept in, of eight a worker."""
  model = keras.Sequential([keras.Input((WIDTH,)), layers.Dropout(0.5, seed=3)])
  model.add(layers.Dense(1, kernel_initializer="zeros"))
  model.compile(keras.optimizers.SGD(1.0), "mse")
  gradcomp.contrib.keras(model, dense())
  fit(model, np.ones((ROWS, WIDTH)), np.ones((ROWS, 1)))
  kept = np.round(model.layers[-1].kernel.numpy() * ROWS / 4)
  assert np.any(kept % 8)  # with one mask for all, each was kept by all workers or none
  assert [x.value.tolist() for x in model.non_trainable_variables] == [[3, 1]]


def test_batch_norm_has_the_statistics_of_a_workers_rows():
  """All workers have the same rows, so that they are those of the batch."""
  x, y = (np.tile(part[:8], (24, 1)) for part in batches(1))
  plain = made(layers.BatchNormalization())
  same = made(layers.BatchNormalization(), exchange=dense())
  fit(plain, x, y)
  fit(same, x, y)
  assert close(same, plain)


def test_metrics_and_counters_are_those_of_the_batch():
  x, y = batches(6)
  normalization = layers.Normalization()  # which counts in int32
  normalization.adapt(np.tile(x, 4))
  metrics = {"positives": keras.metrics.TruePositives, "area": keras.metrics.AUC}
  models, histories = [], []
  for exchange in (None, dense()):
    own = [make(name=name) for name, make in metrics.items()]
    options = {"loss": "binary_crossentropy", "metrics": own, "exchange": exchange}
    models.append(made(normalization, **options))
    histories.append(fit(models[-1], x, np.float32(y > 0), validation_split=0.5))
  plain, same = histories
  assert same == {name: pytest.approx(x, rel=1e-5) for name, x in plain.items()}
  _, (_, counters, *_) = program(models[1], (x[:ROWS], y[:ROWS])).out_info
  own = [x.value.dtype for x in models[1].non_trainable_variables]
  assert [x.dtype for x in counters] == own and np.int32 in own


def test_with_a_model_axis_each_shard_has_a_residual():
  x, y = batches(4)
  devices = keras.distribution.list_devices()
  mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
  layout = keras.distribution.LayoutMap(mesh)
  layout[".*dense.*kernel"] = (None, "model")
  with keras.distribution.ModelParallel(layout_map=layout).scope():
    models = [made(exchange=exchange) for exchange in (None, dense(), four_bits())]
    for model in models:
      fit(model, x, y)
    plain, _, few = (bytes_sent(model, x, y) for model in models)
  assert close(*models[:2])
  assert few < 0.18 * plain
  assert state_of(models[2])[2].sharding.spec == P("batch", "model")
