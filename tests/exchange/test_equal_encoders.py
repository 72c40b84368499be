"""Leaves of one shape have equal programs, of which XLA for CPU compiles one."""

import re

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from tests.support import modes

# Instructions: they have more, and the arithmetic of one slice's start has fewer.
ENCODERS, WITH_RESIDUALS, DECODERS, READERS = 40, 60, 30, 8


def long_fusions(optimizer, leaves, least):
  """The distinct texts of long fusions in the update of equal leaves, without names."""
  gradients = [jax.ShapeDtypeStruct((512, 1024), jnp.float32)] * leaves
  text = modes.traced(optimizer, gradients, 2).lower().compile().as_text()
  found = re.findall(r"^%fused_computation\S* \(.*?^\}", text, re.DOTALL | re.MULTILINE)
  return {anonymous(x) for x in found if x.count("\n") > least and "while" not in x}


def anonymous(computation):
  """A computation's instructions with numbered names, without their origins."""
  names = {}
  number = lambda name: f"%{names.setdefault(name.group(), len(names))}"
  body = computation.split("\n", 1)[1]
  return re.sub(r"%[\w.-]+", number, re.sub(r", metadata=.*", "", body))


@pytest.mark.parametrize(
  ("method", "least"),
  [
    (lambda: gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot"), DECODERS),
    (lambda: gradcomp.terngrad(axis_name="data"), ENCODERS),
    (lambda: gradcomp.onebit_sgd(axis_name="data"), WITH_RESIDUALS),
    (lambda: gradcomp.redsync(axis_name="data"), READERS),
  ],
  ids=["qsgd", "terngrad", "onebit", "redsync"],
)
def test_more_leaves_have_no_more_programs(method, least):
  """A loop may encode three leaves or more, by one program for all."""
  few, many, more = (long_fusions(method(), leaves, least) for leaves in (2, 4, 8))
  assert few
  # What all leaves share, like the sum of an owner's rows, depends on their number.
  assert len(more) == len(many) <= len(few)
