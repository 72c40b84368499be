"""A quantizing codec refuses hyperparameters that it cannot have, and says why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD, EightBit, OneBit, Ternary
from tests.support.assertions import says


@pytest.mark.parametrize("size", [0, 1, 100, -32, 64.0, True, None, "64"], ids=repr)
@pytest.mark.parametrize("make", [OneBit, gradcomp.onebit_sgd])
def test_one_bit_needs_buckets(make, size):
  with pytest.raises(
    ValueError, match=says("`bucket_size`", "multiple of 32", repr(size))
  ):
    make(bucket_size=size)


@pytest.mark.parametrize("size", [0, 1, 100, -32, 64.0, True, "64", [64]], ids=repr)
@pytest.mark.parametrize(
  "make",
  [
    QSGD,
    gradcomp.qsgd,
    Ternary,
    gradcomp.terngrad,
    EightBit,
    gradcomp.eight_bit,
  ],
)
def test_buckets_or_none(make, size):
  parts = ("`bucket_size`", "multiple of 32", "None", repr(size))
  with pytest.raises(ValueError, match=says(*parts)):
    make(bucket_size=size)


@pytest.mark.parametrize("value", ["", None, 1, True, ["2bit"]], ids=repr)
@pytest.mark.parametrize(
  "make, name, choices",
  [
    (Ternary, "packing", ("2bit", "base3")),
    (Ternary, "scaler", ("clipped", "sigma")),
    (EightBit, "dtype", ("dynamic_tree", "dynamic_map", "static_tree", "mantissa")),
    (EightBit, "rounding", ("stochastic", "nearest")),
    (QSGD, "levels", ("sign_magnitude", "uniform", "nonuniform")),
    (gradcomp.qsgd, "levels", ("sign_magnitude", "uniform", "nonuniform")),
    (QSGD, "norm", ("max", "l2", "rms")),
    (gradcomp.qsgd, "norm", ("max", "l2", "rms")),
    (QSGD, "rounding", ("stochastic", "nearest")),
    (gradcomp.qsgd, "rounding", ("stochastic", "nearest")),
  ],
)
def test_named_choices(make, name, choices, value):
  with pytest.raises(ValueError, match=says(f"`{name}`", *choices, repr(value))):
    make(**{name: value})


@pytest.mark.parametrize("value", [0, 1, None, "yes"], ids=repr)
@pytest.mark.parametrize(
  "make, name",
  [(OneBit, "per_column"), (Ternary, "share_scale"), (QSGD, "share_scale")],
)
def test_flags(make, name, value):
  with pytest.raises(ValueError, match=says(f"`{name}`", "bool", repr(value))):
    make(**{name: value})


@pytest.mark.parametrize("sigmas", [0, -1.0, np.inf, np.nan, "2.5", True], ids=repr)
def test_clip_sigmas(sigmas):
  with pytest.raises(ValueError, match=says("`clip_sigmas`", "above 0", repr(sigmas))):
    Ternary(clip_sigmas=sigmas)


def test_the_scaler_of_the_authors_needs_sigmas():
  with pytest.raises(ValueError, match=says("`clip_sigmas`", "None", '"clipped"')):
    Ternary(clip_sigmas=None, scaler="sigma")


def test_injected_hyperparameters_must_be_static():
  """optax makes arrays of numbers; the error names the cure."""
  tx = optax.inject_hyperparams(gradcomp.terngrad)(clip_sigmas=2.0)
  with pytest.raises(ValueError, match=says("`clip_sigmas`", "static_args")):
    tx.init({"w": jnp.zeros(3)})
  static = optax.inject_hyperparams(gradcomp.terngrad, static_args="clip_sigmas")
  static(clip_sigmas=2.0).init({"w": jnp.zeros(3)})


@pytest.mark.parametrize("offset", [31, -31, 1.0, True, "1"], ids=repr)
def test_exponent_offset(offset):
  with pytest.raises(
    ValueError, match=says("`exponent_offset`", "-30 to 30", repr(offset))
  ):
    EightBit(dtype="mantissa", exponent_offset=offset)


@pytest.mark.parametrize("data_type", ["dynamic_tree", "dynamic_map", "linear"])
def test_types_without_an_exponent_offset(data_type):
  with pytest.raises(ValueError, match=says("`exponent_offset`", "None", data_type)):
    EightBit(dtype=data_type, exponent_offset=1)


@pytest.mark.parametrize(
  "name, options",
  [
    ("bits", dict(bits=1)),
    ("bits", dict(bits=5)),
    ("norm", dict(norm="l2")),
    ("share_scale", dict(share_scale=True)),
    ("refit_every", dict(refit_every=0)),
    ("refit_every", dict(refit_every=1.5)),
  ],
)
def test_fitted_levels(name, options):
  value = repr(next(iter(options.values())))
  with pytest.raises(ValueError, match=says(f"`{name}`", "must be", value)):
    QSGD(levels="nonuniform", **options)


@pytest.mark.parametrize(
  "codec", [Ternary(), EightBit(rounding="stochastic"), QSGD(levels="nonuniform")]
)
def test_stochastic_rounding_needs_a_key(codec):
  with pytest.raises(ValueError, match=says("`key`", "jax.random.key")):
    codec.encode(jnp.ones(3))


@pytest.mark.parametrize("codec", [OneBit(), Ternary(), EightBit()])
def test_only_real_floats(codec):
  with pytest.raises(TypeError, match=says("`x`", "float", "int32")):
    codec.encode(jnp.arange(3), key=jax.random.key(0))


@pytest.mark.parametrize("codec", [OneBit(), EightBit(), Ternary(share_scale=False)])
def test_codes_that_cannot_be_added(codec):
  with pytest.raises(ValueError, match=says("`exchange`", "psum")):
    gradcomp.compress(codec, exchange="psum")


@pytest.mark.parametrize("exchange", ["ring", "hierarchical"])
def test_shared_scales_are_of_no_use_where_sums_are_encoded_again(exchange):
  with pytest.raises(
    ValueError, match=says("`exchange`", exchange, "share_scale=False")
  ):
    gradcomp.compress(Ternary(), exchange=exchange)
