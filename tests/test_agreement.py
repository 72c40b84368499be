"""Processes that would misread each other's messages are told so when they trace."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp import _agreement
from gradcomp.codecs import QSGD


class Store:
  """The key-value store of two processes."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value):
    assert key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, folder):
    return [item for item in self.values.items() if item[0].startswith(folder)]


@pytest.fixture
def as_process(monkeypatch):
  """Lets this process be each of two in turn."""
  store, traced = Store(), ({}, {})
  monkeypatch.setattr(_agreement.distributed.global_state, "client", store)
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def become(number):
    monkeypatch.setattr(jax, "process_index", lambda: number)
    monkeypatch.setattr(_agreement, "_traced", traced[number])

  return become


def trace(leaf="w", *, exchange="all_gather", key=0, size=64, **codec):
  tx = gradcomp.compress(
    QSGD(**{"bits": 4, **codec}), axis_name="data", exchange=exchange, key=key
  )
  grads = {leaf: jax.ShapeDtypeStruct((2, size), jnp.float32)}
  update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
  jax.eval_shape(update, grads)


@pytest.mark.parametrize(
  "other, match",
  [
    (dict(bits=8), r"`codec` must be the same .*bits=8.* process 1 and .*bits=4"),
    (dict(levels="uniform"), "`codec` must .*levels='uniform'"),
    (
      dict(exchange="two_shot"),
      "`exchange` must .*TwoShot.* in process 1 and AllGather",
    ),
    (dict(key=7), "`key` must .*got 7 in process 1 and 0 in process 0"),
  ],
)
def test_other_options_are_an_error_that_names_them(other, match, as_process):
  as_process(0)
  trace()
  as_process(1)
  with pytest.raises(ValueError, match=match):
    trace(**other)


def test_another_version_is_an_error(as_process, monkeypatch):
  as_process(0)
  trace()
  as_process(1)
  monkeypatch.setattr(_agreement, "__version__", "9")
  with pytest.raises(ValueError, match="`gradcomp` must be the same in all processes"):
    trace()


def test_equal_programs_pass_however_far_ahead_one_is(as_process):
  """Several transformations of the same leaves, of others, and traced repeatedly."""
  program = [
    dict(),
    dict(bits=8),
    dict(),
    dict(leaf="v", bits=2),
    dict(size=32, bits=3),
  ]
  for number in (0, 1):
    as_process(number)
    for options in program:
      trace(**options)
  with pytest.raises(ValueError, match="`codec` must"):  # the third of these leaves
    trace(bits=2)
    as_process(0)
    trace(bits=3)


def test_nothing_is_compared_where_nothing_is_exchanged(as_process):
  for number, bits in ((0, 4), (1, 8)):
    as_process(number)
    trace(bits=bits, exchange="local")
