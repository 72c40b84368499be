"""What codecs refuse: hyperparameters, and arrays that are no floats."""

import functools

import jax.numpy as jnp

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, FloatCast, Natural, Ternary
from tests.errors import table
from tests.support import factories

ROWS = """
f(bits=v, levels="uniform") for f in QSGD, qsgd for v in 0, 9, 4.0, None -> 1 to 8 or
  16 ... {v}
QSGD(bits=1) -> `bits` ... at least 2 ... sign_magnitude ... 1 ... levels="uniform"
QSGD(bits=v, levels="nonuniform") for v in 1, 5 -> `bits` must be ... {v}
f(bucket_size=v) for f in OneBit, onebit_sgd, Sign, QSGD, qsgd, Ternary, terngrad,
  EightBit, eight_bit for v in 1, 40, -32, 64.0 ; OneBit(bucket_size=v) for v in None, 0
  -> `bucket_size` ... 32 ... {v}
f(dtype=v) for f in Dense, dense for v in jnp.int8, np.float64, "float8", None, 3 ;
  f(dtype=v) for f in TopK, redsync for v in np.int8, "float8" -> `dtype` ... float32,
  bfloat16 or float16 ... {v}
f(rounding="stochastic") for f in Dense, dense -> `rounding` ... float32 ... stochastic
Ternary(clip_sigmas=None, scaler="sigma") -> `clip_sigmas` ... None ... "clipped"
EightBit(dtype=v, exponent_offset=1) for v in "dynamic_tree", "dynamic_map", "linear" ->
  `exponent_offset` ... None ... {v}
# Options of QSGD that go together.
QSGD(levels="nonuniform", norm="l2") -> `norm` must be ... 'l2'
QSGD(levels="nonuniform", share_scale=True) -> `share_scale` must be ... True
QSGD(bits=2, norm="rms", levels="sign_magnitude") -> `levels` ... "uniform" ... 'sign_
QSGD(bits=2, norm="rms", levels="nonuniform") -> `norm` ... "max" ... 'rms'
QSGD(bits=5, norm="rms", levels="uniform") -> `bits` ... 1 to 4 ... 5 ... norm="max"
QSGD(bits=2, norm="rms", levels="uniform", bucket_size=None) -> `bucket_size` ... None
QSGD(rotate=v) for v in 16, True, 8.0 -> `rotate` ... 8, 32, or None ... {v}
QSGD(rotate=8, bits=v) for v in 3, 8 ; QSGD(rotate=32, bits=v) for v in 3, 8 -> `bits`
  ... 1, 2 or 4 ... rotate= ... {v}
QSGD(rotate=8, levels="nonuniform") -> `rotate` ... None ... nonuniform ... 8
f(density=jnp.float32(0.1)) for f in TopK, RandomK -> `density` ... traced ...
  gradcomp.wrappers.switch
TopK(quantize=v, selection="sampled") for v in "asq", "mean" -> `selection` ...
  "sampled" ... {v} ... "threshold"
TopK(quantize=v, dtype=jnp.bfloat16) for v in "asq", "mean" -> `dtype` ... float32 ...
  {v}
BlockTop(block_size=v) for v in 7, 48 ; BlockTop(bits=v) for v in 1, 4 -> must ... {v}
f(exponent_bits=v) for f in aps, cast for v in 9, 4.5 -> _bits` ... {v}
FloatCast(mantissa_bits=0, exponent_bits=1) -> `mantissa_bits` ... 0
FloatCast(scale=v) for v in 1e39, 2.0**127, 2.0**-127, "large", None -> `scale` ... {v}
loss_scaling_cast(v) for v in 0.0, 1e39, 2.0**127, 2.0**-127, None -> `factor` ... {v}
FloatCast(exponent_bits=3, mantissa_bits=0, addends=64) -> `exponent_bits` ... 64
  workers
powersgd(bits=4) -> `bits` ... 8 ... 32 ... 4
Eden(block_size=96) -> `block_size` must be a power of two from 32 to
policy(v) for v in (), "a", [("a",)] -> `rules` must be ... sequence of pairs
policy([(3, QSGD())]) -> `rules` must be ... got 3
policy([("(", QSGD())]) -> `rules` must be ... '(' ... unterminated
policy([("a", v)]) for v in qsgd(), QSGD -> `rules` must be ... for 'a'
policy([("a", powersgd())]) -> `rules` must be ... for 'a' ... optax.partition
jax.eval_shape(policy([("w", QSGD()), ("head", Dense())]).init, {"w": jnp.ones(3)}) ->
  `rules` ... 'head' ... Dense ... 'w' ... leave the rule out
# What an encoder needs.
f.encode(jnp.ones(3)) for f in *DRAWING -> `key` ... stochastic ... jax.random.key(
RandomK().encode(jnp.ones(3)) -> `key` ... jax.random.key(seed).
QSGD(bits=1, levels="uniform").encode(jnp.ones(3)) -> `key` ... choose norm="rms" and
QSGD().encode(jnp.ones(3), key=v) for v in jax.random.key(0, impl="rbg"),
  jax.random.split(KEY), np.zeros((2, 2), "u4"), jnp.zeros(2, jnp.int32),
  jnp.float32(1.5) -> `key` ... threefry2x32 ... 32[ ... ] ... impl="threefry2x32"
f().encode(jnp.ones((3, 3), v), key=KEY) for f in *CODECS for v in "int32", "bool",
  "complex64" -> TypeError: `x` ... real float ... {v!s}
"""
CODECS = factories.codecs()
CODECS.remove(gradcomp.codecs.Policy)
DRAWING = [
  *(QSGD(), QSGD(levels="nonuniform"), Ternary(), Natural()),
  *(x(rounding="stochastic") for x in (EightBit, FloatCast)),
  Dense(dtype=jnp.bfloat16, rounding="stochastic"),
]
cast = functools.partial(gradcomp.loss_scaling_cast, 2.0)


test_bad_calls = table.refused(ROWS, globals())
