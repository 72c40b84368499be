"""The kit lets an honest codec through, and says which law each broken one breaks."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp import codecs
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
from tests.project import broken_codecs
from tests.support.assertions import says


@pytest.mark.parametrize("name", broken_codecs.BROKEN)
def test_a_broken_codec_breaks_its_law(name):
  """A sentence names the law, the codec, what was expected, and what was found."""
  codec, law, words = broken_codecs.named(name)
  with pytest.raises(BrokenLaw, match=says(f"{law}: {name}", *words)) as error:
    getattr(laws, law)(codec)
  assert error.value.law == law and str(error.value).endswith(".")


def test_check_codec_names_the_first_law_that_is_broken():
  for name in ("Unhashable", "MoreThanClaimed"):
    codec, law, words = broken_codecs.named(name)
    with pytest.raises(AssertionError, match=says(f"{law}: ", *words)):
      check_codec(codec, workers=2)


def fails(self, tiles, context):
  raise self.error


def test_errors_in_a_law_begin_with_its_name():
  for error, kind, words in (
    (ValueError("no rows"), ValueError, "zeros_decode_to_zeros: no rows"),
    (ValueError(), ValueError, "zeros_decode_to_zeros: "),
    (OSError(2, "gone"), RuntimeError, "zeros_decode_to_zeros: FileNotFoundError"),
  ):
    failing = broken_codecs.broken("Failing", error=error, encode_rows=fails)
    with pytest.raises(kind) as caught:
      laws.zeros_decode_to_zeros(failing)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("exchanges", [(), *slow((("two_shot",),))], ids=str)
def test_an_honest_codec_holds(exchanges):
  given = dict(workers=2, exchanges=exchanges)
  given["options"] = CheckOptions(
    sizes=(1, 33), draws=300, constants=(1.0, -0.3), spoils=32, most_variance=0.52
  )
  check_codec(broken_codecs.Honest(), **given)
  every = {name: law for name, law in vars(laws).items() if callable(law)}
  del every["gradients_like"]
  of_steps = {x for x in every if "gradients" in inspect.signature(every[x]).parameters}
  tried = {law.func.__name__ for law in codec_laws(broken_codecs.Honest(), **given)}
  assert tried == (every.keys() if exchanges else every.keys() - of_steps)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.QSGD(bits=4, rotate=8),
    *slow(codecs.QSGD(bits=1, levels="uniform"), codecs.QSGD(bits=2, bucket_size=None)),
    *slow(codecs.QSGD(bits=16, share_scale=True), codecs.QSGD(bits=2, rotate=32)),
    *slow(codecs.QSGD(bits=3, levels="nonuniform"), codecs.Natural(), codecs.Ternary()),
    *slow(
      codecs.Ternary(packing="base3", bucket_size=64),
      codecs.FloatCast(rounding="stochastic"),
    ),
    *slow(codecs.BlockFloat(element="e2m1", rounding="stochastic")),
    *slow(codecs.EightBit(rounding="stochastic")),
  ],
  ids=str,
)
def test_elements_of_codecs_draw_apart(codec):
  laws.elements_draw_apart(codec)


def changed(update=None):
  """A transformation that is honest but for what is done to its results."""
  tx = gradcomp.onebit_sgd(axis_name="data", exchange="all_gather", min_leaf_size=0)

  def update_fn(updates, state, params=None):
    updates, after = tx.update(updates, state, params)
    return update(updates, after) if update else (updates, after)

  return optax.GradientTransformation(tx.init, update_fn)


def small():
  return {"h": jnp.zeros((5, 7), jnp.bfloat16), "w": jnp.zeros(300)}


def by_worker(updates, state):
  number = jax.lax.axis_index("data")
  return jax.tree.map(lambda x: x + number.astype(x.dtype), updates), state


def own_count(updates, state):
  """Counts by itself, in what all workers should have alike: types alone tell."""
  return updates, state._replace(count=state.count + jax.lax.axis_index("data"))


def forgetful(updates, state):
  return updates, state._replace(residual=jax.tree.map(lambda x: x / 2, state.residual))


def by_mode(updates, state):
  if jax.sharding.get_abstract_mesh().empty:
    return updates, state
  return jax.tree.map(lambda x: -x, updates), state


@pytest.mark.parametrize(
  ("update", "law", "words"),
  [
    (lambda u, s: (u, s._replace(count=s.count * 1.0)), "state_is_stable", "count"),
    (lambda u, s: (u, (s, 0)), "state_is_stable", "becomes PyTreeDef"),
    (own_count, "state_is_stable", "int32[]{V:data}"),
    (lambda u, s: (jax.tree.map(jnp.float32, u), s), "workers_agree", "float32[2,5,7]"),
    (by_worker, "workers_agree", "in step 0 of"),
    (forgetful, "nothing_is_lost", "in residuals"),
    (
      lambda u, s: (jax.tree.map(jnp.nan_to_num, u), s),
      *("non_finite_gradients_are_seen", "finite updates alone"),
    ),
    (by_mode, "same_bits_in_every_mode", "in shard_map"),
  ],
)
def test_a_broken_transformation_breaks_its_law(update, law, words):
  with pytest.raises(BrokenLaw, match=says(f"{law}: the transformation", words)):
    check_transformation(changed(update), small(), workers=2, places=["shard_map"])


def test_bytes_that_nobody_explained():
  """Also those that the next state alone keeps."""
  steps = [laws.gradients_like({"w": jnp.zeros(700)}, workers=2)]
  explained = functools.partial(laws.bytes_are_explained, gradients=steps)
  explained(changed())
  mean = lambda tree: jax.tree.map(lambda x: 0 * jax.lax.pmean(x, "data"), tree)
  more = lambda tree, of: jax.tree.map(jnp.add, tree, mean(of))
  for talks in (
    lambda u, s: (more(u, u), s),
    lambda u, s: (u, s._replace(residual=more(s.residual, u))),
  ):
    with pytest.raises(BrokenLaw, match=says("bytes a step", "explain counts")):
      explained(changed(talks))


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_residuals_of_few_bits_hold(stored):
  """Zeros, as of a leaf that stays dense, have one scale in every mode."""
  feedback = gradcomp.ErrorFeedback(residual_dtype=stored)
  options = dict(axis_name="data", exchange="all_gather", feedback=feedback)
  tx = gradcomp.onebit_sgd(**options)
  check_transformation(tx, small(), workers=2, places=["explicit"])


def test_what_decays_or_moves_is_not_conserved():
  """And nobody promised it; what is lost of few bits is more than they round."""
  steps = [laws.gradients_like(small(), 2, seed) for seed in range(2)]
  onebit = functools.partial(
    gradcomp.onebit_sgd, axis_name="data", exchange="all_gather", min_leaf_size=0
  )
  for feedback in ("momentum", gradcomp.ErrorFeedback(residual_decay=0.5)):
    laws.nothing_is_lost(onebit(feedback=feedback), steps)
  stored = onebit(feedback=gradcomp.ErrorFeedback(residual_dtype="int8"))

  def update(updates, state, params=None):
    updates, state = stored.update(updates, state, params)
    zeros = jax.tree.map(jnp.zeros_like, state.residual)
    return updates, state._replace(residual=zeros)

  with pytest.raises(BrokenLaw, match=says("nothing_is_lost", "0 in residuals")):
    laws.nothing_is_lost(optax.GradientTransformation(stored.init, update), steps)


def test_a_chain_and_a_policy_hold():
  rules = [("h", codecs.Dense()), ("w", codecs.QSGD(bits=4))]
  policy = gradcomp.policy(rules, axis_name="data", exchange="two_shot")
  tx = optax.chain(policy, optax.sgd(0.5, momentum=0.9))
  check_transformation(tx, small(), workers=2)
  steps = [laws.gradients_like(small(), workers=2)]
  *_, last = transformation_laws(tx, steps, same_bits=True)
  assert last.func.__name__ == "bytes_are_explained"


@dataclasses.dataclass(kw_only=True)
class Thawed:
  bits: int = 8


@pytest.mark.parametrize(
  ("call", "kind", "words"),
  [
    (lambda: check_codec(codecs.QSGD), TypeError, ("`codec`", "instance", "QSGD")),
    (
      lambda: check_codec(codecs.Policy([(".", codecs.Dense())])),
      *(TypeError, ("`codec`", "each codec of a policy")),
    ),
    (
      lambda: check_transformation(codecs.Dense()),
      *(TypeError, ("`transformation`", "gradcomp.compress")),
    ),
    (
      lambda: laws.is_a_value(Thawed()),
      *(BrokenLaw, ("is_a_value: Thawed", "not frozen")),
    ),
    (
      lambda: check_codec(codecs.Dense(), workers=0),
      ValueError,
      ("`workers`", "1 or more"),
    ),
    (
      lambda: check_transformation(changed(), steps=0),
      *(ValueError, ("`steps`", "1 or more", "0")),
    ),
    (
      lambda: modes.run("emulated", changed(), [laws.gradients_like(small(), 2)]),
      *(ValueError, ("`mode`", "'vmap'", "'emulated'")),
    ),
    (lambda: modes.mesh(9), ValueError, ("`workers`", "8, got 9")),
  ],
)
def test_what_cannot_be_checked(call, kind, words):
  with pytest.raises(kind, match=says(*words)):
    call()
