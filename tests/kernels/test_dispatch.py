"""Programs have a kernel where their platform has one, and the reference elsewhere."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.kernels import quantize
from gradcomp._src.kernels.common.scales import scales
from gradcomp._src.kernels.gpu import dispatch
from gradcomp.codecs import QSGD, TopK
from tests.errors import table
from tests.plugins.slow_cases import slow
from tests.support import installs, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.recipe import RECIPES, make
from tests.support.lowering import KERNEL, all_kernels, cuda, lowered_for_cuda
from tests.support.pages import ROOT

KEY = np.array([123, 456], np.uint32)


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


@pytest.mark.parametrize("name", RECIPES)
def test_a_train_step_lowers_for_tpu_and_rocm(name):
  """They run operations of XLA alone, but for the kernels of TPUs."""
  mesh = modes.mesh(2)
  optimizer = optax.chain(make(name, axis_name="data"), optax.sgd(0.1))
  params = {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  traced = step.trace(params, state, jax.ShapeDtypeStruct((4, 512), jnp.float32))
  for platform in ("tpu", "rocm"):
    with all_kernels():
      text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.all_" in text  # gathers, reduces, or goes to all
    kernels = text.count("stablehlo.custom_call @tpu_custom_call")
    assert text.count("stablehlo.custom_call") == kernels
    assert platform == "tpu" or not kernels


@pytest.mark.parametrize(
  "bits, check_vma", [(4, True), *slow((8, False), (4, False), (8, True))]
)
def test_a_train_step_runs_the_kernels_on_cuda(bits, check_vma):
  options = dict(axis_name="data", exchange="two_shot", feedback="error")
  optimizer = optax.chain(gradcomp.compress(QSGD(bits=bits), **options), optax.sgd(0.1))
  params = {"w": jnp.ones((512, 64))}
  with jax.set_mesh(modes.mesh(2)):
    state = optimizer.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")
  places = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
  per_device = modes.user_step(loss_fn, optimizer)
  step = lambda *args: jax.shard_map(per_device, check_vma=check_vma, **places)(*args)
  args = params, state, jnp.ones((4, 512))
  text = lowered_for_cuda(step, *jax.eval_shape(lambda: args), data=2)
  # What workers send first, with its residual, and what owners send.
  assert text.count(KERNEL) == 2
  assert text.count("qsgd_encode") >= 2
  with jax.set_mesh(modes.mesh(2)):
    lowered = jax.jit(step).lower(*args)
    assert KERNEL not in lowered.as_text()
    jax.block_until_ready(lowered.compile()(*args))


def test_one_export_has_the_kernel_for_gpus_and_the_reference_for_others():
  encode = jax.jit(lambda x: QSGD(bits=4).encode(x, key=KEY))
  x = np.linspace(-1, 1, 8192, dtype=np.float32)
  checks = [jax.export.DisabledSafetyCheck.custom_call(KERNEL)]
  how = dict(platforms=("cpu", "cuda"), disabled_checks=checks)
  with cuda():
    exported = jax.export.export(encode, **how)(x)
  assert KERNEL in exported.mlir_module()
  assert_same_bits(exported.call(x), encode(x))


def test_a_cpu_imports_no_back_end_of_gpus(tmp_path):
  """Neither with the library nor in a step, whose codec has kernels."""
  code = """
import sys, jax, jax.numpy as jnp, gradcomp
codec = gradcomp.qsgd(bits=4)
x = jnp.ones(8192)
jax.jit(codec.update)(x, codec.init(x))
assert jax.devices()[0].platform == "cpu"
print(*sys.modules)
"""
  loaded = installs.run("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()
  assert "gradcomp._src.kernels.quantize" in loaded
  back_ends = ("jax.experimental.pallas", "jax.experimental.mosaic")
  assert not [module for module in loaded if module.startswith(back_ends)]


def encoded(codec, name, size):
  codec = dataclasses.replace(codec, implementation=name)
  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  jax.eval_shape(lambda x: codec.encode(x, key=KEY), x)


SELECTS = TopK(density=0.01, selection="threshold")
ROWS = """
encoded(QSGD(), "pallas", 4096) -> `implementation` ... here ... needs a GPU ... 'cpu'
encoded(QSGD(bucket_size=96), "pallas", 4096) -> `implementation` ... powers of two
encoded(QSGD(), "pallas_interpret", 100) -> `implementation` ... at least one tile
encoded(SELECTS, v, 1023) for v in "pallas", "pallas_interpret" -> `implementation` must
  be ... None or
"""


@table.each_row(ROWS)
def test_a_name_that_cannot_run_says_the_way_out(call, error):
  table.refuses(call, error, globals())


def test_other_sizes_take_the_reference_everywhere():
  x = np.ones(8 * 96, np.float32)
  codec = QSGD(bits=4, bucket_size=96)
  encode = lambda x: codec.encode(x, key=KEY).rows
  assert KERNEL not in lowered_for_cuda(encode, x)
  found = np.asarray(jax.jit(encode)(x))[0, 96:].view("f4")
  assert scales(jnp.float32(1.0)) == found[0]


def test_leaves_of_one_shape_are_traced_and_lowered_once(monkeypatch):
  traced, encode_rows = [], quantize.encode_reference

  def counted(x, *operands, **options):
    traced.append(x.shape)
    return encode_rows(x, *operands, **options)

  encoder = dispatch.encoder("qsgd", counted, quantize.encode_on_gpu)
  monkeypatch.setattr(quantize, "encode_rows", encoder)

  def lines(*sizes):
    codec = QSGD(bits=4, bucket_size=64)
    encode = lambda xs: [codec.encode(x, key=KEY).rows for x in xs]
    given = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    return len(jax.jit(encode).lower(given).as_text().split())

  # Two tiles or more have a kernel, and less than one has none.
  assert lines(1500, 1500, 1500, 1500) < 1.5 * lines(1500)
  assert lines(100, 100, 100, 100) < 1.5 * lines(100)
  assert traced == [(1500,), (100,)]
