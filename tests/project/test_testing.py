"""The kit lets an honest codec through, and says which law each broken one breaks."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp._src.testing.check import codec_laws, transformation_laws
from gradcomp.testing import (
  BrokenLaw,
  CheckOptions,
  check_codec,
  check_transformation,
  laws,
  modes,
)
from tests.plugins.slow_cases import slow
from tests.support import broken_codecs as broken
from tests.support import laws as suite
from tests.support.assertions import says

# Each with the law that it breaks, and what the sentence says of it.
BROKEN = [
  (broken.Unhashable(), "is_a_value", ("be hashable", "unhashable type: 'list'")),
  (broken.WrongDtype(), "shapes_and_dtypes_return", ("bfloat16[5,7]", "float32[5,7]")),
  (broken.FloatRows(), "shapes_and_dtypes_return", ("uint32[rows, words]", "float32[")),
  (broken.AskingForValues(), "is_pure", ("with shapes alone", "values are asked for")),
  (broken.Printing(), "is_pure", ("have no effects", "callbacks and prints")),
  (broken.Communicating(), "is_pure", ("without collectives", "data")),
  (broken.DrawingInPython(), "is_pure", ("the same program", "take `key`")),
  (
    broken.MoreThanClaimed(),
    "payload_is_rows_of_words",
    ("uint32[3,32]", "uint32[3,36], 432 bytes in place of 384", "`row_words`"),
  ),
  (broken.ZerosNotZeros(), "zeros_decode_to_zeros", ("to zeros", "element [0]")),
  (broken.MixedRows(), "rows_stand_alone", ("without the others", "`decode_rows`")),
  (
    broken.WrongResidual(),
    "sent_and_unsent_are_the_leaf",
    ("return x - decode(encode(x))", "`encode_leaf`"),
  ),
  (
    broken.Leaking(),
    "padding_never_leaks",
    ("as exactly as 256", "fills the last row"),
  ),
  (broken.MeanOfAll(), "padding_never_leaks", ("171 elements", "is 0.0")),
  (
    broken.OwnElements(density=0.1, range_size=100),
    "workers_choose_alike",
    ("send the same elements", "positions of worker 1"),
  ),
  (
    broken.HidingNan(),
    "non_finite_elements_are_seen",
    ("never replace nan by a number", "element 166 became", "its row is finite"),
  ),
  (broken.Biased(), "mean_is_the_leaf", ("be unbiased", "is off by -")),
  (broken.LosingSigns(bucket_size=128), "mean_is_the_leaf", ("of element",)),
  (broken.Shrinking(), "mean_is_the_leaf", ("be unbiased", "is off by")),
  (
    broken.OfAnyRange(),
    "half_precision_keeps_its_range",
    ("near the top number", "over ring", "inf and not"),
  ),
  (broken.HalvingLarge(), "large_numbers_keep_their_size", ("send 2^12 x", "times")),
  (broken.Saturating(), "large_numbers_keep_their_size", ("send 2^40 x", "times")),
  (broken.SameRows(), "elements_draw_apart", ("at one place of all buckets", "times")),
  (broken.SamePlanes(), "elements_draw_apart", ("draw for each element", "times")),
  (broken.SameColumns(), "elements_draw_apart", ("the errors of a bucket", "times")),
  (
    broken.Swapping(),
    "errors_are_contractions",
    ("lose at most 1 of the energy of normal", "it loses 1.8"),
  ),
  (
    broken.Larger(),
    "decoded_leaves_do_not_grow",
    ("at most 1.005 of them", "come back as 1.01 of"),
  ),
  (
    broken.Keeping(),
    "residuals_are_bounded",
    ("at most 1 times the energy of fresh", "contraction of 0.5", "it has 6"),
  ),
  (broken.WithoutMask(), "errors_of_workers_cancel", ("at most 1.0", "it has")),
]


def every_broken(*plain):
  """Parametrizes a test by broken codecs; if some are named, the others are slow."""
  marks = lambda name: pytest.mark.slow if plain and name not in plain else ()
  names = [type(codec).__name__ for codec, *_ in BROKEN]
  return pytest.mark.parametrize(
    ("codec", "law", "words"),
    [
      pytest.param(*x, id=name, marks=marks(name))
      for x, name in zip(BROKEN, names, strict=True)
    ],
  )


@every_broken()
def test_a_broken_codec_breaks_its_law(codec, law, words):
  """A sentence names the law, the codec, what was expected, and what was found."""
  sentence = says(f"{law}: {type(codec).__name__}", *words)
  with pytest.raises(BrokenLaw, match=sentence) as error:
    getattr(laws, law)(codec)
  assert error.value.law == law and str(error.value).endswith(".")


@pytest.mark.parametrize(
  ("error", "kind", "words"),
  [
    (ValueError("no rows"), ValueError, "zeros_decode_to_zeros: no rows"),
    (ValueError(), ValueError, "zeros_decode_to_zeros: "),
    (OSError(2, "gone"), RuntimeError, "zeros_decode_to_zeros: FileNotFoundError"),
  ],
  ids=["text", "nothing", "number"],
)
def test_errors_in_a_law_begin_with_its_name(error, kind, words):
  with pytest.raises(kind) as caught:
    laws.zeros_decode_to_zeros(broken.Failing(error=error))
  assert str(caught.value).startswith(words)


@every_broken("Unhashable", "MoreThanClaimed")
def test_check_codec_names_the_first_law_that_is_broken(codec, law, words):
  with pytest.raises(AssertionError, match=says(f"{law}: ", *words)):
    check_codec(codec, workers=2)


@pytest.mark.parametrize("exchanges", [(), *slow((("two_shot",),))], ids=str)
def test_an_honest_codec_holds(exchanges):
  given = dict(workers=2, exchanges=exchanges)
  given["options"] = CheckOptions(
    sizes=(1, 33), draws=300, constants=(1.0, -0.3), spoils=32, most_variance=0.52
  )
  check_codec(broken.Honest(), **given)
  steps = {name for name, law in vars(laws).items() if "gradients" in names_of(law)}
  every = {name for name, law in vars(laws).items() if callable(law)}
  every -= {"gradients_like"} if exchanges else {"gradients_like", *steps}
  tried = codec_laws(broken.Honest(), **given)
  assert {law.func.__name__ for law in tried} == every


def names_of(law):
  return inspect.signature(law).parameters if callable(law) else ()


@pytest.mark.slow
@pytest.mark.parametrize(
  "codec",
  [
    gradcomp.codecs.QSGD(bits=4, share_scale=True),
    gradcomp.codecs.QSGD(bits=3, levels="nonuniform"),
    gradcomp.codecs.OneBit(per_column=True),
    gradcomp.codecs.TopK(density=0.1),
    gradcomp.codecs.RandomK(density=0.1),
    gradcomp.codecs.PowerSGD(rank=2),
    gradcomp.codecs.FloatCast(),
    gradcomp.codecs.Dense(),
  ],
  ids=suite.name,
)
def test_codecs_of_every_kind_hold(codec):
  options = CheckOptions(
    own_statistics=isinstance(codec, gradcomp.codecs.OneBit),
    same_bits=not isinstance(codec, gradcomp.codecs.PowerSGD),
  )
  check_codec(codec, options=options)


@pytest.mark.parametrize(
  "codec",
  [
    gradcomp.codecs.QSGD(bits=4, rotate=8),
    *slow(
      gradcomp.codecs.QSGD(bits=1, levels="uniform"),
      gradcomp.codecs.QSGD(bits=2, bucket_size=None),
      gradcomp.codecs.QSGD(bits=16, share_scale=True),
      gradcomp.codecs.QSGD(bits=2, rotate=32),
      gradcomp.codecs.QSGD(bits=3, levels="nonuniform"),
      gradcomp.codecs.Ternary(),
      gradcomp.codecs.Ternary(packing="base3", bucket_size=64),
      gradcomp.codecs.Natural(),
      gradcomp.codecs.BlockFloat(element="e2m1", rounding="stochastic"),
      gradcomp.codecs.EightBit(rounding="stochastic"),
      gradcomp.codecs.FloatCast(rounding="stochastic"),
    ),
  ],
  ids=suite.name,
)
def test_elements_of_codecs_draw_apart(codec):
  laws.elements_draw_apart(codec)


def changed(update=None, init=None):
  """A transformation that is honest but for what is done to its results."""
  tx = gradcomp.onebit_sgd(axis_name="data", exchange="all_gather", min_leaf_size=0)

  def update_fn(updates, state, params=None):
    updates, after = tx.update(updates, state, params)
    return update(updates, after) if update else (updates, after)

  return optax.GradientTransformation(init or tx.init, update_fn)


def by_worker(updates, state):
  number = jax.lax.axis_index("data")
  return jax.tree.map(lambda x: x + number.astype(x.dtype), updates), state


def own_count(updates, state):
  """Counts by itself, in what all workers should have alike: types alone tell."""
  number = jax.lax.axis_index("data")
  return updates, state._replace(count=state.count + number)


def forgetful(updates, state):
  half = jax.tree.map(lambda x: x / 2, state.residual)
  return updates, state._replace(residual=half)


def guarded(updates, state):
  return jax.tree.map(jnp.nan_to_num, updates), state


def by_mode(updates, state):
  if jax.sharding.get_abstract_mesh().empty:
    return updates, state
  return jax.tree.map(lambda x: -x, updates), state


def chatty(updates, state):
  again = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), updates)
  return jax.tree.map(lambda x, y: x + 0 * y, updates, again), state


def secretive(updates, state):
  """Sends what the next state alone keeps."""
  means = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), updates)
  kept = jax.tree.map(lambda x, mean: x + 0 * mean, state.residual, means)
  return updates, state._replace(residual=kept)


@pytest.mark.parametrize(
  ("update", "law", "words"),
  [
    (lambda u, s: (u, s._replace(count=s.count * 1.0)), "state_is_stable", "count"),
    (lambda u, s: (u, (s, 0)), "state_is_stable", "becomes PyTreeDef"),
    (own_count, "state_is_stable", "int32[]{V:data}"),
    (lambda u, s: (jax.tree.map(jnp.float32, u), s), "workers_agree", "float32[2,5,7]"),
    (by_worker, "workers_agree", "in step 0 of"),
    (forgetful, "nothing_is_lost", "in residuals"),
    (guarded, "non_finite_gradients_are_seen", "finite updates alone"),
    (by_mode, "same_bits_in_every_mode", "in shard_map"),
  ],
)
def test_a_broken_transformation_breaks_its_law(update, law, words):
  with pytest.raises(BrokenLaw, match=says(f"{law}: the transformation", words)):
    check_transformation(changed(update), small(), workers=2, places=["shard_map"])


def test_bytes_that_nobody_explained():
  steps = [laws.gradients_like({"w": jnp.zeros(700)}, workers=2)]
  explained = functools.partial(laws.bytes_are_explained, gradients=steps)
  explained(changed())
  for talks in (chatty, secretive):
    with pytest.raises(BrokenLaw, match=says("bytes a step", "explain counts")):
      explained(changed(talks))


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_residuals_of_few_bits_hold(stored):
  """Zeros, as of a leaf that stays dense, have one scale in every mode."""
  tx = gradcomp.onebit_sgd(
    axis_name="data",
    exchange="all_gather",
    feedback=gradcomp.ErrorFeedback(residual_dtype=stored),
  )
  check_transformation(tx, small(), workers=2, places=["explicit"])


def test_what_decays_or_moves_is_not_conserved():
  """And nobody promised it; what is lost of few bits is more than they round."""
  steps = [laws.gradients_like(small(), 2, seed) for seed in range(2)]
  onebit = functools.partial(
    gradcomp.onebit_sgd, axis_name="data", exchange="all_gather", min_leaf_size=0
  )
  laws.nothing_is_lost(onebit(feedback="momentum"), steps)
  laws.nothing_is_lost(
    onebit(feedback=gradcomp.ErrorFeedback(residual_decay=0.5)), steps
  )
  stored = onebit(feedback=gradcomp.ErrorFeedback(residual_dtype="int8"))

  def update(updates, state, params=None):
    updates, state = stored.update(updates, state, params)
    zeros = jax.tree.map(jnp.zeros_like, state.residual)
    return updates, state._replace(residual=zeros)

  with pytest.raises(BrokenLaw, match=says("nothing_is_lost", "0 in residuals")):
    laws.nothing_is_lost(optax.GradientTransformation(stored.init, update), steps)


def small():
  return {"h": jnp.zeros((5, 7), jnp.bfloat16), "w": jnp.zeros(300)}


def test_a_chain_and_a_policy_hold():
  rules = [("h", gradcomp.codecs.Dense()), ("w", gradcomp.codecs.QSGD(bits=4))]
  policy = gradcomp.policy(rules, axis_name="data", exchange="two_shot")
  tx = optax.chain(policy, optax.sgd(0.5, momentum=0.9))
  check_transformation(tx, small(), workers=2)
  steps = [laws.gradients_like(small(), workers=2)]
  *_, last = transformation_laws(tx, steps, same_bits=True)
  assert last.func.__name__ == "bytes_are_explained"


def test_what_cannot_be_checked():
  with pytest.raises(TypeError, match=says("`codec`", "instance", "QSGD")):
    check_codec(gradcomp.codecs.QSGD)
  rules = [(".", gradcomp.codecs.Dense())]
  with pytest.raises(TypeError, match=says("`codec`", "each codec of a policy")):
    check_codec(gradcomp.codecs.Policy(rules))
  with pytest.raises(TypeError, match=says("`transformation`", "gradcomp.compress")):
    check_transformation(gradcomp.codecs.Dense())
  with pytest.raises(BrokenLaw, match=says("is_a_value: Thawed", "not frozen")):
    laws.is_a_value(broken.Thawed())


def test_bad_options_are_named():
  with pytest.raises(ValueError, match=says("`workers`", "1 or more", "0")):
    check_codec(gradcomp.codecs.Dense(), workers=0)
  with pytest.raises(ValueError, match=says("`steps`", "1 or more", "0")):
    check_transformation(changed(), steps=0)
  with pytest.raises(ValueError, match=says("`mode`", "'vmap'", "'emulated'")):
    modes.run("emulated", changed(), [laws.gradients_like(small(), workers=2)])
  with pytest.raises(ValueError, match=says("`workers`", "8, got 9")):
    modes.mesh(9)
