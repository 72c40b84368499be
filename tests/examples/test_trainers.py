"""Trainers of other projects send 4 bits, and take the steps they took before."""

import importlib
import importlib.util
import inspect

import jax
import optax
import pytest

import gradcomp
from benchmarks.pages import records
from examples.trainers import __main__ as table
from tests.plugins.slow_cases import slow
from tests.support.pages import ROOT

AXES = {"tunix": {"fsdp": 8}, "kauldron": {"devices": 8}}
AXES |= {"maxtext": {"data": 4, "tensor": 2}}
NAMES = ["linen", *slow("nnx", "equinox", "tunix", "kauldron", "maxtext")]
# Of packages that these trainers import.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def trained(monkeypatch):
  """Trains an example on its mesh; returns the loss and the bytes over its workers."""
  monkeypatch.setattr(optax, "adam", lambda _: optax.sgd(0.1))

  def train(name, compressed, steps):
    if name not in ("linen", "nnx", "maxtext"):
      pytest.importorskip(name)
    example = importlib.import_module(f"examples.trainers.{name}")
    axes = AXES.get(name, {"data": 8})
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), kinds)
    with jax.set_mesh(mesh):
      loss, program = example.train(steps, compressed)
    report = gradcomp.wire_report(program, mesh=mesh)
    return loss, report.by_axis[next(iter(axes))].bytes_sent

  return train


@pytest.mark.parametrize("name", NAMES)
def test_sent_densely_steps_are_those_of_the_plain_trainer(name, trained, monkeypatch):
  """Optimizers of fixed step size would hide a mean that is a sum."""
  loss, sent = trained(name, False, 5)
  dense = lambda bits, axis_name: gradcomp.dense(axis_name=axis_name)
  monkeypatch.setattr(gradcomp, "qsgd", dense)
  dense_loss, dense_sent = trained(name, True, 5)
  # Sums of a batch in another order, over five steps.
  assert dense_loss == pytest.approx(loss, rel=1e-5)
  assert dense_sent == pytest.approx(sent, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_sends_four_bits(name, trained):
  _, sent = trained(name, False, 1)
  _, compressed = trained(name, True, 1)
  # 4 of 32 bits and scales, and small leaves in full: an eighth and more. But JAX adds
  # up both gradients of an embedding that is the output layer, too.
  assert 0.1 < compressed / sent < 0.17


@pytest.mark.parametrize("name", table.PACKAGES)
def test_an_example_is_short_and_in_the_record(name):
  source = (ROOT / "examples" / "trainers" / f"{name}.py").read_text()
  assert source.count("\n") <= 60
  title, what, changed = table.about(name)
  (row,) = [x for x in records.rows("trainers.md") if x["trainer"] == title]
  assert (row["what changes"], row["lines changed"]) == (what, changed)


def test_changed_lines_are_those_of_branches_and_classes():
  def example(compressed):
    class CompressedStep:
      def step(self):

        return 1

    kind = None
    if compressed:
      kind = CompressedStep
    return kind

  source = inspect.cleandoc("\n" + inspect.getsource(example))
  assert table.changed_lines(source) == 4
