"""Pallas kernels give the reference's bits, interpreted, and lower for CUDA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.gpu.cases import CASES, Case
from gradcomp._src.codecs import quantizing
from gradcomp._src.kernels.common import fixed_point
from gradcomp._src.kernels.common.fixed_point import exact_quotient, top_multiplier
from gradcomp._src.kernels.common.scales import scales
from gradcomp._src.kernels.gpu import dispatch, self_check, tiles
from gradcomp._src.kernels.gpu.verdicts import Verdict
from gradcomp._src.kernels.quantize import qsgd, reference
from gradcomp.codecs import QSGD, EightBit, FloatCast, OneBit, Ternary
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.lowering import KERNEL, lowered_for_cuda

KEY = np.array([123, 456], np.uint32)
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
CHECKED = {
  "top_k 1.0%",
  "ternary base3 shared",
  "float_cast (5, 2) stochastic, exponent",
}


def every(plain):
  """Parametrizes a test by all cases, of which plain runs have those named."""
  names = [pytest.param(x, marks=[pytest.mark.slow] * (x not in plain)) for x in CASES]
  return pytest.mark.parametrize("name", names)


every_case = every(PLAIN)


@pytest.fixture
def small(monkeypatch):
  """Makes a case of short rows, several of which are a block of a kernel."""

  def shortened(name: str) -> Case:
    case = CASES[name]
    codec = case.codec
    words = 32 if getattr(codec, "bits", 3) < 3 else 64
    monkeypatch.setattr(quantizing, "_TENSOR_ROW", words)
    # Not those that the table itself has in several sizes.
    if getattr(codec, "bucket_size", None) == 512 and case.operation != "one_bit":
      codec = dataclasses.replace(codec, bucket_size=words)
    return case._replace(codec=codec, tile=case.tile and 1024)

  return shortened


def test_plain_runs_have_every_operation():
  assert CHECKED < PLAIN < set(CASES)
  operations = {CASES[name].operation for name in CASES}
  assert {CASES[name].operation for name in PLAIN} == operations


def operands(case: Case, size: int, rows: int) -> list[np.ndarray]:
  """Makes the arrays that a kernel reads beside the gradient, independent of that.

  Scales differ from row to row; the first is zero and the last NaN. The fourth is the
  least that a tensor's may be.
  """
  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  found = []
  for like in jax.eval_shape(lambda x: case.operands(case.codec, x), x):
    if like.dtype == jnp.uint32:
      found.append(DITHER)
    elif like.dtype == jnp.int32:
      found.append(np.int32(-3))
    elif not like.shape:
      found.append(np.float32(1.5))
    else:
      scale = np.random.default_rng(3).uniform(0.5, 3, (rows, like.shape[1]))
      found.append(scale.astype(np.float32))
      found[-1][0, 0], found[-1][-1, -1] = 0, np.nan
      if case.operation == "block_float":
        found[-1][3:4] = case.codec._form.least_shared
  return found


def gradient(size: int, tile: int) -> np.ndarray:
  """Normal numbers among special ones: NaN, infinity, zeros, constants, extremes."""
  x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
  part = tile // 8
  for number, value in enumerate((0, 1.25, 3e38, -1e-37, -0.0, 1e-42)):
    x[(number + 8) * part :][:part] = value
  x[3 * tile : 4 * tile] *= np.float32(2.0**-112)
  x[part + 1 :: tile], x[3 * part + 2 :: tile] = np.nan, -np.inf
  return x


@every_case
def test_an_interpreted_kernel_has_the_references_bits(name, small, monkeypatch):
  # Of two tiles or one, as a large bucket fills a block of the real size.
  monkeypatch.setattr(tiles, "_ELEMENTS", 128)
  case = small(name)
  tile = case.tile or case.codec.tile_size
  # Several blocks, and a tile and a part of one behind them.
  size = 7 * tile + 77
  x, given = gradient(size, tile), operands(case, size, 8)
  expected = compiled(case.function("xla"), x, *given)
  found = compiled(case.function("pallas_interpret"), x, *given)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(_bits(a), _bits(b))


@every(CHECKED)
@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_an_interpreted_kernel_passes_its_own_check(
  name, interpreter, small, monkeypatch
):
  case = small(name)
  found = []

  def interpreted(kernel, reference, example, platform):
    if platform != "cuda":
      return Verdict()
    kernel = functools.partial(kernel, interpret=INTERPRETERS[interpreter])
    found.append(verdict(kernel, reference, example).failure)
    return Verdict()

  verdict = self_check.verdict
  monkeypatch.setattr(self_check, "verdict", interpreted)
  monkeypatch.setattr(self_check, "_seconds", lambda *_: [1.0, 2.0])
  monkeypatch.setattr(self_check, "_gpus", lambda: jax.devices()[:1])
  monkeypatch.setitem(self_check._ELEMENTS, "cuda", 1 << 11)
  monkeypatch.setattr(self_check, "_known", {})
  monkeypatch.setattr(self_check, "_taken", {})
  x = jax.ShapeDtypeStruct((2 * (case.tile or case.codec.tile_size),), jnp.float32)
  jax.eval_shape(case.function(None), x, *operands(case, x.size, 2))
  assert found == [""] * max(len(case.kernels), 1)
  assert len(self_check._known) == len(found)


def compiled(function: Any, *args: Any) -> Any:
  """Without LLVM's optimizations, which take most of the time of an unrolled kernel."""
  options = {"xla_backend_optimization_level": 0}
  return jax.jit(function).lower(*args).compile(compiler_options=options)(*args)


def _bits(x: jax.Array) -> np.ndarray:
  return np.asarray(x).view(np.uint32)


@every_case
def test_a_kernel_lowers_for_cuda(name, small):
  case = small(name)
  x = jax.ShapeDtypeStruct((8 * (case.tile or case.codec.tile_size) + 77,), jnp.float32)
  text = lowered_for_cuda(case.function(None), x, *operands(case, x.size, 9))
  assert text.count(KERNEL) == max(len(case.kernels), 1)


@every_case
def test_a_named_kernel_has_the_references_types(name, monkeypatch):
  """What differs among workers is typed so in ``jax.shard_map``, for every size."""
  case = CASES[name]
  monkeypatch.setattr(dispatch, "_missing", lambda: None)
  monkeypatch.setattr(dispatch, "_approved", lambda *_, named=False: named)
  found = {"pallas": [], "xla": []}

  def types(implementation, given):
    outputs = case.function(implementation)(*given)
    found[implementation] += [jax.typeof(x) for x in jax.tree.leaves(outputs)]

  def per_device(*given):
    for implementation in found:
      types(implementation, given)

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
  form = qsgd.Form(bits=8, bucket_size=64, levels="uniform")
  encode = functools.partial(qsgd.encode_rows, form=form)
  x = gradient(max(tiles, 2) * 256, 256)[-tiles * 256 :]
  expected, _ = encode(x, None, DITHER, implementation="xla")
  found, _ = encode(x, None, DITHER, implementation="pallas_interpret")
  np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_division_is_correctly_rounded_where_gpus_are_off(off, monkeypatch):
  """Their division of floats by up to two units in the last place."""
  rng = np.random.default_rng(0)
  count = 2**18
  total = np.exp(rng.uniform(-20, 20, count)).astype(np.float32)
  divisor = np.exp(rng.uniform(-20, 20, count)).astype(np.float32)
  total[: count // 2] = rng.integers(1, 2**24, count // 2)
  divisor[: count // 2] = rng.integers(1, 4097, count // 2)
  divide, asked = jnp.divide, []

  def nearly(x, y):
    asked.append(y.shape)
    bits = jax.lax.bitcast_convert_type(divide(x, y), jnp.int32)
    return jax.lax.bitcast_convert_type(bits + off, jnp.float32)

  monkeypatch.setattr(jnp, "divide", nearly)
  found = jax.jit(lambda x, y: fixed_point.exact_quotient(x, y))(total, divisor)
  assert asked == [total.shape]
  np.testing.assert_array_equal(_bits(found), _bits(total / divisor))


def test_the_factor_of_a_scale_is_correctly_rounded():
  rng = np.random.default_rng(0)
  divisor = np.exp(rng.uniform(np.log(2.0**-96), np.log(3e38), 2**18))
  edges = [0, 2.0**-96, 1, 1 + 2.0**-23, 2 - 2.0**-23, np.finfo(np.float32).max]
  divisor = np.append(divisor, [*edges, np.nan]).astype(np.float32)
  for top in (1 << 15, 1 << 16, 7 << 16, 127 << 16, 32767 << 16):
    expected = top_multiplier(top, jnp.asarray(divisor))
    exactly = lambda scale, top=top: top_multiplier(top, scale, exact_quotient)
    found = jax.jit(exactly)(divisor)
    np.testing.assert_array_equal(_bits(found), _bits(expected))


CODECS = [
  QSGD(bits=4, bucket_size=64),
  OneBit(),
  *slow(
    FloatCast(),
    QSGD(bits=8, bucket_size=None, norm="l2", rounding="nearest"),
    QSGD(bits=2, bucket_size=64, share_scale=True),
    QSGD(bits=2, bucket_size=64, norm="rms", levels="uniform", rounding="nearest"),
    QSGD(bits=4, bucket_size=64, rotate=8),
    Ternary(),
    EightBit(bucket_size=64),
  ),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_runs_its_kernel_on_cuda_and_the_reference_here(codec):
  x = gradient(2 * codec.tile_size + 5, codec.tile_size)

  def encode(x):
    return codec.encode(x, key=KEY).rows

  assert KERNEL in lowered_for_cuda(encode, x)
  assert KERNEL not in jax.jit(encode).lower(x).as_text()
  interpreted = type(codec)(**{**vars(codec), "implementation": "pallas_interpret"})
  found = jax.jit(lambda x: interpreted.encode(x, key=KEY).rows)(x)
  np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(encode)(x)))


@pytest.mark.parametrize(
  "bits, check_vma",
  [
    (4, True),
    *slow((8, False), (4, False), (8, True)),
  ],
)
def test_a_train_step_runs_the_kernels_on_cuda(bits, check_vma):
  optimizer = optax.chain(
    gradcomp.compress(
      QSGD(bits=bits), axis_name="data", exchange="two_shot", feedback="error"
    ),
    optax.sgd(0.1),
  )
  params = {"w": jnp.ones((512, 64))}
  with jax.set_mesh(modes.mesh(2)):
    state = optimizer.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")

  def per_device(params, state, batch):
    def loss_fn(params, batch):
      return jnp.mean((batch @ params["w"]) ** 2)

    grad = gradcomp.value_and_grad(loss_fn, axis_name="data")
    _, grads = grad(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def step(*args):
    ins, outs = (P(), specs, P("data")), (P(), specs)
    mapped = jax.shard_map(
      per_device, in_specs=ins, out_specs=outs, check_vma=check_vma
    )
    return mapped(*args)

  args = params, state, jnp.ones((4, 512))
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
  text = lowered_for_cuda(step, *shapes, data=2)
  # What workers send first, with its residual, and what owners send.
  assert text.count(KERNEL) == 2
  assert text.count("qsgd_encode") >= 2
  with jax.set_mesh(modes.mesh(2)):
    assert KERNEL not in jax.jit(step).lower(*args).as_text()
    jax.block_until_ready(jax.jit(step)(*args))


@pytest.mark.parametrize(
  ("codec", "x", "match"),
  [
    (QSGD(implementation="pallas"), jnp.ones(4096), "needs a GPU.*'cpu'"),
    (QSGD(bucket_size=96, implementation="pallas"), jnp.ones(4096), "powers of two"),
    (QSGD(implementation="pallas_interpret"), jnp.ones(100), "at least one tile"),
  ],
  ids=str,
)
def test_a_name_that_cannot_run_says_the_way_out(codec, x, match):
  with pytest.raises(ValueError, match=f"`implementation` must be .*{match}"):
    codec.encode(x, key=KEY)


def test_an_unknown_name_is_refused():
  for codec in (QSGD, OneBit, Ternary, EightBit, FloatCast):
    with pytest.raises(ValueError, match="`implementation` must be None or one of"):
      codec(implementation="cuda")


def test_other_sizes_take_the_reference_everywhere():
  x = jnp.ones(8 * 96)
  codec = QSGD(bits=4, bucket_size=96)
  text = lowered_for_cuda(lambda x: codec.encode(x, key=KEY).rows, x)
  assert KERNEL not in text
  assert scales(jnp.float32(1.0)) == codec.encode(x, key=KEY).rows[0, 96:].view("f4")[0]


def test_leaves_of_one_shape_are_traced_and_lowered_once(monkeypatch):
  traced, encode_rows = [], reference.encode_rows

  def counted(x, *operands, **options):
    traced.append(x.shape)
    return encode_rows(x, *operands, **options)

  monkeypatch.setattr(reference, "encode_rows", counted)

  def lines(*sizes):
    codec = QSGD(bits=4, bucket_size=64)
    encode = lambda xs: [codec.encode(x, key=KEY).rows for x in xs]
    return len(jax.jit(encode).lower([jnp.zeros(n) for n in sizes]).as_text().split())

  # Two tiles or more have a kernel, and less than one has none.
  assert lines(1500, 1500, 1500, 1500) < 1.5 * lines(1500)
  assert lines(100, 100, 100, 100) < 1.5 * lines(100)
  assert traced == [(1500,), (100,)]
