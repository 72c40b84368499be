"""Lists every kernel of the encoders: tests and gpu/check.py compare them.

gpu/speed.py and gpu/ptx.py time and read them. A case calls one implementation of
an operation, and gives it all that it reads beside the gradient. So the numbers that a
codec finds before, such as the scale of a tensor, are the same for all implementations.
A new kernel is one more line in CASES, or one more implementation in a line.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp import codecs
from gradcomp._src.codecs.quantizing import TENSOR_ROW
from gradcomp._src.codecs.sums.records import NOTHING, Context
from gradcomp._src.kernels import float_cast
from gradcomp._src.kernels.common.dithers import LANES
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.kernels.one_bit import WORD

KEY = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)
_DITHER = np.append(KEY, np.uint32(0))

_STRANGE = (np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-126, -(2.0**-100), 3e38, -3e38)
_SUBNORMAL = (1e-39, -1e-45)

Kernels = tuple[Implementation, ...] | None
Encode = Callable[..., tuple[jax.Array, ...]]


class Case(NamedTuple):
  """One operation with its settings."""

  name: str  # begins with the operation
  codec: Any  # holds the settings
  # Maps the codec, the gradient and the operands to rows and, where the kernel writes
  # one, a residual.
  encode: Encode
  # Maps the codec and the gradient to the other arrays that a kernel reads.
  operands: Callable[[Any, jax.Array], tuple[jax.Array, ...]]
  # Special values that the kernel must treat alike on every device.
  strange: Sequence[float] = _STRANGE + _SUBNORMAL
  timed: bool = False  # whether gpu/speed.py times it by default
  implementations: tuple[Implementation, ...] = ("pallas",)  # the kernels that exist
  tile: int = 0  # elements of a tile; 0 for the codec's
  rounds: int = 0  # of a kernel's loop; 0 for once for eight buckets of a tile
  # Maps rows to values; None for the codec's own way.
  decode: Callable[[jax.Array], jax.Array] | None = None
  kernels: tuple[str, ...] = ()  # prefixes of their names; by default the operation

  @property
  def operation(self) -> str:
    return self.name.partition(" ")[0]

  @property
  def trips(self) -> int:
    if self.rounds:
      return self.rounds
    size = getattr(self.codec, "bucket_size", self.codec.row_words)
    return max(self.codec.tile_size // (size or TENSOR_ROW) // LANES, 1)

  def function(self, implementation: Implementation | None) -> Encode:
    """Returns one implementation as a function of the gradient and the operands."""
    codec = dataclasses.replace(self.codec, implementation=implementation)
    return lambda x, *operands: self.encode(codec, x, *operands)

  def values(self, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    rows, *residual = outputs
    decode = self.decode or self.codec.decode_rows
    return decode(rows), *residual

  def structs(self, size: int) -> tuple[Any, ...]:
    """Returns structs of a gradient, and of what a kernel reads beside it."""
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    return x, *jax.eval_shape(lambda x: self.operands(self.codec, x), x)

  def sizes(self) -> tuple[int, ...]:
    """Returns the sizes of gradients: one tile, several, and a part of one."""
    tile = self.tile or self.codec.tile_size
    return tuple(tile * tiles + rest for tiles, rest in _SIZES)


_SIZES = ((1, 0), (7, 0), (67, 77))  # whole tiles, and elements more


def _dither(codec: Any, x: jax.Array) -> tuple[jax.Array, ...]:
  del x
  return (jnp.asarray(_DITHER),) if codec.needs_key else ()


def _context(codec: Any, given: Sequence[jax.Array]) -> Context:
  return Context(dither=given[-1] if codec.needs_key else None)


def _shared(codec: Any) -> dict[str, Any]:
  """Says what rows without scales are: codes, which mean nothing under a NaN."""
  return {"decode": codec.codes, "strange": (0.0, -0.0)} if codec.share_scale else {}


def _scaled(name: str, codec: Any, *, keep: bool = False, **more: Any) -> Case:
  """Makes the case of a codec whose kernel reads scales, or finds them by itself."""

  def operands(codec: Any, x: jax.Array) -> tuple[jax.Array, ...]:
    scale = codec.scales_for(x)
    return (() if scale is None else (scale,)) + _dither(codec, x)

  def encode(codec: Any, x: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
    scale = given[0] if len(given) > codec.needs_key else None
    return codec.encode_by(scale, x, _context(codec, given), keep=keep)[: 1 + keep]

  return Case(f"{name}{', residual' * keep}", codec, encode, operands, **more)


def _whole(name: str, codec: Any, *, keep: bool = False, **more: Any) -> Case:
  """Makes the case of a codec whose kernel reads nothing beside the gradient."""
  encode = lambda codec, x: codec.encode_leaf(x, NOTHING, keep=keep)[: 1 + keep]
  return Case(f"{name}{', residual' * keep}", codec, encode, _dither, **more)


def _qsgd(name: str, keep: bool = False, timed: bool = False, **options: Any) -> Case:
  codec = codecs.QSGD(**options)
  return _scaled(f"qsgd {name}", codec, keep=keep, timed=timed, **_shared(codec))


def _one_bit(size: int, keep: bool) -> Case:
  # CPUs flush subnormal numbers: there they are not below zero.
  more: Any = {"strange": _STRANGE, "timed": True, "rounds": WORD, "keep": keep}
  return _whole(f"one_bit bucket {size}", codecs.OneBit(bucket_size=size), **more)


def _block_top(name: str, keep: bool, timed: bool = False, **options: Any) -> Case:
  codec = codecs.BlockTop(**options)
  return _whole(f"block_top {name}", codec, keep=keep, timed=timed, rounds=1)


def _top_k(density: float) -> Case:
  return Case(
    f"top_k {density:.1%}",
    codecs.TopK(density=density, selection="threshold"),
    lambda codec, x: (codec.encode(x).rows,),
    _dither,
    timed=density == 0.01,  # the kernel reads the threshold, and is one for all
    tile=1 << 16,
    rounds=4,
    decode=lambda rows: rows,
    kernels=("mark",),
  )


def _ternary(name: str, *, timed: bool = False, **options: Any) -> Case:
  codec = codecs.Ternary(**({"share_scale": False} | options))
  encode = lambda codec, x, scale, limit, *given: (
    codec.encode_by(scale, x, _context(codec, given), limit).rows,
  )
  operands = lambda codec, x: codec.leaf_statistics(x) + _dither(codec, x)
  return Case(f"ternary {name}", codec, encode, operands, timed=timed, **_shared(codec))


def _cast(e: int, m: int, rounding: Any, *, auto: bool, timed: bool) -> Case:
  way: Any = {"rounding": rounding, "scale": "auto" if auto else 1.0}
  codec = codecs.FloatCast(exponent_bits=e, mantissa_bits=m, **way)

  def operands(codec: codecs.FloatCast, x: jax.Array) -> tuple[jax.Array, ...]:
    if not auto:
      return _dither(codec, x)
    exponent = float_cast.shift(codec.agree(x)[0, 0], codec.format, 1)
    return (exponent, *_dither(codec, x))

  encode = lambda codec, x, *given: (
    codec._encode(x, given[0] if auto else None, _context(codec, given)),
  )
  name = f"float_cast ({e}, {m}) {rounding}{', exponent' * auto}"
  # With an exponent, codes of what is not finite mean nothing.
  strange = tuple(v for v in _STRANGE if not auto or np.isfinite(v)) + _SUBNORMAL
  return Case(name, codec, encode, operands, strange=strange, timed=timed)


def _block_float(name: str, *, timed: bool = False, **options: Any) -> Case:
  codec = codecs.BlockFloat(**options)
  return _scaled(f"block_float {name}", codec, timed=timed, rounds=1)


def _given(bits: int) -> Case:
  """Gives the encoder one scale or many, which a row does or does not hold."""
  one, sent = bits in (1, 3, 5, 7), bits > 4
  norm, size = ("max", None) if one else ("l2", 512)
  name = f"{bits} bit uniform nearest, {'one scale' if one else 'l2'}"
  own = {"bucket_size": size, "norm": norm, "share_scale": not sent}
  name += ", shared" * (not sent)
  return _qsgd(name, bits=bits, **own, **_UNIFORM, **_NEAREST)


_NEAREST: Any = {"rounding": "nearest"}
_UNIFORM: Any = {"levels": "uniform"}
_2_OF_16: Any = {"block_size": 16, "count": 2}
_NVFP4: Any = {"element": "e2m1", "scale": "e4m3", "block_size": 16}
CASES: dict[str, Case] = {
  case.name: case
  for case in [
    *(_top_k(density) for density in (0.001, 0.01)),
    _qsgd("1 bit uniform", bits=1, **_UNIFORM),
    *(_qsgd(f"{n} bit", bits=n, timed=n == 2) for n in (2, 3, 5, 6, 7, 16)),
    *(_qsgd(f"{n} bit", x, True, bits=n) for x in (False, True) for n in (4, 8)),
    *(_qsgd(f"{n} bit", True, bits=n) for n in (2, 3, 5, 6, 7, 16)),
    *(_given(bits) for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16)),
    _qsgd("4 bit nearest", bits=4, timed=True, **_NEAREST),
    *(_qsgd(f"{n} bit nearest", bits=n, keep=True, **_NEAREST) for n in (2, 3, 16)),
    *(_qsgd(f"{n} bit uniform", bits=n, keep=True, **_UNIFORM) for n in (1, 4, 8)),
    _qsgd("4 bit bucket 64", bits=4, bucket_size=64, keep=True),
    _qsgd("4 bit shared", bits=4, share_scale=True),
    _qsgd("4 bit tensor scale", bits=4, bucket_size=None, timed=True),
    _qsgd("4 bit l2", bits=4, norm="l2", timed=True),
    _qsgd("8 bit l2", bits=8, norm="l2"),
    *(_one_bit(size, keep) for size in (64, 512) for keep in (False, True)),
    _one_bit(32, True),
    *(_ternary(packing, packing=packing, timed=True) for packing in ("2bit", "base3")),
    *(_ternary(f"{x} bucket 64", packing=x, bucket_size=64) for x in ("2bit", "base3")),
    _ternary("2bit unclipped", clip_sigmas=None),
    _ternary("base3 shared", packing="base3", share_scale=True),
    *(
      _scaled(
        f"eight_bit {name}{', blocks' * bool(size)}, {rounding}",
        codecs.EightBit(dtype=name, bucket_size=size, rounding=rounding),
        timed=name in ("dynamic_tree", "linear") and rounding == "nearest",
      )
      for name in ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")
      for size in (None, 512)
      for rounding in ("nearest", "stochastic")
    ),
    *(
      _cast(e, m, rounding, auto=auto, timed=rounding == "nearest_even" and usual)
      for e, m, usual in (
        *((5, 2, True), (4, 3, True), (3, 0, True)),
        *((8, 7, False), (5, 10, False), (8, 23, False), (2, 1, False)),
      )
      for rounding in ("nearest_even", "stochastic", "toward_zero")
      for auto in (False, True)
    ),
    # Casts to a format without mantissa bits, by the kernel of the casts.
    Case(
      "float_cast natural",
      codecs.Natural(),
      lambda codec, x, dither: (codec.encode_rows(x, Context(dither=dither)),),
      _dither,
    ),
    _block_float("mxfp8", timed=True),
    _block_float("mxfp4 stochastic", element="e2m1", rounding="stochastic"),
    _block_float("nvfp4", **_NVFP4, timed=True),
    _block_float("nvfp4 stochastic", **_NVFP4, rounding="stochastic", timed=True),
    *(_block_top("1 of 64", keep, timed=True) for keep in (False, True)),
    *(_block_top(f"2 of 16, {x} bits", True, bits=x, **_2_OF_16) for x in (8, 32)),
  ]
}


def gradients(size: int, seed: int = 0) -> np.ndarray:
  """Draws normal numbers of several orders of magnitude: ``float32[size]``."""
  rng = np.random.default_rng(seed)
  scale = np.float32(10) ** rng.integers(-4, 2, -(-size // 512)).astype(np.float32)
  return rng.standard_normal(size, np.float32) * np.repeat(scale, 512)[:size]


def with_strange(x: np.ndarray, values: Sequence[float]) -> np.ndarray:
  """Puts in each value alone among ordinary ones, and runs of zeros and constants."""
  x = x.copy()
  for number, value in enumerate(values):
    x[number * 97 % x.size :: 1031 * len(values)] = value
  x[x.size // 2 : x.size // 2 + 1100] = 0
  x[-700:] = -1.5
  return x
