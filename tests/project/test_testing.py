"""The kit lets an honest codec through, and says which law each broken one breaks."""

import dataclasses
import inspect
import re
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp import codecs
from gradcomp._src.checkpoint import reshard
from gradcomp._src.codecs.sums.records import Encoded, Payload
from gradcomp._src.core.state import CompressState
from gradcomp._src.testing.check import codec_laws, transformation_laws
from gradcomp.codecs import QSGD, Codec, Dense, RandomK
from gradcomp.kernels import pack_planes, random_lanes, unpack_planes
from gradcomp.testing import BrokenLaw, CheckOptions, check_codec, laws, modes
from gradcomp.testing import check_transformation as check_tx
from tests.plugins.slow_cases import slow
from tests.support.assertions import says

finite = lambda x: jnp.where(jnp.isfinite(x), x, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Honest(Codec):
  """Rounds at random to 128 steps of the largest element of a bucket; all is exact."""

  bucket_size: int = 32

  unbiased = needs_key = True
  tile_size = property(lambda self: 4 * self.bucket_size)
  row_words = property(lambda self: self.bucket_size + 4)

  drawn = lambda self, context: context.drawn
  rounded = lambda self, steps, lanes: jnp.floor(steps + lanes * 2.0**-16)
  levels = lambda self, codes: codes.astype(jnp.float32) - 128

  def scales(self, planes):
    largest = jnp.abs(planes).max(axis=-1, keepdims=True)
    return jnp.where(largest < 2.0**-100, 0.0, largest)

  def lanes(self, drawn, rows):
    return jnp.stack(random_lanes(drawn, (rows, self.bucket_size), 4), axis=1)

  def encode_rows(self, tiles, context):
    planes = tiles.reshape(-1, 4, self.bucket_size)
    scales = self.scales(planes)
    lanes = self.lanes(self.drawn(context), planes.shape[0])
    steps = finite(jnp.where(scales > 0, planes / scales, 0.0)) * 64
    codes = (self.rounded(steps, lanes.astype(jnp.float32)) + 128).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint32)
    return jnp.concatenate([pack_planes(list(codes.swapaxes(0, 1)), 8), bits], axis=1)

  def decode_rows(self, rows):
    codes = unpack_planes(rows[:, : self.bucket_size], 8)
    scales = jax.lax.bitcast_convert_type(rows[:, self.bucket_size :], jnp.float32)
    return self.levels(codes) * (scales / 64)[..., None]


DECODE, READ = Codec.decode, Honest.decode_rows


def broken(name, of=Honest, given=(), fields=(), **parts):
  fields = [(field, object, value) for field, value in dict(fields).items()]
  own = {"frozen": True, "kw_only": True, "bases": (of,), "namespace": parts}
  return dataclasses.make_dataclass(name, fields, **own)(**dict(given))


def with_ones(self, x, context, *, keep=False):
  """Fills the last tile with ones, which count in its scale."""
  flat = jnp.pad(x.reshape(-1), (0, -x.size % self.tile_size), constant_values=1.0)
  return Honest.encode_leaf(self, flat, context)


def forgets_a_tenth(self, x, context, *, keep=False):
  rows = Honest.encode_leaf(self, x, context).rows
  return Encoded(rows, 0.9 * (x - self.decode(Payload(rows), like=x)))


def chooses_by_worker(self, x, context, *, keep=False):
  if context.dither is not None:
    context = context._replace(key=context.key ^ context.dither[2])
  return RandomK.encode_leaf(self, x, context, keep=keep)


def takes_first_scales(self, rows):
  first = jnp.broadcast_to(rows[:1], rows.shape)
  parts = rows[:, : self.bucket_size], first[:, self.bucket_size :]
  return READ(self, jnp.concatenate(parts, axis=1))


def swaps(self, rows):
  tiles = READ(self, rows)
  return jnp.flip(tiles.reshape(-1, 2), axis=1).reshape(tiles.shape)


def prints(self, planes):
  jax.debug.print("{}", planes.max())
  return Honest.scales(self, planes)


ENCODE, SCALES, LANES = Honest.encode_rows, Honest.scales, Honest.lanes
SIZES = {"density": 0.1, "range_size": 100}
CERTAIN = {"unbiased": False, "needs_key": False}
NEAREST = CERTAIN | {"drawn": lambda *_: None, "lanes": lambda *_: jnp.uint32(2**15)}

# Errors of both signs hide that this rounds magnitudes down too often.
shrinks = lambda s, x, y: jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.97 * y * 2.0**-16)
BROKEN = {
  "Unhashable": dict(fields={"names": dataclasses.field(default_factory=list)}),
  "WrongDtype": dict(decode=lambda s, p, *, like: jnp.float32(DECODE(s, p, like=like))),
  "AskingForValues": dict(scales=lambda s, x: SCALES(s, x) * bool(x.max() > 0)),
  "Printing": dict(scales=prints),
  "Communicating": dict(scales=lambda self, x: jax.lax.pmax(SCALES(self, x), "data")),
  "DrawingInPython": dict(rounded=lambda s, x, _: jnp.floor(x + np.random.random())),
  "OfWords": dict(encode_rows=lambda s, *of: jnp.int32(ENCODE(s, *of))),
  "MoreThanClaimed": dict(row_words=property(lambda self: self.bucket_size)),
  "ZerosNotZeros": dict(
    scales=lambda self, x: jnp.maximum(SCALES(self, x), 1e-3),
    levels=lambda self, codes: codes.astype(jnp.float32) - 127.5,
  ),
  "MixedRows": dict(decode_rows=takes_first_scales),
  "WrongResidual": dict(encode_leaf=forgets_a_tenth),
  "Leaking": dict(encode_leaf=with_ones),
  "OwnElements": dict(of=RandomK, given=SIZES, encode_leaf=chooses_by_worker),
  "HidingNan": dict(encode_rows=lambda s, x, *of: ENCODE(s, finite(x), *of)),
  "Biased": dict(rounded=lambda self, x, lanes: jnp.floor(x + lanes * 2.0**-17)),
  "Shrinking": dict(rounded=shrinks),
  "OfAnyRange": dict(of=Dense, given={"dtype": jnp.float16}, largest=None),
  "Saturating": dict(encode_rows=lambda s, x, *of: ENCODE(s, x.clip(-1e6, 1e6), *of)),
  "SameRows": dict(lanes=lambda s, x, rows: jnp.repeat(LANES(s, x, 1), rows, axis=0)),
  "Swapping": NEAREST | dict(decode_rows=swaps),
  "Larger": NEAREST | dict(decode_rows=lambda self, x: 1.01 * READ(self, x)),
  "Keeping": dict(of=QSGD, given={"bits": 2}, contraction=0.5),
  "WithoutMask": dict(drawn=lambda self, context: context.drawn.at[2].set(0)),
}
# The law that each breaks, and what the sentence says of it.
SAID = """
Unhashable is_a_value: be hashable ... unhashable type: 'list'
WrongDtype shapes_and_dtypes_return: bfloat16[5,7] ... float32[5,7]
AskingForValues is_pure: with shapes alone ... values are asked for
Printing is_pure: have no effects ... callbacks and prints
Communicating is_pure: without collectives ... data
DrawingInPython is_pure: the same program ... take `key`
OfWords shapes_and_dtypes_return: uint32[rows, words] ... they are int32
MoreThanClaimed payload_is_rows_of_words: uint32[3,32] ... 432 bytes in place of 384
ZerosNotZeros zeros_decode_to_zeros: to zeros ... element [0]
MixedRows rows_stand_alone: without the others ... `decode_rows`
WrongResidual sent_and_unsent_are_the_leaf: return x - decode(encode(x))
Leaking padding_never_leaks: as exactly as 256 ... fills the last row
OwnElements workers_choose_alike: send the same elements ... positions of worker 1
HidingNan non_finite_elements_are_seen: element 166 became ... its row is finite
Biased mean_is_the_leaf: be unbiased ... is off by -
Shrinking mean_is_the_leaf: be unbiased ... is off by
OfAnyRange half_precision_keeps_its_range: near the top number ... over ring ... inf
Saturating large_numbers_keep_their_size: send 2^40 x ... times
SameRows elements_draw_apart: at one place of all buckets ... times
Swapping errors_are_contractions: lose at most 1 of the energy ... it loses 1.8
Larger decoded_leaves_do_not_grow: at most 1.005 of them ... come back as 1.01 of
Keeping residuals_are_bounded: at most 1 times the energy ... it has 6
WithoutMask errors_of_workers_cancel: at most 1.0 ... it has
"""


@pytest.mark.parametrize("name, law, words", re.findall(r"(\w+) (\w+): (.*)", SAID))
def test_a_broken_codec_breaks_its_law(name, law, words):
  """A sentence names the law, the codec, what was expected, and what was found."""
  codec = broken(name, **BROKEN[name])
  told = says(f"{law}: {name}", *words.split(" ... "))
  with pytest.raises(BrokenLaw, match=told) as error:
    getattr(laws, law)(codec)
  assert error.value.law == law and str(error.value).endswith(".")
  if name in ("Unhashable", "MoreThanClaimed"):  # the first law that is broken
    with pytest.raises(AssertionError, match=says(f"{law}: ")):
      check_codec(codec, workers=2)


def test_errors_in_a_law_begin_with_its_name():
  for error, kind, words in (
    (ValueError("no rows"), ValueError, "zeros_decode_to_zeros: no rows"),
    (ValueError(), ValueError, "zeros_decode_to_zeros: "),
    (OSError(2, "gone"), RuntimeError, "zeros_decode_to_zeros: FileNotFoundError"),
  ):
    failing = broken("Failing", encode_rows=mock.Mock(side_effect=error))
    with pytest.raises(kind, match=f"^{words}"):
      laws.zeros_decode_to_zeros(failing)


@pytest.mark.parametrize("exchanges", [(), *slow((("two_shot",),))], ids=str)
def test_an_honest_codec_holds(exchanges):
  options = dict(sizes=(1, 33), draws=300, constants=(1.0, -0.3), most_variance=0.52)
  given = dict(workers=2, exchanges=exchanges)
  given["options"] = CheckOptions(**options, spoils=32)
  check_codec(Honest(), **given)
  every = {name: law for name, law in vars(laws).items() if callable(law)}
  del every["gradients_like"], every["spoiled"]
  of_steps = {x for x in every if "run" in inspect.signature(every[x]).parameters}
  tried = {law.func.__name__ for law in codec_laws(Honest(), **given)}
  assert tried == (every.keys() if exchanges else every.keys() - of_steps)


DRAWING = [
  *(QSGD(bits=1, levels="uniform"), QSGD(bits=2, bucket_size=None)),
  *(QSGD(bits=16, share_scale=True), QSGD(bits=2, rotate=32), codecs.Natural()),
  *(QSGD(bits=3, levels="nonuniform"), codecs.FloatCast(rounding="stochastic")),
  *(codecs.Ternary(), codecs.Ternary(packing="base3", bucket_size=64)),
  codecs.BlockFloat(element="e2m1", rounding="stochastic"),
  codecs.EightBit(rounding="stochastic"),
]


@pytest.mark.parametrize("codec", [QSGD(bits=4, rotate=8), *slow(*DRAWING)], ids=str)
def test_elements_of_codecs_draw_apart(codec):
  laws.elements_draw_apart(codec)


def test_zeros_behind_a_leaf_and_in_its_rotation():
  laws.zeros_behind_change_nothing(QSGD(bits=4))
  laws.padding_never_leaks(QSGD(bits=4, rotate=8))


SMALL = {"h": np.zeros((5, 7), jnp.bfloat16), "w": np.zeros(300, np.float32)}
GATHERED = dict(axis_name="data", exchange="all_gather", min_leaf_size=0)


def changed(update=lambda *both: both, **options):
  """A transformation that is honest but for what is done to its results."""
  tx = gradcomp.onebit_sgd(**GATHERED | options)
  update_fn = lambda u, state, params=None: update(*tx.update(u, state, params))
  return optax.GradientTransformation(tx.init, update_fn)


def by_worker(updates, state):
  number = jax.lax.axis_index("data")
  return jax.tree.map(lambda x: x + number.astype(x.dtype), updates), state


# Counts by itself, in what all workers should have alike: types alone tell.
own_count = lambda u, s: (u, s._replace(count=s.count + jax.lax.axis_index("data")))


def by_mode(updates, state):
  if jax.sharding.get_abstract_mesh().empty:
    return updates, state
  return jax.tree.map(lambda x: -x, updates), state


def forgets_at_nan(updates, state):
  """Drops all residuals once a NaN comes."""
  good = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]).all()
  kept = jax.tree.map(lambda x: jnp.where(good, x, 0.0), state.residual)
  return updates, state._replace(residual=kept)


@pytest.mark.parametrize(
  ("update", "law", "words"),
  [
    (forgets_at_nan, "non_finite_gradients_are_seen", "keep the residual of ['w']"),
    (lambda u, s: (u, s._replace(count=s.count * 1.0)), "state_is_stable", "count"),
    (lambda u, s: (u, (s, 0)), "state_is_stable", "becomes PyTreeDef"),
    (own_count, "steps_are_scanned", "int32[]{V:data}"),
    (lambda u, s: (jax.tree.map(jnp.float32, u), s), "workers_agree", "float32[2,5,7]"),
    (by_worker, "workers_agree", "in step 0 of"),
    (
      lambda u, s: (u, s._replace(residual=jax.tree.map(jnp.sin, s.residual))),
      *("nothing_is_lost", "in residuals"),
    ),
    (
      lambda u, s: (jax.tree.map(jnp.nan_to_num, u), s),
      *("non_finite_gradients_are_seen", "finite updates alone"),
    ),
    (by_mode, "same_bits_in_every_mode", "in shard_map"),
  ],
)
def test_a_broken_transformation_breaks_its_law(update, law, words):
  with pytest.raises(BrokenLaw, match=says(f"{law}: the transformation", words)):
    check_tx(changed(update), SMALL, workers=2, places=["shard_map"])


class Forgetful(NamedTuple):
  """A state that comes back from a file without what it has seen."""

  inner: CompressState
  seen: jax.Array

  __reduce__ = lambda self: (Forgetful, (self.inner, 0 * self.seen))


def test_laws_of_steps_that_others_would_hide():
  steps = [laws.gradients_like(SMALL, 2, seed) for seed in range(2)]
  ran = lambda tx, mode="vmap": modes.run(mode, tx, steps)
  inner = changed()

  def update(updates, state, params=None):
    updates, new = inner.update(updates, state.inner)
    more = jax.tree.map(lambda x: x + state.seen.astype(x.dtype), updates)
    return more, Forgetful(new, state.seen + 1)

  first = lambda params: Forgetful(inner.init(params), jnp.zeros([]))
  infinite = changed(lambda u, s: (jax.tree.map(lambda x: x / 0, u), s))
  vague = broken("Vague", __repr__=lambda self: f"Vague({np.random.random()})")
  lossy = mock.patch.object(
    *(reshard, "reshard_state"),
    lambda *given, **sizes: jax.tree.map(
      lambda x: x / 2 if x.dtype == np.float32 else x,
      gradcomp.reshard_state(*given, **sizes),
    ),
  )
  with pytest.raises(BrokenLaw, match="goes_on: .* element"):
    laws.checkpoint_goes_on(ran(optax.GradientTransformation(first, update)))
  with pytest.raises(BrokenLaw, match=r"stay_finite: .* those of \['h'\] in step 0"):
    laws.finite_gradients_stay_finite(ran(infinite))
  with pytest.raises(BrokenLaw, match="record_is_its_own: .* passes with itself"):
    laws.record_is_its_own(ran(gradcomp.compress(vague, **GATHERED, feedback=None)))
  with lossy, pytest.raises(BrokenLaw, match="keep its sums from 2 to 1 workers"):
    laws.resharding_keeps_sums(ran(changed(), "shard_map"))


def test_bytes_that_nobody_explained():
  steps = [laws.gradients_like({"w": jnp.zeros(700)}, workers=2)]
  told = lambda tx: laws.bytes_are_explained(modes.run("vmap", tx, steps))
  told(changed())
  mean = lambda tree: jax.tree.map(lambda x: 0 * jax.lax.pmean(x, "data"), tree)
  more = lambda tree, of: jax.tree.map(jnp.add, tree, mean(of))
  later = lambda u, s: (u, s._replace(residual=more(s.residual, u)))
  for talks in (lambda u, s: (more(u, u), s), later):
    with pytest.raises(BrokenLaw, match=says("bytes a step", "explain counts")):
      told(changed(talks))


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_residuals_of_few_bits_hold(stored):
  """Zeros, as of a leaf that stays dense, have one scale in every mode."""
  feedback = gradcomp.ErrorFeedback(residual_dtype=stored)
  tx = changed(feedback=feedback, min_leaf_size=None)
  steps = [laws.gradients_like(SMALL, 2, seed) for seed in range(2)]
  runs = [modes.run(mode, tx, steps) for mode in ("vmap", "explicit")]
  laws.same_bits_in_every_mode(*runs)


def test_what_moves_is_conserved_and_what_decays_is_not():
  """What is lost of few bits is more than they round."""

  def holds(tx, like=SMALL):
    steps = [laws.gradients_like(like, 2, seed) for seed in range(2)]
    laws.nothing_is_lost(modes.run("vmap", tx, steps))

  for feedback in ("momentum", gradcomp.ErrorFeedback(residual_decay=0.5), "ef21"):
    holds(changed(feedback=feedback))
  holds(gradcomp.powersgd(2, axis_name="data", bits=8), np.zeros((64, 64)))
  empty = lambda u, s: (u, s._replace(residual=optax.tree.zeros_like(s.residual)))
  with pytest.raises(BrokenLaw, match=says("nothing_is_lost", "0 in residuals")):
    holds(changed(empty, feedback=gradcomp.ErrorFeedback(residual_dtype="int8")))


def test_a_chain_and_a_policy_hold():
  rules = [("h", Dense()), ("w", QSGD(bits=4))]
  policy = gradcomp.policy(rules, axis_name="data", exchange="two_shot")
  tx = optax.chain(policy, optax.sgd(0.5, momentum=0.9))
  check_tx(tx, SMALL, workers=2)
  steps = [laws.gradients_like(SMALL, workers=2)]
  *_, last = transformation_laws(tx, steps, same_bits=True)
  assert last.func.__name__ == "resharding_keeps_sums"


Thawed = dataclasses.make_dataclass("Thawed", ["bits"])
MISTAKES = {
  lambda: check_codec(QSGD): (TypeError, "`codec`", "instance", "QSGD"),
  lambda: check_codec(codecs.Policy([(".", Dense())])): (TypeError, "of a policy"),
  lambda: check_tx(Dense()): (TypeError, "`transformation`", "compress"),
  lambda: laws.is_a_value(Thawed(8)): (BrokenLaw, "is_a_value: Thawed", "not frozen"),
  lambda: modes.started("emulated", None, 2): (ValueError, "`mode`", "'vmap'"),
  lambda: modes.mesh(9): (ValueError, "`workers`", "8, got 9"),
}


def test_what_cannot_be_checked():
  for call, (kind, *words) in MISTAKES.items():
    with pytest.raises(kind, match=says(*words)):
      call()
