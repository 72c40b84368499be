"""Kernels that lie or crash are found on a device before a program runs them.

A device of the CPU stands for the GPU, and the kernel of QSGD for all.
"""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp._src.checks import see
from gradcomp._src.kernels import quantize
from gradcomp._src.kernels.gpu import dispatch, table
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.lowering import KERNEL, all_kernels, lowered_for_cuda

CODEC = QSGD(bits=4, bucket_size=64)
KEY = np.array([123, 456], np.uint32)
X = np.random.default_rng(0).standard_normal(1500).astype(np.float32)

kernel, right = quantize.encode_on_gpu, quantize.encode_reference
compare = table.compare


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
  """Asks for the check, and lets a CPU stand for a GPU that has every kernel."""
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "1")
  monkeypatch.setattr(table, "devices", lambda *_: jax.devices()[:1])
  monkeypatch.setattr(table, "_found", {})
  monkeypatch.setattr(dispatch, "_missing", lambda: None)
  with all_kernels():
    yield


def replace_kernel(monkeypatch, function):
  """Puts a function in the place of QSGD's kernel on CPUs; for CUDA it stays."""

  @functools.wraps(kernel)
  def encode_rows(*operands, **options):
    return jax.lax.platform_dependent(
      *operands,
      cuda=functools.partial(kernel, **options),
      default=functools.partial(function, **options),
    )

  encoder = dispatch.encoder("qsgd", right, encode_rows)
  monkeypatch.setattr(quantize, "encode_rows", encoder)


def lying(*operands, **options):
  rows, residual = right(*operands, **options)
  return rows.at[1, 7].set(rows[1, 7] ^ 8), residual


def raising(*operands, **options):
  raise NotImplementedError("no such instruction")


def crashing(*operands, **options):
  def crash():
    raise ArithmeticError("at run time")

  rows, residual = right(*operands, **options)
  return jax.pure_callback(crash, rows), residual


WRONG = {
  lying: r"1 of 216 words differ, the first at 79: 0x\w+ instead of 0x\w+\.",
  raising: r"fails with NotImplementedError: no such instruction\.",
  kernel: r"fails with ValueError: Only interpret mode is supported on CPU backend",
  crashing: r"fails with \w+RuntimeError: INTERNAL: ",
}


def encoder(implementation=None, codec=CODEC):
  codec = dataclasses.replace(codec, implementation=implementation)
  return lambda x: codec.encode(x, key=KEY).rows


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_no_program_has_a_wrong_kernel(function, monkeypatch):
  """It is an error, however the kernel was chosen, and as often as it is."""
  replace_kernel(monkeypatch, function)
  own = r"(?s)\AOn cpu of process 0, the kernel .*quantize.encode_on_gpu\(.*"
  end = r'.* Use `implementation="xla"`\.' + see("runs-the-reference-instead")
  for implementation in (None, "pallas", None):
    with pytest.raises(RuntimeError, match=own + WRONG[function] + end):
      jax.eval_shape(encoder(implementation), X)
  assert KERNEL not in lowered_for_cuda(encoder("xla"), X)


def test_a_kernel_that_is_right_serves(monkeypatch):
  replace_kernel(monkeypatch, right)
  for implementation in (None, "pallas"):
    assert KERNEL in lowered_for_cuda(encoder(implementation), X)
  assert [*table._found.values()] == [""]


@pytest.mark.parametrize("mode", ["shard_map", modes.EXPLICIT, *slow("pmap", "vmap")])
def test_it_runs_outside_of_every_map(mode, monkeypatch):
  """No trace, mesh or axis of the step that needs the kernel reaches the check."""
  gradients = [{"w": np.stack([X[:1024], X[-1024:]])}]
  tx = gradcomp.qsgd(bits=4, bucket_size=64, axis_name="data")
  replace_kernel(monkeypatch, lying)
  jax.clear_caches()  # other modes leave traces of the encoder, in which it was checked
  with pytest.raises(RuntimeError, match="1 of .* words differ"):
    modes.run(mode, tx, gradients)


def test_a_kernel_is_tried_once_for_its_options_and_shapes_on_each_kind(monkeypatch):
  kinds = [SimpleNamespace(device_kind=kind) for kind in ("small", "large", "small")]
  tried = []

  def compare(kernel, reference, operands, gpu):
    form = kernel.keywords["form"]
    setting = form.levels, operands[2] is None
    tried.append((gpu.device_kind, setting, len(operands[0])))
    return ""

  monkeypatch.setattr(table, "devices", lambda *_: kinds)
  monkeypatch.setattr(table, "compare", compare)
  nearest = dataclasses.replace(CODEC, rounding="nearest")
  uniform = dataclasses.replace(nearest, levels="uniform")
  for codec in (CODEC, nearest, uniform, CODEC):
    for size in (1500, 1000):
      jax.eval_shape(encoder(codec=codec), X[:size])
  settings = [("sign_magnitude", False), ("sign_magnitude", True), ("uniform", True)]
  expected = itertools.product(("small", "large"), settings, (1500, 1000))
  assert sorted(tried) == sorted(expected)


def test_nothing_is_tried_unless_the_environment_asks(monkeypatch):
  replace_kernel(monkeypatch, lying)
  for value in ("0", None):
    monkeypatch.delenv("GRADCOMP_CHECK_KERNELS")
    if value is not None:
      monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", value)
    for implementation in (None, "pallas"):
      assert KERNEL in lowered_for_cuda(encoder(implementation), X)
  differ = jax.jit(lambda x: (encoder("pallas")(x) != encoder("xla")(x)).sum())
  assert differ(X) == 1
  assert not table._found
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "no")
  with pytest.raises(ValueError, match="`GRADCOMP_CHECK_KERNELS` must be 0 or 1.*'no'"):
    jax.eval_shape(encoder(), X)


def test_nothing_is_tried_where_no_gpu_is(monkeypatch):
  monkeypatch.setattr(table, "devices", lambda *_: [])
  replace_kernel(monkeypatch, lying)
  assert KERNEL in lowered_for_cuda(encoder(), X)
