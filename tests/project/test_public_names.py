"""The names that users may rely on: few flat ones, all others one namespace down."""

import inspect
import pathlib
import subprocess
import sys

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
  *("citation", "compress", "defer_reduction", "explain", "global_norm"),
  *("init_state", "make_train_step", "mean_over", "overlap_report", "reshard_state"),
  *("skip_nonfinite", "state_specs"),
  *("topk", "value_and_grad", "wire_report", "__version__"),
}
NAMESPACES = {
  *("checkpoint", "codecs", "contrib", "cost", "exchange", "floats", "kernels"),
  *(
    "local",
    "optimizers",
    "parallel",
    "state",
    "telemetry",
    "testing",
    "wire",
    "wrappers",
  ),
}


def test_the_flat_names():
  assert len(FLAT) <= 35
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
gradcomp.testing.check_codec, gradcomp.cost.plan
"""
  subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_every_public_class_and_function_has_a_docstring():
  for name in NAMESPACES:
    space = getattr(gradcomp, name)
    for public in getattr(space, "__all__", ()):
      value = getattr(space, public)
      if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), (name, public)


def test_every_file_of_contrib_is_imported_and_its_names_are_public():
  folder = pathlib.Path(gradcomp.contrib.__file__).parent
  files = {path.stem for path in folder.glob("_*.py")} - {"__init__"}
  assert files and files <= set(vars(gradcomp.contrib))
  each = [getattr(gradcomp.contrib, name) for name in gradcomp.contrib.__all__]
  assert {value.__module__ for value in each} == {"gradcomp.contrib"}
