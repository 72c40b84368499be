"""The names that users may rely on: few flat ones, all others one namespace down."""

import inspect
import subprocess
import sys

import pytest

import gradcomp

FLAT = {
  *(
    "CompressOptions",
    "ErrorFeedback",
    "MomentumFeedback",
    "PerWorker",
    "TrainOptions",
    "TrainStep",
  ),
  *("aps", "blocktop", "dense", "eight_bit", "loss_scaling_cast", "natural"),
  *("onebit_sgd", "policy", "powersgd", "qsgd", "randomk", "redsync", "terngrad"),
  *("citation", "compress", "defer_reduction", "explain", "init_state"),
  *("make_train_step", "mean_over", "overlap_report", "reshard_state"),
  *("skip_nonfinite", "state_specs"),
  *("topk", "value_and_grad", "wire_report", "__version__"),
}
NAMESPACES = {
  *("checkpoint", "codecs", "contrib", "cost", "exchange", "floats", "kernels"),
  *("local", "parallel", "state", "telemetry", "testing", "wire", "wrappers"),
}


def test_the_flat_names():
  assert len(FLAT) <= 34
  assert set(gradcomp.__all__) == FLAT | NAMESPACES


def test_nothing_else_looks_public():
  """Neither ``dir`` nor completion shows what nobody may rely on."""
  spaces = [gradcomp, *(getattr(gradcomp, name) for name in sorted(NAMESPACES))]
  for space in spaces:
    names = {name for name in dir(space) if not name.startswith("_")}
    assert names <= set(getattr(space, "__all__", ())), space.__name__


def test_namespaces_need_no_second_import():
  """In a process that has imported gradcomp alone, also those that come late."""
  code = """
import gradcomp
gradcomp.testing.check_codec, gradcomp.cost.papers.dettmers, gradcomp.cost.plan
gradcomp.telemetry.plots.curves
"""
  subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_every_public_class_and_function_has_a_docstring():
  for name in NAMESPACES:
    space = getattr(gradcomp, name)
    for public in getattr(space, "__all__", ()):
      value = getattr(space, public)
      if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), (name, public)


def test_a_file_of_contrib_is_found_without_another_change(tmp_path, monkeypatch):
  (tmp_path / "method.py").write_text("BITS = 3\n")
  contrib = gradcomp.contrib
  monkeypatch.setattr(contrib, "__path__", [*contrib.__path__, str(tmp_path)])
  monkeypatch.setattr(contrib, "__all__", [*contrib.__all__, "method"])
  assert gradcomp.contrib.method.BITS == 3 and "method" in dir(contrib)
  with pytest.raises(AttributeError, match="has no attribute 'other'"):
    contrib.other()
  del sys.modules["gradcomp.contrib.method"], contrib.method
