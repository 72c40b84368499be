"""Train steps lower for every platform on a CPU, and trace kernels for CUDA alone."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD
from tests.support import installs, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.recipe import RECIPES, make
from tests.support.lowering import KERNEL, cuda
from tests.support.pages import ROOT


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize("name", RECIPES)
def test_a_train_step_lowers_for_tpu_and_rocm(name):
  """They run operations of XLA alone, but for the kernels of TPUs."""
  mesh = modes.mesh(2)
  optimizer = optax.chain(make(name, axis_name="data"), optax.sgd(0.1))
  params = {"w": jnp.ones((512, 256)), "b": jnp.ones(256)}
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  traced = step.trace(params, state, jax.ShapeDtypeStruct((4, 512), jnp.float32))
  for platform in ("tpu", "rocm"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.all_" in text  # gathers, reduces, or goes to all
    kernels = text.count("stablehlo.custom_call @tpu_custom_call")
    assert text.count("stablehlo.custom_call") == kernels
    assert platform == "tpu" or not kernels


def test_one_export_has_the_kernel_for_gpus_and_the_reference_for_others():
  encode = jax.jit(lambda x: QSGD(bits=4).encode(x, key=np.array([1, 2], np.uint32)))
  x = jnp.linspace(-1, 1, 8192)
  with cuda():
    exported = jax.export.export(
      encode,
      platforms=("cpu", "cuda"),
      disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(KERNEL)],
    )(x)
  assert KERNEL in exported.mlir_module()
  assert_same_bits(exported.call(x), encode(x))


def test_a_cpu_imports_no_back_end_of_gpus(tmp_path):
  """Neither with the library nor in a step, whose codec has kernels."""
  code = """
import sys
import jax
import jax.numpy as jnp
import gradcomp

codec = gradcomp.qsgd(bits=4)
x = jnp.ones(8192)
jax.jit(codec.update)(x, codec.init(x))
assert jax.devices()[0].platform == "cpu"
print(*sys.modules)
"""
  loaded = installs.run("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()
  assert "gradcomp._src.kernels.quantize.pallas" in loaded
  back_ends = ("jax.experimental.pallas", "jax.experimental.mosaic")
  assert not [module for module in loaded if module.startswith(back_ends)]
