"""Every bad input of the sparse codecs and of RedSync raises an error that says why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import BlockTop, RandomK, TopK
from gradcomp.exchange import Hierarchical
from tests.support.assertions import says

SPARSE = [TopK(), RandomK()]


@pytest.mark.parametrize("make", [TopK, RandomK, gradcomp.redsync])
@pytest.mark.parametrize("value", [0, -0.1, 1.5, np.nan, "1%", None, True], ids=repr)
def test_density(make, value):
  parts = ("`density`", "above 0 and at most 1", repr(value))
  with pytest.raises(ValueError, match=says(*parts)):
    make(density=value)


@pytest.mark.parametrize("make", [TopK, RandomK])
def test_density_is_known_when_a_program_is_traced(make):
  """It decides shapes; what changes it is named."""
  with pytest.raises(
    ValueError, match=says("`density`", "traced", "gradcomp.wrappers.switch")
  ):
    make(density=jnp.float32(0.1))


@pytest.mark.parametrize("make", [TopK, RandomK])
@pytest.mark.parametrize("value", [0, -1, 2.0**20, 2**40, "1", True], ids=repr)
def test_range_size(make, value):
  parts = ("`range_size`", "from 1 to", "None", repr(value))
  with pytest.raises(ValueError, match=says(*parts)):
    make(range_size=value)


@pytest.mark.parametrize("make", [TopK, gradcomp.redsync])
@pytest.mark.parametrize(
  "name, choices, value",
  [
    ("selection", ("exact", "trimmed", "threshold", "sampled"), "best"),
    ("selection", ("auto", "exact"), None),
    ("quantize", ("asq", "mean"), "strom"),
    ("quantize", ("asq", "mean"), True),
    ("dtype", ("float32, bfloat16 or float16",), np.int8),
    ("dtype", ("float32, bfloat16 or float16",), "float8"),
    ("slack", ("from 1 to 2",), 0.5),
    ("slack", ("from 1 to 2",), 2.5),
    ("slack", ("from 1 to 2",), "2"),
    ("slack", ("from 1 to 2",), True),
    ("slack", ("from 1 to 2",), np.nan),
    ("search_every", ("1 or more",), 0),
    ("search_every", ("1 or more",), 2.5),
    ("search_every", ("1 or more",), True),
  ],
  ids=lambda part: repr(part) if not isinstance(part, tuple) else "",
)
def test_hyperparameters_of_selection(make, name, choices, value):
  with pytest.raises(ValueError, match=says(f"`{name}`", *choices, repr(value))):
    make(**{name: value})


@pytest.mark.parametrize("make", [TopK, gradcomp.redsync])
@pytest.mark.parametrize("quantize", ["asq", "mean"])
def test_what_a_quantizer_does_not_go_with(make, quantize):
  """Thresholds that are used again (Fang 2018, section 2.2), and narrow values."""
  parts = ("`selection`", '"sampled"', repr(quantize), '"threshold"')
  with pytest.raises(ValueError, match=says(*parts)):
    make(quantize=quantize, selection="sampled")
  parts = ("`dtype`", "float32", repr(quantize), "bfloat16")
  with pytest.raises(ValueError, match=says(*parts)):
    make(quantize=quantize, dtype=jnp.bfloat16)


@pytest.mark.parametrize("codec", SPARSE, ids=["TopK", "RandomK"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_leaves_are_real_floats(codec, dtype):
  with pytest.raises(TypeError, match=jnp.dtype(dtype).name):
    codec.encode(jnp.ones(8, dtype), key=jax.random.key(0))


def test_random_k_needs_a_key():
  with pytest.raises(ValueError, match=says("`key`")):
    RandomK().encode(jnp.ones(8))


@pytest.mark.parametrize(
  "codec, exchange, parts",
  [
    (TopK(), "ring", ("sparse", "TopK", "two_shot")),
    (BlockTop(), "ring", ("sparse", "BlockTop", "two_shot")),
    (TopK(), "psum", ("cannot be added", "TopK", "auto")),
    (RandomK(), "ring", ("sparse", "RandomK")),
    (RandomK(), "two_shot", ("the same elements", "RandomK", "psum")),
    (RandomK(), "hierarchical", ("the same elements", "RandomK", "psum")),
    (TopK(selection="sampled"), "hierarchical", ("thresholds again", "sampled")),
  ],
  ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_exchanges_that_a_sparse_codec_does_not_allow(codec, exchange, parts):
  with pytest.raises(ValueError, match=says("`exchange`", f'"{exchange}"', *parts)):
    gradcomp.compress(codec, axis_name="data", exchange=exchange)


def test_momentum_in_groups():
  """Nobody knows there what of a worker's own momentum was sent."""
  parts = ("`feedback`", '"momentum"', '"hierarchical"', "TopK", 'feedback="error"')
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.redsync(axis_name="data", exchange=Hierarchical(group_size=2))


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, np.nan, "0.9", True], ids=repr)
def test_momentum(value):
  rule = ("at least 0 and below 1", repr(value))
  with pytest.raises(ValueError, match=says("`momentum`", *rule)):
    gradcomp.redsync(momentum=value)
  with pytest.raises(ValueError, match=says("`decay`", *rule)):
    gradcomp.MomentumFeedback(decay=value)


@pytest.mark.parametrize("value", [None, 1, "yes"], ids=repr)
def test_nesterov(value):
  with pytest.raises(ValueError, match=says("`nesterov`", "bool", repr(value))):
    gradcomp.redsync(nesterov=value)
  with pytest.raises(ValueError, match=says("`nesterov`", "bool", repr(value))):
    gradcomp.MomentumFeedback(nesterov=value)


def test_feedback_names_its_choices():
  parts = ("`feedback`", '"auto"', '"error"', '"momentum"', "None", "'sum'")
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.compress(TopK(), feedback="sum")


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, "1", True], ids=repr)
def test_max_norm(value):
  parts = ("`max_norm`", "positive, finite", repr(value))
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.wrappers.clip_by_local_norm(value)
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.redsync(max_norm=value)


@pytest.mark.parametrize("value", ["mean", None, 1.0], ids=repr)
def test_clip_rule(value):
  choices = ("'own'", "'share'", "'root'", repr(value))
  with pytest.raises(ValueError, match=says("`rule`", *choices)):
    gradcomp.wrappers.clip_by_local_norm(1.0, rule=value)
  with pytest.raises(ValueError, match=says("`clip_rule`", *choices)):
    gradcomp.redsync(clip_rule=value)


def test_clipping_over_no_axis():
  tx = gradcomp.wrappers.clip_by_local_norm(1.0, axis_name="data")
  with pytest.raises(ValueError, match=says("`axis_name`", "'data'")):
    tx.update([jnp.ones(3)], tx.init([jnp.ones(3)]))
  with pytest.raises(ValueError, match=says("`axis_name`", "3")):
    gradcomp.wrappers.clip_by_local_norm(1.0, axis_name=3)
  with pytest.raises(TypeError, match="int32"):
    gradcomp.wrappers.clip_by_local_norm(1.0).update([jnp.ones(3, jnp.int32)], None)


@pytest.mark.parametrize("name", ["residual", "velocity"])
def test_states_that_lack_something(name):
  """A state may hold more than it has to, see switch, but nothing less."""
  grads = {"w": jnp.ones(512)}
  made = gradcomp.compress(TopK(density=0.1), feedback=None)
  used = gradcomp.compress(TopK(density=0.1), feedback="momentum")
  state = made.init(grads)
  if name == "velocity":
    state = state._replace(residual={"w": jnp.zeros(512)})
  with pytest.raises(ValueError, match=says(f"`state.{name}`", "must be kept")):
    used.update(grads, state)
  wrong = used.init({"w": jnp.ones(500)})
  with pytest.raises(ValueError, match=says("`state.residual`['w']", "(512,)", "500")):
    used.update(grads, wrong)
