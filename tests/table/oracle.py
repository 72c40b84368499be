"""What a step of a row must give, by the specifications of codec and exchange.

Each step is judged alone, from the state before it. Rows of both leaves of a message
are there, for owners' shares and the keys of sums span them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  BlockTop,
  Codec,
  Dense,
  EightBit,
  FloatCast,
  Leaf,
  Natural,
  OneBit,
  Sign,
  Ternary,
  TopK,
)
from tests.specs import (
  block_float,
  block_top,
  dense,
  dithers,
  eight_bit,
  exchange,
  float_cast,
  natural,
  one_bit,
  planes,
  qsgd,
  rotation,
  sign,
  ternary,
  top_k,
)
from tests.specs import scales as scale_table
from tests.specs.methods import sparse
from tests.support.cases.float import cast_of
from tests.table.run import GROUPS, SEED

LEAVES = ("a", "h")
LATER = "['a']\n['h']\n"  # the name in keys of sums and means


class Coding(NamedTuple):
  """What numbers become that are encoded and decoded by the specification.

  Attributes:
    through: ``through(x, key, per_row)``, float32 of the size of x. Without a key it
      rounds to nearest; ``per_row`` gives each row a scale, as of sums.
    exact: whether it has the library's bits. Norms and means of buckets are summed in
      other orders, and rotations are done elsewhere.
  """

  through: Callable[..., np.ndarray]
  exact: bool = True


def coding(codec: Codec) -> Coding | None:
  """The coding of a codec whose workers share nothing but keys; None for others."""
  match codec:
    case QSGD(share_scale=False) if codec.levels != "nonuniform":
      exact = codec.norm == "max" and not codec.rotate
      return Coding(functools.partial(_qsgd, codec), exact)
    case Ternary(share_scale=False, clip_sigmas=None):
      return Coding(functools.partial(_ternary, codec))
    case EightBit():
      return Coding(functools.partial(_eight_bit, codec))
    case BlockFloat(rotate=None):
      return Coding(functools.partial(_block_float, codec), codec.scale == "e8m0")
    case Dense():
      rule = dict(dtype=codec.dtype)
      return Coding(functools.partial(_simple, dense, rule, rule))
    case Natural():
      return Coding(functools.partial(_simple, natural, {}, {}))
    case OneBit(per_column=False):
      rule = dict(bucket_size=codec.bucket_size)
      return Coding(functools.partial(_without_key, one_bit, rule), exact=False)
    case Sign(scale="mean"):
      rule = dict(bucket_size=codec.bucket_size, scale="mean")
      return Coding(functools.partial(_without_key, sign, rule), exact=False)
    case BlockTop():
      names = dict(block_size=codec.block_size, count=codec.count)
      rule = names | {"value_bits": codec.bits}
      return Coding(functools.partial(_without_key, block_top, rule))
    case TopK(selection="exact", quantize=None, range_size=int()):
      slots = top_k.slots_of(codec.density, codec.range_size, "exact", codec.slack)
      rule = dict(range_size=codec.range_size, slots=slots)
      rule |= {"value_dtype": jnp.dtype(codec.dtype).name}
      return Coding(functools.partial(_without_key, top_k, rule))
  return None


def _qsgd(codec, x, key, per_row=False):
  layout = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  given = x
  if codec.rotate:
    given = rotation.rotate(x, group=codec.rotate, **layout)
  rows = qsgd.encode(
    given,
    key=key,
    norm=codec.norm,
    levels=codec.levels,
    rounding="nearest" if key is None else "stochastic",
    scale_per_row=per_row,
    **layout,
  )
  value = qsgd.decode(rows, given.size, levels=codec.levels, **layout)
  if codec.rotate:
    value = rotation.unrotate(value, group=codec.rotate, **layout)
  return value[: x.size]


def _ternary(codec, x, key, per_row=False):
  rule = dict(packing=codec.packing, bucket_size=codec.bucket_size)
  scales = ternary.scales_of(x, scale_per_row=per_row, **rule)
  rounding = "nearest" if key is None else "stochastic"
  rows = ternary.encode(x, key=key, scales=scales, rounding=rounding, **rule)
  return ternary.decode(rows, x.size, **rule)


def _eight_bit(codec, x, key, per_row=False):
  rule = dict(data_type=codec.dtype, bucket_size=codec.bucket_size)
  rule["exponent_offset"] = codec.exponent_offset
  rounding = "nearest" if key is None else "stochastic"
  scales = eight_bit.scales_of(x, rounding=rounding, scale_per_row=per_row, **rule)
  rows = eight_bit.encode(x, key=key, scales=scales, rounding=rounding, **rule)
  return eight_bit.decode(rows, x.size, **rule)


def _block_float(codec, x, key, per_row=False):
  rule = dict(element=codec.element, scale=codec.scale, block_size=codec.block_size)
  parts = [x]
  if per_row:  # of rows, one scale of numbers each
    parts = x.reshape(-1, codec.tile_size)
  found = []
  for part in parts:
    rows = block_float.encode(part, key=key, **rule)
    found.append(block_float.decode(rows, part.size, **rule))
  return np.concatenate(found)


def _simple(spec, written, read, x, key, per_row=False):
  return spec.decode(spec.encode(x, key=key, **written), x.size, **read)


def _without_key(spec, rule, x, key, per_row=False):
  return spec.decode(spec.encode(x, **rule), x.size, **rule)


class Step(NamedTuple):
  """What a step must give of leaf ``a``.

  Attributes:
    mean: float32[size].
    kept: each worker's residual, float32[N, size]; None where it keeps what sums lose.
    owned: what owners keep, float32[N, rows, tile]; None where they keep nothing.
    exact: whether it has the library's bits.
  """

  mean: np.ndarray
  kept: np.ndarray | None = None
  owned: np.ndarray | None = None
  exact: bool = True


def step(run, number: int) -> Step | None:
  """The step of a row by the specifications; None where none speaks of it."""
  row, codec = run.row, run.row.codec
  if row.feedback not in ("none", "error"):
    return None
  before = run.stacked[number]
  given = {}
  for name in LEAVES:
    x = np.float32(run.gradients[number][name]).reshape(row.workers, -1)
    if before.residual is not None:
      x = x + np.asarray(before.residual[name]).reshape(x.shape)
    given[name] = x
  if isinstance(codec, FloatCast):
    return _float_cast(row, codec, given, number)
  if getattr(codec, "share_scale", False):
    return _shared(row, codec, given["a"], number)
  found = coding(codec)
  if found is None:
    return None
  return _EXCHANGES.get(row.exchange, _none)(row, codec, found, given, number, before)


def _none(*args):
  return None


def _dither(number, name, worker, *more):
  return dithers.leaf_dither(SEED, number, name, worker, *more)


def _random(codec):
  """Whether the codec rounds at random."""
  return getattr(codec, "rounding", "nearest") == "stochastic"


def _sent(codec, found, given, number, whole=False):
  """What each worker sends of each leaf, float32[N, size]; or of all its rows."""
  key = lambda name, i: _dither(number, f"['{name}']", i) if _random(codec) else None
  result = {}
  for name, x in given.items():
    x = _tiled(codec, x).reshape(len(x), -1) if whole else x
    result[name] = np.stack([found.through(v, key(name, i)) for i, v in enumerate(x)])
  return result


def _tiled(codec, x):
  """float32[N, size] as whole rows, [N, R, tile]; copies fill buckets with means."""
  copied = isinstance(codec, OneBit) or getattr(codec, "norm", "") == "rms"
  if copied or getattr(codec, "scale", "") == "mean":
    x = np.stack([planes.filled(v, codec.bucket_size) for v in x])
  return np.pad(x, ((0, 0), (0, -x.shape[1] % codec.tile_size))).reshape(
    len(x), -1, codec.tile_size
  )


def _flat(rows, size):
  return rows.reshape(*rows.shape[:-2], -1)[..., :size]


def _all_gather(row, codec, found, given, number, before):
  sent = _sent(codec, found, given, number)["a"]
  if isinstance(codec, TopK):
    mean = sparse.sparse_sum(sent, np.float32(1 / row.workers))
  else:
    mean = exchange.all_gather(sent)
  return Step(mean, given["a"] - sent, None, found.exact)


def _local(row, codec, found, given, number, before):
  sent = _sent(codec, found, given, number)["a"]
  return Step(sent, given["a"] - sent, None, found.exact)


def _owners(row, codec, found, number, before):
  """The owners' encoding of means, and what they keep."""
  if not before.server_residual:
    key = lambda owner: (
      dithers.leaf_key(SEED, number, LATER, owner) if _random(codec) else None
    )
    again = lambda mean, owner: found.through(
      mean.ravel(), key(owner), per_row=True
    ).reshape(mean.shape)
    return again, None
  (arrays,) = before.server_residual.values()
  (array,) = arrays
  owned = np.array(array).reshape(row.workers, -1, codec.tile_size)
  again = lambda mean, owner: found.through(mean.ravel(), None, per_row=True).reshape(
    mean.shape
  )
  return exchange.with_feedback(again, owned), owned


def _two_shot(row, codec, found, given, number, before):
  if isinstance(codec, TopK) or getattr(codec, "rotate", None):
    return None  # owners select from ranges, and add what is rotated
  sent = _sent(codec, found, given, number, whole=True)
  rows = np.concatenate([_tiled(codec, x) for x in sent.values()], axis=1)
  again, owned = _owners(row, codec, found, number, before)
  mean = exchange.two_shot(rows, again)
  size = given["a"].shape[1]
  return Step(_flat(mean, size), given["a"] - sent["a"][:, :size], owned, found.exact)


def _ring(row, codec, found, given, number, before):
  n, size = row.workers, given["a"].shape[1]
  rows = np.concatenate([_tiled(codec, x) for x in given.values()], axis=1)

  def recode(rows, worker, hop):
    key = _dither(number, LATER, n - 1 - hop, (worker - 1 - hop) % n)
    key = key if _random(codec) else None
    return found.through(rows.ravel(), key, per_row=True).reshape(rows.shape)

  mean, lost = exchange.ring(rows, recode)
  return Step(_flat(mean, size), _flat(lost, size), None, found.exact)


def _hierarchical(row, codec, found, given, number, before):
  if getattr(codec, "rotate", None):
    return None  # owners add what is rotated
  size, group = given["a"].shape[1], GROUPS[row.workers]
  rows = np.concatenate([_tiled(codec, x) for x in given.values()], axis=1)

  def inside(rows, worker):
    key = _dither(number, LATER, worker // group, worker % group)
    key = key if _random(codec) else None
    return found.through(rows.ravel(), key, per_row=True).reshape(rows.shape)

  again, owned = _owners(row, codec, found, number, before)
  mean, lost = exchange.hierarchical(rows, group, inside, again)
  return Step(_flat(mean, size), _flat(lost, size), owned, found.exact)


_EXCHANGES = {
  "all_gather": _all_gather,
  "two_shot": _two_shot,
  "ring": _ring,
  "hierarchical": _hierarchical,
  "local": _local,
}


def _shared(row, codec, x, number):
  """Integers under one scale of all workers, whose sums are exact."""
  if row.exchange not in ("all_gather", "two_shot", "psum"):
    return None
  if getattr(codec, "rotate", None):
    return None  # sums are of rotated elements
  keys = [
    _dither(number, "['a']", i) if _random(codec) else None for i in range(len(x))
  ]
  integers = _qsgd_integers if isinstance(codec, QSGD) else _ternary_integers
  codes, decode, exact = integers(codec, x, keys)
  sent = np.stack([decode(own) for own in codes])
  mean = decode(np.sum(codes, axis=0)) * (np.float32(1) / np.float32(len(x)))
  return Step(mean, x - sent, None, exact)


def _qsgd_integers(codec, x, keys):
  layout = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  rule = layout | {"levels": codec.levels}
  scales = qsgd.shared_scales(x, norm=codec.norm, **layout)
  written = rule | {"scales": scales, "rounding": codec.rounding, "inline": False}
  codes = [
    qsgd.integers(qsgd.encode(v, key=key, norm=codec.norm, **written), v.size, **rule)
    for v, key in zip(x, keys, strict=True)
  ]
  decode = functools.partial(qsgd.decode_sums, scales=scales, **rule)
  return codes, decode, codec.norm == "max"


def _ternary_integers(codec, x, keys):
  """A limit's last bits depend on the order in which squares are added."""
  rule = dict(packing=codec.packing, bucket_size=codec.bucket_size)
  limits = [ternary.clip_limit(v, codec.clip_sigmas) for v in x]
  scales = np.max(
    [
      ternary.scales_of(v, scaler=codec.scaler, limit=limit, **rule)
      for v, limit in zip(x, limits, strict=True)
    ],
    axis=0,
  )
  written = rule | {"scales": scales, "rounding": codec.rounding, "inline": False}
  rows = [
    ternary.encode(v, key=key, limit=limit, **written)
    for v, key, limit in zip(x, keys, limits, strict=True)
  ]
  ones = np.ones((1, 1), np.float32)
  codes = [ternary.integers(r, x.shape[1], scales=ones, **rule) for r in rows]
  words = codec.bucket_size or planes.geometry(2, None)[1]
  each = scale_table.per_element(scales, ternary.PER_WORD[codec.packing], words)
  decode = lambda sums: np.float32(sums) * each[: x.shape[1]]
  return codes, decode, codec.clip_sigmas is None


def _float_cast(row, codec, given, number):
  """Codes that are added in their own format, in the exchange's order."""
  x = given["a"] + np.float32(0)  # no minus zero
  if row.exchange not in ("all_gather", "two_shot", "hierarchical"):
    return None
  n = row.workers
  bound = codec.bind(Leaf((), addends=n))
  byte = None
  if codec.scale == "auto":
    byte = max(float_cast.aps_byte(own, n) for own in x)
  cast = cast_of(bound) if byte is None else cast_of(bound, byte)
  mean, _ = float_cast.exchange(
    x,
    cast,
    row.exchange,
    group_size=GROUPS[n] if row.exchange == "hierarchical" else None,
    accumulate=codec.accumulate,
    keys=[_dither(number, "['a']", i) for i in range(n)],
  )
  return Step(mean)
