"""What gather cannot take is refused, by a message that names it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from gradcomp.codecs import QSGD, OneBit, TopK
from gradcomp.parallel import gather
from tests.support import modes
from tests.support.assertions import says

N = 4
RANDOM = QSGD(bits=4, bucket_size=32)
PLAIN = dict(params=None, grads=None)

WRONG = {
  "sparse": (dict(params=TopK(), grads=None), ["`params`", "every element", "TopK"]),
  "sparse back": (dict(params=None, grads=TopK()), ["`grads`", "every element"]),
  "one bit": (dict(params=None, grads=OneBit()), ["`grads`", "`residual` is None"]),
  "one bit there": (
    dict(params=OneBit(), grads=None, residual=jnp.zeros((12, 2))),
    ["`params`", "error feedback"],
  ),
  "key": (dict(params=None, grads=RANDOM), ["`key`", "QSGD"]),
  "axis": (dict(axis=2, **PLAIN), ["`axis`", "2 axes", "got 2"]),
  "shape": (dict(shape=(4, 5), **PLAIN), ["`w_shard`", "(5,)", "(3, 2)", "jnp.pad"]),
  "residual": (
    dict(residual=jnp.zeros((3, 2)), **PLAIN),
    ["`residual`", "(12, 2)", "(3, 2)", "gather_residual"],
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case):
  options, words = WRONG[case]
  with pytest.raises(ValueError, match=says(*words)):
    function = lambda w: gather(w, axis_name="data", **options)
    jax.eval_shape(jax.vmap(function, axis_name="data"), jnp.ones((N, 3, 2)))


def test_wrong_types_and_axes_are_named():
  w, trace = jnp.ones((N, 3, 2)), jax.eval_shape
  for function, error, words in (
    (lambda w: gather(w > 0, axis_name="data", **PLAIN), TypeError, ["float"]),
    (
      lambda w: gather(w, axis_name="data", params="int8", grads=None),
      TypeError,
      ["`params`"],
    ),
    (
      lambda w: gather(w, axis_name="data", residual=jnp.zeros((12, 2), int), **PLAIN),
      TypeError,
      ["`residual`", "float dtype", "gather_residual"],
    ),
    (
      lambda w: gather(w, axis_name="model", **PLAIN),
      ValueError,
      ["`axis_name`", "model"],
    ),
    (
      lambda w: parallel.gather_residual(w, axis_name="x"),
      ValueError,
      ["`axis_name`", "'x'"],
    ),
  ):
    with pytest.raises(error, match=says(*words)):
      trace(jax.vmap(function, axis_name="data"), w)


def test_a_residual_that_jax_would_add_up_is_refused():
  """One that is typed as equal on all workers; that of the helper is not."""

  def function(w, e):
    loss = lambda e: jnp.sum(gather(w, axis_name="data", residual=e, **PLAIN))
    return jax.grad(loss)(e)

  def helped(w):
    return function(w, parallel.gather_residual(w, axis_name="data"))

  on_mesh = lambda f, *specs: jax.shard_map(
    f, mesh=modes.mesh(N), in_specs=specs, out_specs=P("data")
  )
  w, e = jnp.ones((8, 2)), jnp.ones((8, 2))
  with pytest.raises(ValueError, match=says("`residual`", "['data']", "in_specs")):
    jax.eval_shape(on_mesh(function, P("data"), P()), w, e)
  assert jax.eval_shape(on_mesh(helped, P("data")), w).shape == (N * 8, 2)
