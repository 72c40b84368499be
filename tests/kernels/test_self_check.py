"""Kernels that lie or crash are found on a device before a program runs them.

A device of the CPU stands for the GPU, and the kernel of QSGD for all.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import dispatch, self_check
from gradcomp._src.kernels.gpu.self_check import has_devices
from gradcomp._src.kernels.gpu.verdicts import Verdict
from gradcomp._src.kernels.quantize import pallas, reference
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, vanish
from tests.support.lowering import KERNEL, cuda, lowered_for_cuda, stand_in

CODEC = QSGD(bits=4, bucket_size=64)
KEY = np.array([123, 456], np.uint32)
X = np.random.default_rng(0).standard_normal(1500).astype(np.float32)

kernel, right = pallas.encode_rows, reference.encode_rows
seconds, gpus, missing = self_check._seconds, self_check._gpus, dispatch._missing


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
  """Lets this process have met a GPU, and know no kernel; a CPU stands for it."""
  stand_in(monkeypatch, "cuda")
  monkeypatch.setattr(dispatch, "_missing", lambda: None)
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
  lying: r"1 of 360 words differ, the first at 79: 0x\w+ instead of 0x\w+\.",
  raising: r"fails with NotImplementedError: no such instruction\.",
  kernel: r"fails with ValueError: Only interpret mode is supported on CPU backend",
  crashing: r"fails with \w+RuntimeError: INTERNAL: ",
}


def encoder(implementation=None, codec=CODEC):
  codec = dataclasses.replace(codec, implementation=implementation)
  return lambda x: codec.encode(x, key=KEY).rows


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_the_reference_takes_the_place_of_a_wrong_kernel(function, monkeypatch):
  """With a warning; and a name of the kernel is refused."""
  replace_kernel(monkeypatch, function)
  own = r"(?s)\AOn cpu, the kernel .*quantize.pallas.encode_rows\(.*"
  end = ".*XLA runs the reference instead." + see("runs-the-reference-instead")
  with pytest.warns(RuntimeWarning, match=own + WRONG[function] + end) as caught:
    jax.eval_shape(encoder(), X)
  assert len(caught) == 1
  # Programs that are traced later take the reference, and warn no more.
  assert KERNEL not in lowered_for_cuda(encoder(), X)
  for _ in range(2):
    with pytest.raises(RuntimeError, match=WRONG[function] + ".*Use `implementation`"):
      jax.eval_shape(encoder("pallas"), X)


@pytest.mark.parametrize("kernel_takes", [1e-3, 3e-3])
def test_the_faster_one_is_taken_without_a_word(kernel_takes, monkeypatch):
  """A name takes the kernel, however slow it is."""
  monkeypatch.setattr(self_check, "_seconds", lambda *_: [kernel_takes, 2e-3])
  replace_kernel(monkeypatch, right)
  assert (KERNEL in lowered_for_cuda(encoder(), X)) == (kernel_takes < 2e-3)
  assert KERNEL in lowered_for_cuda(encoder("pallas"), X)
  for known in (self_check._known, self_check.kernel_verdicts()):
    assert [*known.values()] == [Verdict("", kernel_takes, 2e-3)]


def test_both_are_timed_on_a_larger_input(monkeypatch):
  """By the options of that input, and outside of what is compared."""
  monkeypatch.setattr(self_check, "_seconds", seconds)
  monkeypatch.setattr(self_check, "_TIMED_ELEMENTS", 1 << 13)
  monkeypatch.setattr(self_check, "_RUNS", 1)
  sizes = []

  def noted(*operands, **options):
    sizes.append(operands[0].size)
    return right(*operands, **options)

  replace_kernel(monkeypatch, noted)
  jax.eval_shape(encoder("pallas"), X)
  (verdict,) = self_check._known.values()
  assert 0 < verdict.kernel < 10 and 0 < verdict.reference < 10  # seconds
  assert max(sizes) >= 1 << 13 > min(sizes)


RESOURCES = {
  "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 268435456 bytes.": True,
  "INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY": True,
  "UNAVAILABLE: the device is lost": True,
  "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 266240": False,
  "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M": False,
  "INTERNAL: ptxas exited with non-zero error code 65280": False,
}


def test_a_full_device_is_no_verdict_on_a_kernel(monkeypatch):
  for text, full in RESOURCES.items():

    def failing(*operands, text=text, **options):
      raise ArithmeticError(text)

    replace_kernel(monkeypatch, failing)
    self_check._known.clear()
    dispatch._warn_once.cache_clear()
    if full:
      with pytest.raises(RuntimeError, match="could not be tried, which is no verdict"):
        jax.eval_shape(encoder(), X)
      assert not self_check._known  # it is tried again
    else:
      with pytest.warns(RuntimeWarning, match="fails with ArithmeticError: "):
        jax.eval_shape(encoder(), X)


@pytest.mark.parametrize("mode", ["shard_map", modes.EXPLICIT, *slow("pmap", "vmap")])
def test_it_runs_outside_of_every_map(mode, monkeypatch):
  """No trace, mesh or axis of the step that needs the kernel reaches the check."""
  gradients = [{"w": np.stack([X[:1024], X[-1024:]])}]
  options = dict(bits=4, bucket_size=64, axis_name="data")
  make = functools.partial(gradcomp.qsgd, **options)
  expected = modes.run(mode, make(implementation="xla"), gradients)
  replace_kernel(monkeypatch, lying)
  jax.clear_caches()  # other modes leave traces of the encoder, in which it was checked
  with pytest.warns(RuntimeWarning, match=WRONG[lying]):
    found = modes.run(mode, make(), gradients)
  assert_same_bits(found, expected)


def test_a_kernel_is_tried_once_for_its_options_and_each_kind_of_gpu(monkeypatch):
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


def test_a_gpu_older_than_hopper_runs_the_reference_without_a_word(monkeypatch):
  old = SimpleNamespace(device_kind="A100", compute_capability="8.0")
  monkeypatch.setattr(self_check, "_gpus", lambda: [old])
  monkeypatch.setattr(self_check, "compare", None)  # nothing is tried
  monkeypatch.setattr(dispatch, "_missing", missing)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert KERNEL not in lowered_for_cuda(encoder(), X)
  with pytest.raises(ValueError, match="needs compute capability 9.*this GPU has 8.0"):
    jax.eval_shape(encoder("pallas"), X)
  # A program that is traced before JAX has looked for devices is lowered after.
  monkeypatch.setattr(self_check, "_gpus", list)
  with cuda():
    traced = jax.jit(encoder()).trace(X)
    monkeypatch.setattr(self_check, "_gpus", lambda: [old])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert KERNEL not in text


def test_the_environment_turns_it_off(monkeypatch):
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "0")
  replace_kernel(monkeypatch, lying)
  for implementation in (None, "pallas"):
    assert KERNEL in lowered_for_cuda(encoder(implementation), X)
  differ = jax.jit(lambda x: (encoder("pallas")(x) != encoder("xla")(x)).sum())
  assert differ(X) == 1
  assert not self_check._known
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "no")
  with pytest.raises(ValueError, match="`GRADCOMP_CHECK_KERNELS` must be 0 or 1.*'no'"):
    jax.eval_shape(encoder(), X)


def test_nothing_is_tried_where_no_gpu_was_met(monkeypatch):
  monkeypatch.setattr(self_check, "_gpus", gpus)
  monkeypatch.setattr(self_check, "few_tiles", None)  # not even an example is made
  assert KERNEL in lowered_for_cuda(encoder(), X)
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
