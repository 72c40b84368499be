"""What was saved and then cut, emptied or damaged is refused in words."""

import copy
import functools
import itertools
import json
import operator

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD
from gradcomp.cost import CodecSpeed, Link
from gradcomp.parallel import zero
from tests.support.assertions import says

TX = gradcomp.qsgd(bits=4, bucket_size=64, exchange="two_shot", axis_name="data")
ZERO = zero(optax.adam(0.1), grads=QSGD(), params=QSGD(bits=8), axis_name="data")
PARAMS = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


@functools.cache
def record_of(tx):
  return json.loads(json.dumps(gradcomp.checkpoint.make_record(tx, PARAMS, workers=4)))


def places(value, path=()):
  yield path
  if isinstance(value, dict | list):
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
      yield from places(value[key], (*path, key))


def changed(record, path, change):
  record = copy.deepcopy(record)
  change(functools.reduce(operator.getitem, path[:-1], record), path[-1])
  return record


lose = operator.delitem


@pytest.mark.parametrize("tx", [TX, ZERO], ids=["qsgd", "zero"])
def test_a_damaged_record_is_no_error_of_python(tx):
  """Every item of it is lost, and every item has another type, in turn."""
  record = record_of(tx)
  gradcomp.checkpoint.check_record(record, record)
  taken = 0
  put = lambda value: lambda holder, key: holder.__setitem__(key, value)
  values = (None, [], {}, "x", -1, 7, [None], {"type": "x"})
  each = itertools.product([*places(record)][1:], (lose, *map(put, values)))
  for path, change in each:
    saved = changed(record, path, change)
    try:
      gradcomp.checkpoint.check_record(saved, record)
      taken += saved != record
    except (ValueError, TypeError) as error:
      assert str(error).startswith("`saved` must be"), (path, saved)
  # What decides nothing: the version, options of other versions, and the axes and the
  # number of workers where nothing is stacked.
  assert taken < 60


def test_the_error_says_what_is_lost():
  record = record_of(TX)
  for key in ("format", "workers", "stacked", "platform", "transformations"):
    words = "what gradcomp.checkpoint.make_record returned", f"its '{key}' is None"
    with pytest.raises(TypeError, match=says("`saved` must be", *words)):
      gradcomp.checkpoint.check_record(changed(record, (key,), lose), record)
  for fact in record["transformations"][0]:
    saved = changed(record, ("transformations", 0, fact), lose)
    with pytest.raises(
      ValueError, match=says("`saved` must be", f"{fact} was nothing")
    ):
      gradcomp.checkpoint.check_record(saved, record)


SPEED = CodecSpeed(encode=1e-9, decode=2e-9, add=3e-9)
LINK = Link(latency=1e-5, bytes_per_second=1e9, factor={("all_gather", 4): 1.5})
DAMAGED = [
  *(bytes(range(256)), b"[1, 2]", b"3", b"null", b'"latency"', b"[" * 100_000),
  *(b'{"a": 1, "factor": []}', b'{"factor": []}'),
  b'{"latency": "x", "bytes_per_second": null, "factor": [], "encode": "x"}',
  b'{"latency": 0, "bytes_per_second": 1, "factor": 5}',
  b'{"latency": 0, "bytes_per_second": 1, "factor": [[[1], 2, 3]]}',
]


@pytest.mark.parametrize("kept", [SPEED, LINK], ids=["CodecSpeed", "Link"])
def test_files_that_are_damaged_or_cut_anywhere(kept, tmp_path):
  path = tmp_path / "kept.json"
  kept.save(path)
  whole = path.read_bytes()
  assert type(kept).load(path) == kept
  parts = ("`path` must be", f"{type(kept).__name__}.save", str(path), "measure anew")
  for damaged in (*DAMAGED, *(whole[:n] for n in range(len(whole.rstrip())))):
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=says(*parts)):
      type(kept).load(path)
  with pytest.raises(FileNotFoundError):
    type(kept).load(tmp_path / "none.json")
