"""A step reads as its equation, and a kernel lies few calls below it."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.kernels import quantize
from gradcomp._src.kernels.materialize import LARGE
from tests.support import modes

LIBRARY = str(Path(gradcomp.__file__).parent)  # with a link to the kernels in it
REFERENCE = str(Path(quantize.__file__))
NAMES = "encode_reference", "decode_reference"


def trace_updates(size, report):
  """Reports each call of Python functions in an update, two_shot with feedback."""
  tx = gradcomp.qsgd(
    bits=4, axis_name="data", exchange="two_shot", feedback="error", min_leaf_size=0
  )

  def update(grads):
    state = tx.init(grads)
    sys.setprofile(lambda frame, event, _: event == "call" and report(frame))
    try:
      return tx.update(grads, state)[0]
    finally:
      sys.setprofile(None)

  specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
  mapped = jax.shard_map(update, mesh=modes.mesh(2), **specs)
  # What earlier tests have traced would be taken from JAX's caches, without a call.
  jax.clear_caches()
  jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((2, size), jnp.float32))


@pytest.mark.parametrize("size", [4096, LARGE], ids=["small", "large"])
def test_a_step_is_a_call_a_verb_and_a_kernel_at_most_12_below_it(size):
  """Only calls of functions of this library count, the first and the last included."""
  depths, found = {}, []
  words = ["correct", "agree", "encode", "_reduce", "_broadcast", "decode", "keep"]

  def report(frame):
    code, caller = frame.f_code, frame.f_back.f_code
    if caller.co_name in ("take_step", "average") and code.co_name in words:
      found.append(code.co_name)
    entered = code.co_filename == REFERENCE != caller.co_filename
    if not entered or code.co_name not in NAMES:
      return
    depth = 0
    while frame.f_code.co_name != "trace_updates":
      depth += frame.f_code.co_filename.startswith(LIBRARY)
      frame = frame.f_back
    depths.setdefault(code.co_name, []).append(depth)

  trace_updates(size, report)
  assert found == words
  assert depths.keys() == set(NAMES)
  assert len(depths["encode_reference"]) == 2  # of leaves, and of means
  assert max(map(max, depths.values())) <= 12, depths
