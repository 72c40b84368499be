"""Kernels that lie or crash are found on a device before a program runs them.

A device of the CPU stands for the GPU, and the kernels of QSGD for all.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import dispatch, self_check
from gradcomp._src.kernels.gpu.backends import has_devices
from gradcomp._src.kernels.quantize import pallas, reference
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, vanish
from tests.support.lowering import TRITON, lowered_for_cuda

CODEC = QSGD(bits=4, bucket_size=64)
KEY = np.array([123, 456], np.uint32)
X = np.random.default_rng(0).standard_normal(1500).astype(np.float32)

kernel = pallas.encode_rows


@pytest.fixture
def gpu(monkeypatch):
  """Lets this process have met a GPU, and know no kernel."""
  monkeypatch.setattr(self_check, "_gpus", lambda: jax.devices()[:1])
  monkeypatch.setattr(self_check, "_ELEMENTS", 1 << 11)
  monkeypatch.setattr(self_check, "_known", {})
  monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
  dispatch._warn_once.cache_clear()


def replace_kernel(monkeypatch, function):
  """Puts a function in the place of QSGD's kernel on CPUs; for CUDA it stays."""

  @functools.wraps(kernel)
  def encode_rows(*operands, **options):
    return jax.lax.platform_dependent(
      *operands,
      cuda=functools.partial(kernel, **options),
      default=functools.partial(function, **options),
    )

  monkeypatch.setattr(pallas, "encode_rows", encode_rows)


def right(*operands, **options):
  return kernel(*operands, **options, interpret=True)


def lying(*operands, **options):
  rows, residual = reference.encode_rows(*operands, **options)
  return rows.at[1, 7].set(rows[1, 7] ^ 8), residual


def raising(*operands, **options):
  raise NotImplementedError("no such instruction")


def crashing(*operands, **options):
  def crash():
    raise ArithmeticError("at run time")

  rows, residual = reference.encode_rows(*operands, **options)
  return jax.pure_callback(crash, rows), residual


WRONG = {
  lying: r"1 of 360 words differ, the first at 79: 0x\w+ instead of 0x\w+\.",
  raising: r"fails with NotImplementedError: no such instruction\.",
  kernel: r"fails with ValueError: Only interpret mode is supported on CPU backend",
  crashing: r"fails with \w+RuntimeError: INTERNAL: ",
}
every_wrong_kernel = pytest.mark.parametrize(
  "function", WRONG, ids=lambda f: f.__name__
)


def encoder(implementation=None, codec=CODEC):
  codec = dataclasses.replace(codec, implementation=implementation)
  return lambda x: codec.encode(x, key=KEY).rows


def test_a_right_kernel_runs_without_a_word(gpu, monkeypatch):
  replace_kernel(monkeypatch, right)
  assert TRITON in lowered_for_cuda(encoder(), X)
  assert TRITON in lowered_for_cuda(encoder("pallas"), X)
  assert list(self_check._known.values()) == [""]


@every_wrong_kernel
def test_the_reference_takes_the_place_of_a_wrong_kernel(function, gpu, monkeypatch):
  expected = jax.jit(encoder("xla"))(X)
  replace_kernel(monkeypatch, function)
  with pytest.warns(RuntimeWarning, match=WRONG[function]) as caught:
    found = jax.jit(encoder())(X)
  assert_same_bits(found, expected)
  (warning,) = caught
  says = str(warning.message)
  assert says.startswith(
    "On cpu, the kernel gradcomp._src.kernels.quantize.pallas.encode_rows("
  )
  address = see("runs-the-reference-instead")
  assert says.endswith(f"XLA runs the reference instead.{address}")
  # Programs that are traced later take the reference, and warn no more.
  assert TRITON not in lowered_for_cuda(encoder(), X)


@every_wrong_kernel
def test_a_wrong_kernel_that_was_named_is_refused(function, gpu, monkeypatch):
  replace_kernel(monkeypatch, function)
  for _ in range(2):
    with pytest.raises(RuntimeError, match=WRONG[function] + ".*Use `implementation`"):
      encoder("pallas")(X)


@pytest.mark.parametrize("mode", ["shard_map", modes.EXPLICIT, *slow("pmap", "vmap")])
def test_it_runs_outside_of_every_map(mode, gpu, monkeypatch):
  """No trace, mesh or axis of the step that needs the kernel reaches the check."""
  gradients = [{"w": jnp.stack([X[:1024], X[-1024:]])}]
  run = lambda implementation: modes.run(
    mode,
    gradcomp.qsgd(
      bits=4, bucket_size=64, axis_name="data", implementation=implementation
    ),
    gradients,
  )
  expected = run("xla")
  replace_kernel(monkeypatch, lying)
  jax.clear_caches()  # other modes leave traces of the encoder, in which it was checked
  with pytest.warns(RuntimeWarning, match=WRONG[lying]):
    found = run(None)
  assert_same_bits(found, expected)


def test_a_kernel_is_tried_once_for_its_options_and_each_kind_of_gpu(gpu, monkeypatch):
  kinds = [SimpleNamespace(device_kind=kind) for kind in ("small", "large")]
  tried = []

  def compare(kernel, reference, operands, gpu):
    tried.append((gpu.device_kind, kernel.keywords["form"].levels, operands[2] is None))
    return ""

  monkeypatch.setattr(self_check, "_gpus", lambda: kinds)
  monkeypatch.setattr(self_check, "compare", compare)
  nearest = dataclasses.replace(CODEC, rounding="nearest")
  uniform = dataclasses.replace(nearest, levels="uniform")
  for codec in (CODEC, nearest, uniform, CODEC):
    for size in (1500, 1000):
      jax.eval_shape(encoder(codec=codec), X[:size])
  settings = {("sign_magnitude", False), ("sign_magnitude", True), ("uniform", True)}
  assert len(tried) == 6
  assert set(tried) == {(gpu.device_kind, *rest) for gpu in kinds for rest in settings}


def test_the_environment_turns_it_off(gpu, monkeypatch):
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "0")
  replace_kernel(monkeypatch, lying)
  for implementation in (None, "pallas"):
    assert TRITON in lowered_for_cuda(encoder(implementation), X)
  assert (encoder("pallas")(X) != encoder("xla")(X)).sum() == 1
  assert not self_check._known
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "no")
  with pytest.raises(ValueError, match="`GRADCOMP_CHECK_KERNELS` must be 0 or 1.*'no'"):
    encoder()(X)


def test_nothing_is_tried_where_no_gpu_was_met(monkeypatch):
  monkeypatch.setattr(self_check, "few_tiles", None)  # not even an example is made
  assert TRITON in lowered_for_cuda(encoder(), X)
  # Nor does tracing make JAX look for devices.
  monkeypatch.setattr(self_check, "_devices", None)
  monkeypatch.setattr(self_check, "has_devices", lambda: False)
  jax.eval_shape(encoder(), X)


def test_devices_are_looked_for_where_jax_has_moved_its_answer(monkeypatch):
  from jax._src import xla_bridge

  monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
  assert not has_devices()  # JAX's name is still there
  vanish(monkeypatch, "jax._src.xla_bridge")
  assert has_devices()
