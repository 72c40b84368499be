"""The example trainers run as their users run them: as scripts."""

import io
import math
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.support.scripts import finish, read, start

SHORT = ["--model", "mlp", "--steps", 4, "--evaluate-every", 2]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
  """An empty home folder, in which neither a test nor a process may leave anything."""
  folder = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HOME", str(folder))
    # matplotlib keeps a list of fonts.
    patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
  """The embedded set and the folder that it was prepared in."""
  from examples.lib.data import images as data

  folder = str(tmp_path_factory.mktemp("datasets"))
  return data.load("digits", folder), folder


@pytest.fixture(scope="module")
def comparison(digits, tmp_path_factory):
  """Two codecs from two seeds on four workers: what it wrote, and the folder."""
  folder = tmp_path_factory.mktemp("comparison")
  args = ["--compare", "f32", "qsgd-4", "--seeds", 2, "--devices", 4, *SHORT]
  return finish(start(*args, "--data-dir", digits[1], "--output", folder)), folder


def test_table_and_summary(comparison):
  (out, _), folder = comparison
  summary = read(folder / "summary.csv")
  assert [(row["codec"], row["seed"]) for row in summary] == [
    ("f32", "0"),
    ("f32", "1"),
    ("qsgd-4", "0"),
    ("qsgd-4", "1"),
  ]
  f32, qsgd = summary[0], summary[2]
  assert f32["bytes_a_step"] == f32["f32_bytes_a_step"] == qsgd["f32_bytes_a_step"]
  assert int(qsgd["bytes_a_step"]) < 0.14 * int(f32["bytes_a_step"])
  for row in summary:
    assert f"{int(row['bytes_a_step']):,}" in out
    assert float(row["step_ms"]) > 0
  assert "±" in out


def test_curves(comparison):
  _, folder = comparison
  curves = read(folder / "curves.csv")
  assert [(row["codec"], row["seed"], row["step"]) for row in curves] == [
    (codec, seed, step)
    for codec in ("f32", "qsgd-4")
    for seed in ("0", "1")
    for step in ("2", "4")
  ]
  for row in curves:
    assert math.isfinite(float(row["test_loss"]))
    assert 0 <= float(row["test_accuracy"]) <= 1
  for first, second in zip(curves[::2], curves[1::2], strict=True):
    assert 0 < float(second["train_loss"]) < float(first["train_loss"])
    assert int(second["bytes_sent"]) == 2 * int(first["bytes_sent"])
  assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_progress_without_a_terminal_is_lines(comparison):
  (_, err), _ = comparison
  lines = [line.partition(",")[0] for line in err.splitlines() if " seed " in line]
  assert lines == [
    f"{codec} seed {seed}: {step} of 4"
    for codec in ("f32", "qsgd-4")
    for seed in (0, 1)
    for step in range(1, 5)
  ]
  assert "\r" not in err


@pytest.mark.parametrize("steps", [1, 7, 10, 25])
def test_progress_is_a_line_a_tenth_to_the_end(steps, capsys):
  from examples.lib.progress import Progress

  with Progress("run", steps) as progress:
    for _ in range(steps):
      progress.step(loss="0.5")
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == min(steps, 10)
  assert lines[-1] == f"run: {steps} of {steps}, loss 0.5"
  with Progress("run", steps, shown=False) as progress:
    progress.step()
  assert not capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
  from examples.lib import progress

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  monkeypatch.setattr(sys, "stderr", Terminal())
  with progress.Progress("run", 2) as shown:
    shown.step(loss="0.5")
    shown.step()
  assert "run: 100%" in sys.stderr.getvalue() and "loss=0.5" in sys.stderr.getvalue()
  assert "of 2" not in sys.stderr.getvalue()


@pytest.mark.slow
def test_two_processes_train_like_one(digits, comparison, tmp_path):
  """The same batches on the same four workers, spread over two processes."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  args = ["--codec", "qsgd", "--bits", 4, *SHORT, "--data-dir", digits[1]]
  args += ["--coordinator", address, "--num-processes", 2, "--devices", 2]
  folders = [tmp_path / "first", tmp_path / "second"]
  processes = [
    start(*args, "--process-id", i, "--output", folder)
    for i, folder in enumerate(folders)
  ]
  outputs = [finish(process)[0] for process in processes]

  assert "Workers: 4" in outputs[0] and "Workers: 4" not in outputs[1]
  assert not folders[1].exists()  # the first process alone writes
  curve = read(folders[0] / "curves.csv")
  expected = read(comparison[1] / "curves.csv")[4:6]  # qsgd-4 from seed 0
  for row, like in zip(curve, expected, strict=True):
    assert (row["step"], row["bytes_sent"]) == (like["step"], like["bytes_sent"])
    # The mean of the workers' losses is summed in another order.
    assert float(row["train_loss"]) == pytest.approx(float(like["train_loss"]), 1e-5)
    assert float(row["test_loss"]) == pytest.approx(float(like["test_loss"]), 1e-5)


@pytest.mark.slow
def test_dropout_average_and_plateau_are_those_of_one_process(digits, tmp_path):
  """The workers of two processes draw what they draw in one."""
  args = ["--model", "mlp", "--steps", 6, "--evaluate-every", 2, "--batch-size", 16]
  args += ["--ema", 0.9, "--schedule", "plateau", "--data-dir", digits[1]]
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  two = ["--coordinator", address, "--num-processes", 2, "--devices", 1]
  processes = [
    start(*args, *two, "--process-id", i, "--output", tmp_path / f"{i}")
    for i in range(2)
  ]
  for process in processes:
    finish(process)
  finish(start(*args, "--devices", 2, "--output", tmp_path / "one"))
  curves = [read(tmp_path / name / "curves.csv") for name in ("0", "one")]
  for row, like in zip(*curves, strict=True):
    assert row["step"] == like["step"]
    for name in ("train_loss", "test_loss"):
      assert float(row[name]) == pytest.approx(float(like[name]), 1e-5)


@pytest.mark.slow
def test_resnet_with_adam_and_feedback(digits, tmp_path):
  args = ["--model", "resnet", "--codec", "bf16", "--optimizer", "adam", "--steps", 2]
  args += ["--learning-rate", 1e-3, "--feedback", "error", "--batch-size", 16]
  finish(start(*args, "--devices", 2, "--data-dir", digits[1], "--output", tmp_path))
  (row,) = read(tmp_path / "summary.csv")
  assert 0.5 <= int(row["bytes_a_step"]) / int(row["f32_bytes_a_step"]) < 0.51
  assert math.isfinite(float(row["test_loss"]))


@pytest.mark.slow
def test_one_bit_ternary_fitted_and_float_codecs_train(digits, tmp_path):
  codecs = ["onebit-64", "terngrad", "qsgd-2-nonuniform", "aps-3-0"]
  args = ["--compare", *codecs, "--steps", 3, "--devices", 2, "--batch-size", 16]
  finish(start(*args, "--data-dir", digits[1], "--output", tmp_path))
  summary = read(tmp_path / "summary.csv")
  assert [row["codec"] for row in summary] == codecs
  for row in summary:
    assert int(row["bytes_a_step"]) < 0.15 * int(row["f32_bytes_a_step"])
    assert float(row["test_loss"]) < math.log(10)  # of equal chances


def test_wrong_names_are_answered_with_the_choices(capsys):
  from examples import image_classification

  for args in (["--codec", "qsgd5"], ["--compare", "f32", "qsgd-9"], ["--steps", "0"]):
    with pytest.raises(SystemExit):
      image_classification.make_parser().parse_args(args)
  errors = capsys.readouterr().err
  assert "'qsgd', 'none', 'f32', 'bf16'" in errors
  assert "'qsgd-8', 'qsgd-16', 'qsgd-2-nonuniform'" in errors
  assert "must be at least 1, got 0" in errors


def test_digits_are_what_the_docstring_says(digits):
  from sklearn.datasets import load_digits

  (train, test, classes), _ = digits
  assert classes == 10
  assert (train.images.shape, test.images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
  for split in (train, test):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert (split.images.min(), split.images.max()) == (0, 255)
    shares = np.bincount(split.labels) / np.bincount(load_digits().target)
    assert np.ptp(shares) < 0.01  # 35 to 37 of 174 to 183 images
  found = np.concatenate([train.images, test.images]).reshape(1797, -1)
  source = np.rint(load_digits().data * 255 / 16)
  # All source images differ, so equal sets of rows mean that none is in both splits.
  assert np.array_equal(np.unique(found, axis=0), np.unique(source, axis=0))


def test_digits_split_is_fixed(digits, tmp_path):
  from examples.lib.data import images as data

  again = data.load("digits", str(tmp_path))
  for split, other in zip(digits[0][:2], again[:2], strict=True):
    assert np.array_equal(split.images, other.images)
    assert np.array_equal(split.labels, other.labels)


def test_batches(digits):
  from examples.lib.data import images as data

  train = digits[0].train
  split = data.Split(np.arange(len(train.labels)), train.labels)

  def draw(count, **options):
    batches = data.batches(split, 100, **options)
    return [next(batches).images for _ in range(count)]

  epochs = draw(28, seed=5)  # two, of 14 whole batches each
  first, second = np.concatenate(epochs[:14]), np.concatenate(epochs[14:])
  assert len(np.unique(first)) == len(np.unique(second)) == 1400
  assert not np.array_equal(first, second)
  assert np.array_equal(epochs, draw(28, seed=5))
  assert not np.array_equal(epochs[0], draw(1, seed=6)[0])
  parts = [draw(28, seed=5, part=i, parts=4) for i in range(4)]
  assert np.array_equal(epochs, np.concatenate(parts, axis=1))
  with pytest.raises(ValueError, match="at most 1437"):
    next(data.batches(split, 1438, seed=0))


def language_model(options, folder):
  """What the language model wrote and printed, of two steps of two workers."""
  short = "--steps 2 --devices 2 --batch-size 4 --length 8"
  script = "language_model"
  args = [*options.split(), *short.split(), "--output", folder]
  out, _ = finish(start(*args, script=script))
  return read(folder / "summary.csv"), out


@pytest.mark.slow
def test_language_model_counts_what_follows_the_warm_up(tmp_path):
  """Slots of 1 % of 0.35 million parameters, positions alone in all layers but one."""
  (found,), _ = language_model("--codec redsync-asq --warmup 1", tmp_path)
  ratio = int(found["bytes_a_step"]) / int(found["f32_bytes_a_step"])
  assert 0.005 < ratio < 0.02, found
  assert 0 < float(found["test_loss"]) < math.log(1000)


@pytest.mark.slow
def test_language_models_are_compared_and_drawn(tmp_path):
  """As images are: any method, from several seeds, with dropout and an average."""
  options = "--model lstm --compare f32 redsync --seeds 2 --ema 0.9"
  found, out = language_model(f"{options} --schedule plateau", tmp_path)
  runs = [(row["codec"], row["seed"]) for row in found]
  assert runs == [(x, y) for x in ("f32", "redsync") for y in "01"]
  assert out.splitlines()[0].split()[:4] == ["codec", "test", "accuracy", "perplexity"]
  f32 = [math.exp(float(row["test_loss"])) for row in found[:2]]
  assert f"{sum(f32) / 2:.3f} ± {abs(f32[0] - f32[1]) / 2**0.5:.3f}" in out
  assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert len(read(tmp_path / "curves.csv")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "bits"),
  [
    # Two payloads with 32 bits of scale a bucket. A worker of two sends half of each.
    ("--parallel zero", (4 + 4 + 2 * 32 / 512) / 2),
    ("--parallel fsdp", (8 + 4 + 2 * 32 / 128) / 2),
  ],
)
def test_transformer_sends_few_bits(options, bits, tmp_path):
  """And learns: equal chances have a perplexity of 128."""
  (found,), _ = language_model(f"--model transformer {options}", tmp_path)
  sent = int(found["bytes_a_step"])
  # Of 410,240 elements 640 are scales and travel in float32.
  assert bits < 8 * sent / 410_240 < 1.02 * bits, found
  assert 0 < float(found["test_loss"]) < math.log(100)


@pytest.mark.slow
def test_recurrent_parameters_are_cut(tmp_path):
  options = "--parallel fsdp --weights 4 --feedback none"
  (found,), _ = language_model(options, tmp_path)
  assert 0 < float(found["test_loss"]) < math.log(1000)


@pytest.mark.slow
def test_an_inspected_run_is_the_same_and_shows_each_leaf(digits, tmp_path):
  """In the first step and the eleventh; bytes are those of other steps."""
  args = ["--devices", 2, "--data-dir", digits[1], "--steps", 20]
  finish(start(*args, "--output", tmp_path / "plain"))
  out, _ = finish(start(*args, "--inspect", 10, "--output", tmp_path / "seen"))
  assert "step 11 of qsgd-4:" in out and "gradient norm" in out
  for kind in ("errors", "telemetry"):
    figure = tmp_path / "seen" / f"qsgd-4-{kind}.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
  plain, seen = (read(tmp_path / name / "curves.csv") for name in ("plain", "seen"))
  assert plain == seen


@pytest.mark.slow
def test_model_parallel_trains_in_passes_behind_a_convolution(digits, tmp_path):
  script = "model_parallel"
  args = ["--codec", "linear", "--steps", 2, "--devices", 2, "--hidden", 256]
  args += ["--channels", 4, "--passes", 2, "--batch-size", 64]
  args += ["--data-dir", digits[1], "--output", tmp_path]
  out, _ = finish(start(*args, script=script))
  assert "linear" in out and "Workers: 2" in out
  (row,) = read(tmp_path / "summary.csv")
  assert 0.2 < int(row["bytes_a_step"]) / int(row["f32_bytes_a_step"]) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, options, sent",
  [
    # 8 bits there, perhaps again in the backward pass, and 4 back, with scales.
    ("fsdp_linen", ["--workers", 2], 0.24),
    ("fsdp_nnx", ["--workers", 2], 0.24),
    ("hsdp", ["--hosts", 2, "--chips", 2], 0.15),
  ],
)
def test_transformers_with_cut_parameters_train(name, options, sent):
  script = name
  out, _ = finish(start(*options, "--steps", 6, script=script))
  losses = [float(line.split()[-1]) for line in out.splitlines() if "loss" in line]
  assert len(losses) == 6 and losses[-1] < 0.8 * max(losses)
  ratio = float(out.splitlines()[-1].split()[1])
  assert sent - 0.06 < ratio < sent, out


def test_cut_layers_are_the_whole_net():
  from examples.lib.sharded import cut_layers

  def gather(y, layer):
    last = dict(own="coded", to="invarying") if layer == 2 else {}
    return parallel.all_gather(y, axis_name="model", codec=Dense(), axis=1, **last)

  def columns(tree):
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, 4, axis=-1)), tree)

  @jax.jit
  def both():
    layers = cut_layers.init(jax.random.key(0), (6, 8, 8, cut_layers.padded(3, 4)))
    x = jax.random.normal(jax.random.key(1), (5, 6))

    def loss(layers, **options):
      return jnp.sum(cut_layers.apply(layers, x, 3, **options) ** 2)

    worker = jax.value_and_grad(lambda layers: loss(layers, gather=gather))
    value, grads = jax.value_and_grad(loss)(layers)
    cut = jax.vmap(worker, axis_name="model")(columns(layers))
    return cut, (jnp.full(4, value), columns(grads))

  for got, want in zip(*map(jax.tree.leaves, both()), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_sub_batches_have_an_equal_part_of_each_worker():
  from examples.lib.sharded import cut_layers

  assert cut_layers.in_passes(np.arange(8), 2, 2).tolist() == [
    [0, 1, 4, 5],
    [2, 3, 6, 7],
  ]
