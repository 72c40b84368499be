"""What is no state of N workers is refused, and the error says what differs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from tests.support import modes
from tests.support.cases import reshard as cases

TX = cases.compressed("two_shot", "error")


@functools.cache
def state():
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cases.shapes(TX, 4))


def call(**options):
  given = {
    "opt_state": state(),
    "old_workers": 4,
    "workers": 2,
    "optimizer": TX,
    "params": cases.PARAMS,
    "axis_name": "data",
  } | options
  return gradcomp.reshard_state(**given)


def with_residual(name, x):
  return state()._replace(residual=state().residual | {name: x})


WIDER = cases.PARAMS | {"w": jnp.zeros((40, 33))}
WRONG = [
  ({"workers": 0}, "`workers` must be a number of workers, 1 or more, got 0"),
  ({"workers": 1.5}, "`workers` must be .* got 1.5"),
  ({"old_workers": -1}, "`old_workers` must be .* got -1"),
  (
    {"old_workers": 8},
    r"`opt_state` must be the global state of 8 workers .* .residual\['b'\] must be "
    r"float32\[56\], got float32\[28\], as if made for 4 workers.*; and . more\. "
    "Pass old_workers=",
  ),
  (
    {"params": WIDER},
    r"\.residual\['w'\] must be float32\[160, 33\], got .*\[160, 32\]",
  ),
  (
    {"params": {"w": cases.PARAMS["w"]}},
    r"\.residual\['b'\] is too much; \.residual\['one'\] is too much",
  ),
  ({"optimizer": cases.compressed("ring", "error")}, r"\.server_residual.* too much"),
  ({"optimizer": cases.compressed("two_shot", "momentum")}, r"\.velocity.*is missing"),
  ({"optimizer": optax.chain(TX)}, r"\[0\]\.count is missing"),
  ({"opt_state": [*state()]}, "is missing"),
  (
    {"opt_state": with_residual("b", np.zeros(28, np.float16))},
    r"\['b'\] must be float32\[28\], got float16\[28\]\. Pass",
  ),
  ({"axis_name": "model"}, r"`axis_name` must be .*'data', got 'model'"),
  ({"axis_name": ()}, "`axis_name` must be"),
  ({"keep": "both"}, "`keep` must be one of"),
]


@pytest.mark.parametrize("options, said", WRONG, ids=range(len(WRONG)))
def test_errors_say_what_differs(options, said):
  with pytest.raises(ValueError, match=said):
    call(**options)


def test_the_mesh_must_have_as_many_workers():
  mesh = modes.mesh(4)
  with pytest.raises(
    ValueError, match=r"`workers` must be .*'data': 4.*got 2; pass mesh"
  ):
    call(mesh=mesh)
  with jax.set_mesh(mesh), pytest.raises(ValueError, match="got 2; pass mesh="):
    call()


def test_inside_of_a_transformed_function():
  with pytest.raises(ValueError, match="inside a transformed function"):
    jax.jit(lambda state: call(opt_state=state))(state())


def test_an_init_in_jit_is_looked_into():
  jitted = optax.GradientTransformation(jax.jit(TX.init), TX.update)
  jax.tree.map(np.testing.assert_array_equal, call(optimizer=jitted), call())


def test_an_init_with_counts_of_its_own():
  init = lambda params: TX.init(params)._replace(count=jnp.zeros([], jnp.int32))
  counting = optax.GradientTransformation(init, TX.update)
  with pytest.raises(ValueError, match=r"`optimizer.init` must return .* `count`"):
    call(optimizer=counting)


def test_a_state_whose_owners_forget():
  """It was made where nobody knew the number of workers, and stays without."""
  tx = cases.compressed("two_shot", None)
  made = tx.init(cases.PARAMS)
  assert made.server_residual is None
  assert call(opt_state=made, optimizer=tx).server_residual is None
  with pytest.raises(ValueError, match=r"\.server_residual.* is missing"):
    call(opt_state=state()._replace(server_residual=None))


@pytest.mark.parametrize("workers", [0, -3, "4"])
def test_shapes_of_no_workers(workers):
  with pytest.raises(ValueError, match="`workers` must be a number of workers"):
    gradcomp.checkpoint.state_shapes(
      TX, cases.PARAMS, workers=workers, axis_name="data"
    )
