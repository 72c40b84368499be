"""Functions that call a network of flax nnx or flax linen, to train and to test it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

Model = Callable[..., nnx.Module] | linen.Module


class Functions(NamedTuple):
  """The functions of a network, each of its parameters."""

  init: Callable[..., Any]  # key -> params
  # params, inputs, key for dropout or None, scan= where blocks are a loop -> logits
  train: Callable[..., jax.Array]
  # params, inputs -> what batch norms normalize by; None where there are none.
  statistics: Callable[..., Any] | None
  test: Callable[..., jax.Array]  # params, statistics, inputs -> logits
  drops: bool  # whether there is dropout
  scans: bool = False  # whether blocks are a loop over stacked parameters


def functions(model: Model, inputs: np.ndarray) -> Functions:
  """Returns the functions of a network.

  Args:
    model: makes the network of flax nnx from ``rngs``, or is one of flax linen. One of
      nnx with dropout takes ``rngs`` beside its inputs; one of linen has the rate as
      its field ``dropout``, and takes ``train``, and with the field ``stacked`` takes
      ``scan``.
    inputs: an example.
  """
  return _of_linen(model, inputs) if isinstance(model, linen.Module) else _of_nnx(model)


def _of_linen(model: linen.Module, inputs: np.ndarray) -> Functions:
  drops = getattr(model, "dropout", 0.0) > 0

  def train(
    params: Any, inputs: jax.Array, key: jax.Array | None, **loop: Any
  ) -> jax.Array:
    if not drops:
      return model.apply({"params": params}, inputs, **loop)
    rngs = {} if key is None else {"dropout": key}
    return model.apply({"params": params}, inputs, train=True, rngs=rngs, **loop)

  return Functions(
    init=lambda key: model.init(key, inputs)["params"],
    train=train,
    statistics=None,
    test=lambda params, _, inputs: model.apply({"params": params}, inputs),
    drops=drops,
    scans=getattr(model, "stacked", False),
  )


def _of_nnx(model: Callable[..., nnx.Module]) -> Functions:
  shapes = nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0)))
  drops = any(
    isinstance(part, nnx.Dropout) and part.rate > 0
    for _, part in nnx.iter_modules(shapes)
  )

  def graph(**modes: bool) -> Any:
    """Returns the network without its arrays, in other modes than it was made in."""
    shapes.set_attributes(**modes, raise_if_not_found=False)
    definition, _, kept = nnx.split(shapes, nnx.Param, nnx.BatchStat)
    return definition, kept

  training, kept = graph(deterministic=False, use_running_average=False)
  looking, _ = graph(deterministic=True, use_running_average=False)
  testing, _ = graph(deterministic=True, use_running_average=True)

  def blank() -> Any:
    """Makes statistics that are not read before they are set."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)

  def train(params: Any, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
    rngs = {"rngs": nnx.Rngs(dropout=key)} if drops and key is not None else {}
    return nnx.merge(training, params, blank())(inputs, **rngs)

  def statistics(params: Any, inputs: jax.Array) -> Any:
    network = nnx.merge(looking, params, blank())
    network(inputs)
    return nnx.state(network, nnx.BatchStat)

  def test(params: Any, statistics: Any, inputs: jax.Array) -> jax.Array:
    found = kept if statistics is None else statistics
    return nnx.merge(testing, params, found)(inputs)

  return Functions(
    init=lambda key: nnx.state(model(rngs=nnx.Rngs(key)), nnx.Param),
    train=train,
    statistics=statistics if jax.tree.leaves(kept) else None,
    test=test,
    drops=drops,
  )
