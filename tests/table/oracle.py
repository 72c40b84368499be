"""What a step of a row must give, by the specifications of codec and exchange.

Each step is judged alone, from the state before it. Rows of both leaves of a message
are there, for owners' shares and the keys of sums span them.
"""

import functools
from typing import NamedTuple

import numpy as np

from gradcomp.codecs import (
  QSGD,
  FloatCast,
  Leaf,
  OneBit,
  TopK,
)
from tests.specs import (
  dithers,
  exchange,
  float_cast,
  planes,
  qsgd,
  ternary,
)
from tests.specs import scales as scale_table
from tests.specs.methods import sparse
from tests.support import laws as suite
from tests.support.cases.float import cast_of
from tests.table.run import GROUPS, SEED

LEAVES = ("a", "h")
LATER = "['a']\n['h']\n"  # the name in keys of sums and means


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
  before = run.states[number]
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
  case = suite.SETTINGS[row.setting]
  if case.exact is None or row.exchange not in _EXCHANGES:
    return None
  return _EXCHANGES[row.exchange](row, case, given, number, before)


def _dither(number, name, worker, *more):
  return dithers.leaf_dither(SEED, number, name, worker, *more)


def _sent(case, given, number, whole=False):
  """What each worker sends of each leaf, float32[N, size]; or of all its rows."""
  result = {}
  for name, x in given.items():
    x = _tiled(case.codec, x).reshape(len(x), -1) if whole else x
    keys = (_dither(number, f"['{name}']", i) for i in range(len(x)))
    result[name] = np.stack(list(map(case.through, x, keys)))
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


def _rows(case, leaves):
  """The rows of all leaves of a message, float32[N, R, tile]."""
  return np.concatenate([_tiled(case.codec, x) for x in leaves.values()], axis=1)


def _all_gather(row, case, given, number, before):
  sent = _sent(case, given, number)["a"]
  if isinstance(case.codec, TopK):
    mean = sparse.sparse_sum(sent, np.float32(1 / row.workers))
  else:
    mean = exchange.all_gather(sent)
  return Step(mean, given["a"] - sent, None, case.exact)


def _local(row, case, given, number, before):
  sent = _sent(case, given, number)["a"]
  return Step(sent, given["a"] - sent, None, case.exact)


def _owners(row, case, number, before):
  """The owners' encoding of means, and what they keep."""
  if not before.server_residual:
    key = lambda owner: dithers.leaf_key(SEED, number, LATER, owner)
    return lambda mean, owner: case.through(mean, key(owner), per_row=True), None
  ((array,),) = before.server_residual.values()
  owned = np.array(array).reshape(row.workers, -1, case.codec.tile_size)
  again = lambda mean, owner: case.through(mean, None, per_row=True)
  return exchange.with_feedback(again, owned), owned


def _two_shot(row, case, given, number, before):
  if isinstance(case.codec, TopK) or getattr(case.codec, "rotate", None):
    return None  # owners select from ranges, and add what is rotated
  sent = _sent(case, given, number, whole=True)
  again, owned = _owners(row, case, number, before)
  mean = exchange.two_shot(_rows(case, sent), again)
  size = given["a"].shape[1]
  return Step(_flat(mean, size), given["a"] - sent["a"][:, :size], owned, case.exact)


def _ring(row, case, given, number, before):
  n, size = row.workers, given["a"].shape[1]

  def recode(rows, worker, hop):
    key = _dither(number, LATER, n - 1 - hop, (worker - 1 - hop) % n)
    return case.through(rows, key, per_row=True)

  mean, lost = exchange.ring(_rows(case, given), recode)
  return Step(_flat(mean, size), _flat(lost, size), None, case.exact)


def _hierarchical(row, case, given, number, before):
  if getattr(case.codec, "rotate", None):
    return None  # owners add what is rotated
  size, group = given["a"].shape[1], GROUPS[row.workers]

  def inside(rows, worker):
    key = _dither(number, LATER, worker // group, worker % group)
    return case.through(rows, key, per_row=True)

  again, owned = _owners(row, case, number, before)
  mean, lost = exchange.hierarchical(_rows(case, given), group, inside, again)
  return Step(_flat(mean, size), _flat(lost, size), owned, case.exact)


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
  keys = [_dither(number, "['a']", i) for i in range(len(x))]
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
