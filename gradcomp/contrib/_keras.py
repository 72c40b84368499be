"""A compressed exchange in ``fit()`` of Keras 3 on JAX."""

from typing import Any

import jax
import optax

from gradcomp._src.core import specs
from gradcomp._src.training import gradients


def keras(model: Any, exchange: optax.GradientTransformation) -> None:
  """Puts an exchange between the gradients of a Keras model and its optimizer.

  The optimizer gets means, and has the exchange's state, which ``load_weights`` loads.

  Args:
    model: compiled and built under a ``keras.distribution``; its ``fit`` is changed.
    exchange: like ``gradcomp.qsgd(bits=4, axis_name="batch")``, by Keras' axis.

  Raises:
    ValueError: the model is not so, or Keras uses NNX.
  """
  from keras import StatelessScope, config, distribution, utils

  place, optimizer = distribution.distribution(), getattr(model, "optimizer", None)
  if not (place and optimizer and model.built) or config.is_nnx_enabled():
    rule = "compiled and built, under keras.distribution.set_distribution, without NNX"
    raise ValueError(f"`model` must be {rule}, got {model}, {optimizer} and {place}.")
  if not optimizer.built:
    optimizer.build(model.trainable_variables)
  params = [x.value for x in model.trainable_variables]
  mesh, axis = place.device_mesh.backend_mesh, place.batch_dim_name
  how: Any = dict(mesh=mesh, axis_name=axis, param_specs=[x.sharding for x in params])
  leaves, treedef = jax.tree.flatten(specs.init_state(exchange, params, **how))
  last = getattr(optimizer, "inner_optimizer", optimizer)  # whose variables are last
  for x in leaves:
    last.add_variable(x.shape, dtype=x.dtype.name, layout=x.sharding).assign(x)

  def loss_fn(params: Any, data: Any, rest: Any, kept: Any, sums: Any) -> Any:
    n = jax.lax.axis_index(axis).astype("uint32") * 0x3779B97F  # seeds apart
    rest = [x.at[0].add(n) if x.dtype == "uint32" and x.size == 2 else x for x in rest]
    updates = model.compute_loss_and_updates
    loss, (value, output, rest, new) = updates(params, rest, sums, *data, True, kept)
    _, new = model._update_metrics_variables(new, value, *data[:2], output, data[2])
    total = lambda x, old: old + mesh.shape[axis] * (x - old)
    return loss, (rest, jax.tree.map(total, new, sums))

  def train_step(state: Any, data: Any) -> Any:
    (params, rest, kept, sums), n = state, len(leaves)
    grad_fn = gradients.value_and_grad(loss_fn, has_aux=True, batch_argnums=1, **how)
    (_, aux), grads = grad_fn(params, utils.unpack_x_y_sample_weight(data), *state[1:])
    means, own = exchange.update(grads, jax.tree.unflatten(treedef, kept[-n:]), params)
    params, kept = optimizer.stateless_apply(kept, means, params)
    kept[-n:] = jax.tree.leaves(own)
    rest, sums = jax.tree.map(lambda x, old: x.astype(old.dtype), aux, (rest, sums))
    with StatelessScope(zip(model.metrics_variables, sums, strict=True)):
      return model.get_metrics_result(), (params, rest, kept, sums)

  model.train_step, model.train_function = train_step, None
