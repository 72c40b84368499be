"""The report of the kernels on a GPU, here by the interpreter."""

import jax
import pytest

import gradcomp
from benchmarks.gpu.cases import CASES
from gradcomp import __main__
from gradcomp._src.testing import kernels
from gradcomp.codecs import FloatCast
from gradcomp.testing import compare_kernels

CAST = FloatCast(exponent_bits=3, mantissa_bits=0, scale=1.0)


def test_every_operation_is_compared():
  """Those of the list for make gpu-check, by a kernel each."""
  types = {type(codec) for codec in kernels.CODECS.values()}
  assert types == {type(case.codec) for case in CASES.values()}
  for name, codec in kernels.CODECS.items():
    encoder = kernels._encoder(codec, "pallas_interpret")
    traced = jax.make_jaxpr(encoder)(jax.ShapeDtypeStruct((1 << 17,), "float32"))
    assert "pallas_call" in str(traced), name


def test_a_report_says_which_kernels_differ_and_times_the_others(monkeypatch):
  names = iter(["right", "right", "wrong"])
  plain = kernels._encoder

  def encoder(codec, implementation):
    encode = plain(codec, implementation)
    wrong = implementation != "xla" and next(names) == "wrong"
    return (lambda x: encode(x)[0].at[0, 5].add(1)) if wrong else encode

  monkeypatch.setattr(kernels, "_encoder", encoder)
  monkeypatch.setattr(kernels, "CODECS", dict.fromkeys(["one", "two", "three"], CAST))
  report = compare_kernels(elements=1 << 12, interpret=True)
  assert [bool(trial.failure) for trial in report.trials] == [False, False, True]
  assert all(t.kernel_ms > 0 < t.xla_ms for t in report.trials[:2])
  versions, size, head, one, two, three, difference = str(report).splitlines()
  assert versions.startswith(f"gradcomp {gradcomp.__version__}, JAX {jax.__version__}")
  assert size == "Encoding 4,096 elements:"
  assert [line.split()[1] for line in (head, one, two, three)] == [
    *("bits", "equal", "equal", "DIFFER")
  ]
  assert difference.startswith("three: gives other bits than the reference: 1 of ")
  assert ", the first at 5: " in difference


def test_a_machine_without_a_gpu_says_so(capsys):
  if jax.default_backend() == "gpu":
    pytest.skip("there is a GPU here")
  __main__.main(["kernels"])
  assert "There is no GPU here" in capsys.readouterr().out
