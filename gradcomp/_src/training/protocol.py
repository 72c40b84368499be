"""``TrainStep``: the type of the train steps that ``make_train_step`` returns."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, overload

import jax

Params = TypeVar("Params")


class TrainStep(jax.stages.Wrapped, Protocol[Params]):
  """The jitted train step that :func:`make_train_step` returns.

  It is ``step(params, opt_state, batch, *extra) -> (params, opt_state, metrics)``. With
  ``model_state`` among the options it is ``step(params, opt_state, model_state, batch,
  *extra) -> (params, opt_state, model_state, metrics)``. ``step.lower`` and
  ``step.trace`` take the same arguments, as those of every function of ``jax.jit``.

  Parameters are replicated over the axis, and so are ``extra`` arguments. Every array
  of ``batch`` is sharded on its first axis. ``opt_state`` is ``optimizer.init(params)``
  under ``jax.set_mesh(mesh)``. Put the parameters on the mesh first, by
  ``jax.device_put(params, NamedSharding(mesh, P()))``. Parameters on one device work,
  but then the second step compiles again.

  ``metrics["loss"]``, and ``metrics["aux"]`` with ``has_aux``, are means over the
  workers. With local steps in the optimizer, parameters are those that all
  workers share, and gradients are computed at each worker's own. The loss, ``aux`` and
  ``"gradient_norm"`` then have a first axis of N, for the workers: a mean would be a
  message in each step.

  The optimizer's ``update`` gets more than gradients, as ``optax.polyak_sgd`` or
  ``optax.lbfgs`` ask for: ``value``, the loss over the whole batch; ``value_fn``, or
  ``obj_fn``, which computes it for other parameters; and ``grad``, its gradient. These
  are means over the workers in full precision: where an optimizer uses the gradient or
  the function, it is sent uncompressed. With local steps they are the worker's
  own.

  Args:
    params: the parameters, a tree like the one that the loss takes.
    opt_state: the state of the optimizer.
    batch: the batch of all workers; behind the model state, if there is one.
    rng: a key. The loss is called with ``rng=`` a key that is made from it, another one
      for each worker and micro-batch. Give it another key in every step.
    extra_args: further arguments of the optimizer's ``update``, by name.
    inspect: whether ``metrics["inspection"]`` is the inspection of the step:
      see :func:`gradcomp.telemetry.inspect`. That is a program of its own, which is
      compiled when it is first needed.
  """

  @overload
  def __call__(
    self,
    params: Params,
    opt_state: Any,
    batch: Any,
    *,
    rng: jax.Array | None = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> tuple[Params, Any, dict[str, Any]]: ...

  # With a model state, with extra arguments, or with both.
  @overload
  def __call__(
    self,
    params: Params,
    opt_state: Any,
    *args: Any,
    rng: jax.Array | None = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> tuple[Params, Any, *tuple[Any, ...]]: ...
