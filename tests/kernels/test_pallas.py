"""Pallas kernels give the reference's bits, interpreted, and lower for CUDA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from benchmarks.gpu.cases import CASES, Case
from gradcomp._src.codecs import quantizing
from gradcomp._src.kernels import quantize, rules
from gradcomp._src.kernels.gpu import dispatch, table, tiles
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.lowering import KERNEL, all_kernels, lowered_for_cuda

DITHER = np.array([123, 456, 0x80018001], np.uint32)


# Pallas' own, and that of Mosaic GPU, which JAX has from 0.11 on. The latter runs what
# a GPU would, with its memories and its order of events.
INTERPRETERS: dict[str, Any] = {"pallas": True}
if hasattr(plgpu, "InterpretGPUParams"):
  INTERPRETERS["mosaic"] = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
  )

# At least one of each operation, rounding and way to get scales.
PLAIN = {
  "top_k 1.0%",
  "qsgd 2 bit",
  "qsgd 4 bit, residual",
  "qsgd 3 bit uniform nearest, one scale, shared",
  "one_bit bucket 64, residual",
  "ternary base3 shared",
  "eight_bit linear, stochastic",
  "float_cast (5, 2) stochastic, exponent",
  "block_top 2 of 16, 8 bits, residual",
  "block_float nvfp4 stochastic",
}
# All kinds of what a check gives to a kernel: an example of its own, scales of rows and
# one of all, random words, an exponent.
CHECKED = {"top_k 1.0%", "ternary base3 shared"}
CHECKED |= {"float_cast (5, 2) stochastic, exponent"}


def every(plain):
  """Parametrizes a test by all cases, of which plain runs have those named."""
  names = [pytest.param(x, marks=[pytest.mark.slow] * (x not in plain)) for x in CASES]
  return pytest.mark.parametrize("name", names)


every_case = every(PLAIN)


@pytest.fixture
def case(name, monkeypatch) -> Case:
  """A case of short rows, several of which are a block of a kernel."""
  found = CASES[name]
  codec = dataclasses.replace(found.codec)  # which has no form of other rows yet
  words = 32 if getattr(codec, "bits", 3) < 3 else 64
  monkeypatch.setattr(quantizing, "TENSOR_ROW", words)
  # Not those that the table itself has in several sizes.
  if getattr(codec, "bucket_size", None) == 512 and found.operation != "one_bit":
    codec = dataclasses.replace(codec, bucket_size=words)
  return found._replace(codec=codec, tile=found.tile and 1024)


def tile_of(case: Case) -> int:
  return case.tile or case.codec.tile_size


def test_plain_runs_have_every_operation():
  assert CHECKED < PLAIN < set(CASES)
  assert {CASES[x].operation for x in PLAIN} == {x.operation for x in CASES.values()}


def operands(case: Case, size: int, rows: int) -> list[np.ndarray]:
  """What a kernel reads beside the gradient: scales from zero, by the least, to NaN."""
  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  found, small = [], {"uint32": DITHER, "int32": np.int32(-3)}
  for like in jax.eval_shape(lambda x: case.operands(case.codec, x), x):
    if not like.shape or like.dtype == jnp.uint32:
      found.append(small.get(like.dtype.name, np.float32(1.5)))
    else:
      scale = np.random.default_rng(3).uniform(0.5, 3, (rows, like.shape[1]))
      found.append(scale.astype(np.float32))
      found[-1][0, 0], found[-1][-1, -1] = 0, np.nan
      if case.operation == "block_float":
        found[-1][3:4] = case.codec.form.least_shared
  return found


def gradient(size: int, tile: int) -> np.ndarray:
  """Normal numbers among special ones: NaN, infinity, zeros, constants, extremes."""
  x = laws.gaussian(size, size)
  part = tile // 8
  for number, value in enumerate((0, 1.25, 3e38, -1e-37, -0.0, 1e-42)):
    x[(number + 8) * part :][:part] = value
  x[3 * tile : 4 * tile] *= np.float32(2.0**-112)
  x[part + 1 :: tile], x[3 * part + 2 :: tile] = np.nan, -np.inf
  return x


@every_case
def test_an_interpreted_kernel_has_the_references_bits(case, monkeypatch):
  # Of two tiles or one, as a large bucket fills a block of the real size.
  monkeypatch.setattr(tiles, "_ELEMENTS", 128)
  tile = tile_of(case)
  # Several blocks, and a tile and a part of one behind them.
  size = 7 * tile + 77
  x, given = gradient(size, tile), operands(case, size, 8)
  expected = compiled(case.function("xla"), x, *given)
  found = compiled(case.function("pallas_interpret"), x, *given)
  assert_same_bits(found, expected)


@every(CHECKED)
@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_an_interpreted_kernel_passes_its_own_check(case, interpreter, monkeypatch):
  found, compare = [], table.compare

  def interpreted(kernel, *rest):
    kernel = functools.partial(kernel, interpret=INTERPRETERS[interpreter])
    found.append(compare(kernel, *rest))
    return found[-1]

  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "1")
  monkeypatch.setattr(table, "compare", interpreted)
  monkeypatch.setattr(table, "_found", {})
  cpu = lambda platform, *_: jax.devices()[:1] * (platform != "tpu")
  monkeypatch.setattr(table, "devices", cpu)
  x = jax.ShapeDtypeStruct((3 * tile_of(case) + 77,), jnp.float32)
  with all_kernels():
    jax.eval_shape(case.function(None), x, *operands(case, x.size, 4))
  assert found == [""] * max(len(case.kernels), 1)


def compiled(function: Any, *args: Any) -> Any:
  """Without LLVM's optimizations, which take most of the time of an unrolled kernel."""
  options = {"xla_backend_optimization_level": 0}
  return jax.jit(function).lower(*args).compile(compiler_options=options)(*args)


@every_case
def test_a_kernel_lowers_for_cuda(case):
  x = jax.ShapeDtypeStruct((8 * tile_of(case) + 77,), jnp.float32)
  text = lowered_for_cuda(case.function(None), x, *operands(case, x.size, 9))
  assert text.count(KERNEL) == max(len(case.kernels), 1)


@every_case
def test_a_named_kernel_has_the_references_types(name, monkeypatch):
  """What differs among workers is typed so in ``jax.shard_map``, for every size."""
  case = CASES[name]
  monkeypatch.setattr(dispatch, "_missing", lambda: None)
  found = {"pallas": [], "xla": []}

  def per_device(*given):
    for implementation, types in found.items():
      outputs = case.function(implementation)(*given)
      types += [jax.typeof(x) for x in jax.tree.leaves(outputs)]

  for size in case.sizes():
    x = jax.ShapeDtypeStruct((2 * size,), jnp.float32)
    alone = jax.ShapeDtypeStruct((size,), jnp.float32)
    given = jax.eval_shape(lambda x: case.operands(case.codec, x), alone)
    with jax.set_mesh(modes.mesh(2)):
      specs = (P("data"), *(P() for _ in given))
      mapped = jax.shard_map(per_device, in_specs=specs, out_specs=None)
      jax.eval_shape(mapped, x, *given)
  assert found["pallas"] == found["xla"]
  assert all(x.manual_axis_type.varying == {"data"} for x in found["xla"])


@pytest.mark.parametrize("tiles", [1, 3, *slow(2, 8)])
def test_few_tiles_are_whole_blocks(tiles):
  form = rules.Equal(bits=8, bucket_size=64, levels="uniform")
  x = gradient(max(tiles, 2) * 256, 256)[-tiles * 256 :]
  expected, found = jax.jit(
    lambda x: [
      quantize.encode_rows(x, None, DITHER, form=form, implementation=name)[0]
      for name in ("xla", "pallas_interpret")
    ]
  )(x)
  np.testing.assert_array_equal(found, expected)
