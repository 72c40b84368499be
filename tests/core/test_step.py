"""A step reads as its equation, and a kernel lies few calls below it."""

import contextlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.kernels.materialize import LARGE
from gradcomp._src.kernels.quantize import reference
from tests.support import modes

LIBRARY = str(Path(gradcomp.__file__).parent)  # with a link to the kernels in it
REFERENCE = str(Path(reference.__file__))
NAMES = "encode_rows", "decode_rows"


@contextlib.contextmanager
def each_call(report):
  """Reports each call of a Python function in the body, by its frame."""

  def look(frame, event, _):
    if event == "call":
      report(frame)

  # What earlier tests have traced would be taken from JAX's caches, without a call.
  jax.clear_caches()
  sys.setprofile(look)
  try:
    yield
  finally:
    sys.setprofile(None)


def trace_updates(size, report):
  """Traces an update in two_shot with feedback, on two workers."""
  tx = gradcomp.qsgd(
    bits=4, axis_name="data", exchange="two_shot", feedback="error", min_leaf_size=0
  )

  def update(grads):
    state = tx.init(grads)
    with each_call(report):
      return tx.update(grads, state)[0]

  mapped = jax.shard_map(
    update, mesh=modes.mesh(2), in_specs=P("data"), out_specs=P("data"), check_vma=False
  )
  jax.make_jaxpr(mapped)(jnp.ones((2, size)))


def caller_and_name(frame):
  return frame.f_back.f_code.co_name, frame.f_code.co_name


def test_a_step_is_six_calls_in_one_function():
  called = []
  trace_updates(4096, lambda frame: called.append(caller_and_name(frame)))
  words = ["correct", "agree", "encode", "exchange", "decode", "keep"]
  found = [name for caller, name in called if caller == "take_step" and name in words]
  assert found == words


@pytest.mark.parametrize("size", [4096, LARGE], ids=["small", "large"])
def test_a_kernel_is_at_most_16_calls_below_an_update(size):
  """Only calls of functions of this library count, the first and the last included."""
  depths = {}

  def report(frame):
    code, caller = frame.f_code, frame.f_back.f_code
    entered = code.co_filename == REFERENCE != caller.co_filename
    if not entered or code.co_name not in NAMES:
      return
    depth = 0
    while frame.f_code.co_name != "trace_updates":
      depth += frame.f_code.co_filename.startswith(LIBRARY)
      frame = frame.f_back
    depths.setdefault(code.co_name, set()).add(depth)

  trace_updates(size, report)
  assert depths.keys() == set(NAMES)
  assert len(depths["encode_rows"]) == 2  # of leaves, and of means
  assert max(map(max, depths.values())) <= 16, depths
