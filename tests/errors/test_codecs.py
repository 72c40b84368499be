"""What codecs refuse: hyperparameters, and arrays that are no floats."""

import dataclasses
import functools

import jax.numpy as jnp

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, FloatCast, Natural, Ternary
from tests.errors import table

ROWS = """
f(bits=v, levels="uniform") for f in QSGD, qsgd
for v in 0, 9, 17, -1, 4.0, True, None, "4", [4]
  `bits` ... 1 to 8 or 16 ... {v}
f(bits=1) for f in QSGD, qsgd
  `bits` ... at least 2 ... sign_magnitude ... 1 ... levels="uniform"
f(bits=v, levels="nonuniform") for f in QSGD, qsgd for v in 1, 5
  `bits` must be ... {v}
f(bucket_size=v) for f in OneBit, onebit_sgd
for v in 0, 1, 100, -32, 64.0, True, None, "64"
  `bucket_size` ... multiple of 32 ... {v}
f(bucket_size=v) for f in QSGD, qsgd, Ternary, terngrad, EightBit, eight_bit
for v in 0, 1, 100, -32, 64.0, True, "64", [64]
  `bucket_size` ... multiple of 32 ... None ... {v}
Sign(bucket_size=40)
  `bucket_size` ... 32 ... 40
# Choices, flags and types.
f(dtype=v) for f in Dense, dense for v in jnp.int8, np.float64, "float8", None, 3
  `dtype` ... float32, bfloat16 or float16 ... {v}
f(rounding="stochastic") for f in Dense, dense
  `rounding` ... float32 ... stochastic
# Ternary and 8 bits.
Ternary(clip_sigmas=v) for v in 0, -1.0, inf, nan, "2.5", True
  `clip_sigmas` ... above 0 ... {v}
Ternary(clip_sigmas=None, scaler="sigma")
  `clip_sigmas` ... None ... "clipped"
EightBit(dtype="mantissa", exponent_offset=v) for v in 31, -31, 1.0, True, "1"
  `exponent_offset` ... -30 to 30 ... {v}
EightBit(dtype=v, exponent_offset=1) for v in "dynamic_tree", "dynamic_map", "linear"
  `exponent_offset` ... None ... {v}
# Options of QSGD that go together.
QSGD(levels="nonuniform", norm="l2")
  `norm` must be ... 'l2'
QSGD(levels="nonuniform", share_scale=True)
  `share_scale` must be ... True
f(bits=2, norm="rms", levels="sign_magnitude") for f in QSGD, qsgd
  `levels` ... "uniform" ... 'sign_magnitude'
f(bits=2, norm="rms", levels="nonuniform") for f in QSGD, qsgd
  `norm` ... "max" ... 'rms'
f(bits=5, norm="rms", levels="uniform") for f in QSGD, qsgd
  `bits` ... 1 to 4 ... 5 ... norm="max"
f(bits=2, norm="rms", levels="uniform", bucket_size=None) for f in QSGD, qsgd
  `bucket_size` ... a number ... None
f(rotate=v) for f in QSGD, qsgd for v in 16, True, 8.0
  `rotate` ... 8, 32, or None ... {v}
f(rotate=8, bits=3) for f in QSGD, qsgd
  `bits` ... 1, 2 or 4 ... rotate=8 ... 3
f(rotate=32, bits=8) for f in QSGD, qsgd
  `bits` ... 1, 2 or 4 ... rotate=32 ... 8
f(rotate=8, levels="nonuniform") for f in QSGD, qsgd
  `rotate` ... None ... nonuniform ... 8
# Sparse codecs.
f(density=v) for f in TopK, RandomK, redsync
for v in 0, -0.1, 1.5, nan, "1%", None, True
  `density` ... above 0 and at most 1 ... {v}
f(density=jnp.float32(0.1)) for f in TopK, RandomK
  `density` ... traced ... gradcomp.wrappers.switch
f(range_size=v) for f in TopK, RandomK for v in 0, -1, 2.0**20, 2**40, "1", True
  `range_size` ... from 1 to ... None ... {v}
f(dtype=v) for f in TopK, redsync for v in np.int8, "float8"
  `dtype` ... float32, bfloat16 or float16 ... {v}
f(slack=v) for f in TopK, redsync for v in 0.5, 2.5, "2", True, nan
  `slack` ... from 1 to 2 ... {v}
f(quantize=v, selection="sampled") for f in TopK, redsync for v in "asq", "mean"
  `selection` ... "sampled" ... {v} ... "threshold"
f(quantize=v, dtype=jnp.bfloat16) for f in TopK, redsync for v in "asq", "mean"
  `dtype` ... float32 ... {v} ... bfloat16
BlockTop(block_size=v) for v in 7, 48, 4, 8192
  `block_size` must be ... {v}
BlockTop(count=v) for v in 0, 5
  `count` must be ... {v}
BlockTop(bits=v) for v in 1, 4, 16
  `bits` must be ... {v}
# Casts.
f(exponent_bits=v) for f in FloatCast, aps, cast for v in 0, 9, 4.5
  `exponent_bits` ... {v}
f(mantissa_bits=v) for f in FloatCast, aps, cast for v in -1, 24
  `mantissa_bits` ... {v}
f(mantissa_bits=0, exponent_bits=1) for f in FloatCast, aps, cast
  `mantissa_bits` ... 0
FloatCast(scale=v)
for v in 0, 0.0, -1.0, nan, inf, 1e39, 2.0**127, 2.0**-127, "large", None, True
  `scale` ... {v}
loss_scaling_cast(v)
for v in 0, 0.0, -1.0, nan, inf, 1e39, 2.0**127, 2.0**-127, "auto", None, True
  `factor` ... {v}
FloatCast(exponent_bits=3, mantissa_bits=0, addends=64)
  `exponent_bits` ... 64 workers ... zero
# Low rank, and Eden.
PowerSGD(bits=4)
  `bits` ... 8 ... 32 ... 4
Eden(bits=v) for v in 0, 9
  `bits` must be 1 to 8, got {v}
Eden(block_size=v) for v in 96, 16
  `block_size` must be a power of two from 32 to 65536 ... {v}
Eden(rotations=3)
  `rotations` must be 1 or 2, got 3
# Policies.
policy(v) for v in (), "a", [("a",)]
  `rules` must be ... sequence of pairs
policy([(3, QSGD())])
  `rules` must be ... got 3
policy([("(", QSGD())])
  `rules` must be ... '(' ... unterminated
policy([("a", qsgd())])
  `rules` must be ... for 'a' ... not a transformation
policy([("a", QSGD)])
  `rules` must be ... for 'a'
jax.eval_shape(policy([("w", QSGD()), ("head", Dense())]).init, {"w": jnp.ones(3)})
  `rules` ... 'head' ... Dense ... 'w' ... leave the rule out
# What an encoder needs.
f.encode(jnp.ones(3)) for f in *DRAWING
  `key` ... stochastic ... jax.random.key(
RandomK().encode(jnp.ones(3))
  `key` ... jax.random.key(seed).
QSGD(bits=1, levels="uniform").encode(jnp.ones(3))
  `key` ... choose norm="rms" and rounding="nearest"
QSGD().encode(jnp.ones(3), key=jax.random.key(0, impl="rbg"))
  `key` ... threefry2x32 ... uint32[4] ... impl="threefry2x32"
QSGD().encode(jnp.ones(3), key=v) for v in jax.random.split(KEY), np.zeros((2, 2), "u4")
  `key` ... threefry2x32 ... uint32[2, 2] ... impl="threefry2x32"
QSGD().encode(jnp.ones(3), key=v) for v in jnp.zeros(2, jnp.int32), jnp.float32(1.5)
  `key` ... threefry2x32 ... 32[ ... ] ... impl="threefry2x32"
f().encode(jnp.ones((3, 3), v), key=KEY) for f in *CODECS
for v in "int32", "bool", "complex64"
  TypeError: `x` ... real float ... {v!s}
"""
CODECS = [
  x
  for x in vars(gradcomp.codecs).values()
  if dataclasses.is_dataclass(x) and hasattr(x, "bind") and x.__name__ != "Policy"
]
DRAWING = [
  *(QSGD(), QSGD(levels="nonuniform"), Ternary(), Natural()),
  *(x(rounding="stochastic") for x in (EightBit, FloatCast)),
  Dense(dtype=jnp.bfloat16, rounding="stochastic"),
]
cast = functools.partial(gradcomp.loss_scaling_cast, 2.0)


@table.each_row(ROWS)
def test_bad_calls(call, error):
  table.refuses(call, error, globals())
