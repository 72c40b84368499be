"""A train step on one worker, inside the map."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src import checks
from gradcomp._src.core.inputs import extra_args
from gradcomp._src.core.state import states_in, steps_alone
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.floats import norms
from gradcomp._src.local_steps.transform import local_params
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.telemetry.inspect import measured_update
from gradcomp._src.telemetry.replicas import Replicas, compare_replicas
from gradcomp._src.training.gradients import defer_reduction, value_and_grad
from gradcomp._src.training.loss_form import ACCUMULATE, LossForm, check_numbers
from gradcomp._src.training.scanned import check_alone, scanned_layers
from gradcomp._src.transforms.freeze import unaveraged

ModelState = Literal["mean", "local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(checks.Checked):
  """The options of :func:`gradcomp.make_train_step` that are seldom set.

  Attributes:
    has_aux: whether ``loss_fn`` returns ``aux``.
    has_weight: whether it returns ``(total, weight)`` in place of ``loss``, see
      :func:`gradcomp.value_and_grad`. Model state and ``aux`` are plain means. In
      :func:`gradcomp.local.local_steps` a worker's loss is the mean over its own
      tokens.
    model_state: the treatment of a model state that is not trained, like batch
      statistics. ``"mean"`` averages it over the workers in every step, in float32.
      ``"local"`` leaves each worker its own; arrays then have a first axis of N, for
      the workers. None is for models without one.
    accumulate: the number of micro-batches that a worker takes one after the other, 1
      or more. Gradients, model state and ``aux`` are means over them.
    report: whether ``metrics`` has ``"bytes_sent"`` (of a worker for gradients in a
      step, as ``float32``: see :func:`gradcomp.explain`), ``"gradient_norm"`` (the root
      mean square over the workers of their own gradients' l2 norms, with the means of
      layers that the loss scans) and ``"update_norm"`` (the l2 norm of the update of
      the parameters).
    compare_every: n, to compare the workers' parameters at the start of one of n steps,
      from the first on, in ``metrics["replicas"]``: see
      :func:`gradcomp.telemetry.compare_replicas`. In the other steps they count as
      equal. None compares nothing. ``"bytes_sent"`` does not count this.

  Raises:
    ValueError: a field breaks its rule.
  """

  has_aux: bool = checks.field(False, checks.FLAG)
  has_weight: bool = checks.field(False, checks.FLAG)
  model_state: ModelState | None = checks.field(
    None, checks.choice(ModelState, none=True)
  )
  accumulate: int = checks.field(1, ACCUMULATE)
  report: bool = checks.field(False, checks.FLAG)
  compare_every: int | None = checks.field(None, checks.optional(checks.STEPS))


class Given(NamedTuple):
  """The arguments of a step."""

  params: Any
  opt_state: Any
  model_state: Any
  batch: Any
  extra: tuple[Any, ...]
  rng: jax.Array | None = None
  more_args: Mapping[str, Any] | None = None  # of the optimizer's update


class Stepped(NamedTuple):
  """The results of a step."""

  params: Any
  opt_state: Any
  model_state: Any
  metrics: dict[str, Any]
  own: dict[str, Any]  # metrics of a worker that takes local steps, [1, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStep:
  """The step of one worker; :func:`gradcomp.make_train_step` documents the options."""

  optimizer: optax.GradientTransformationExtraArgs
  studied: optax.GradientTransformation  # the user's, which sends the same
  axis_name: AxisName | None
  options: TrainOptions
  takes_scan: bool = False  # whether the loss does

  def __call__(
    self, loss_fn: Callable[..., Any], given: Given, *, inspect: bool
  ) -> Stepped:
    """Takes a step with the worker's part of the batch, and inspects it if asked."""
    alone = steps_alone(given.opt_state)
    if alone and self.options.model_state == "mean":
      raise ValueError(
        '`model_state` must be "local" or None where workers take steps alone, for a '
        'mean in each step would be sent in each step, got "mean".'
      )
    together = None if alone else self.axis_name
    weight, count = self.options.has_weight, self.options.accumulate
    form: dict[str, Any] = dict(has_aux=True, has_weight=weight, accumulate=count)
    loss_fn = self._uniform(loss_fn, together is not None or count > 1)
    rows, before = (given.batch, self._keys(given.rng)), given.model_state
    if self.options.model_state == "local":
      before = jax.tree.map(lambda x: x[0], before)
    at = local_params(given.params, given.opt_state)
    if alone and self.axis_name is not None:
      at = defer_reduction(at, axis_name=self.axis_name)
    grad_fn = self._grad_fn(loss_fn, form, given, alone=alone, inspect=inspect)
    # What update takes beside the gradients, if layers are scanned.
    value, grads, kept = grad_fn(at, rows, before, given.extra)
    loss, (model_state, aux) = value
    metrics, own = {"loss": loss}, {"aux": aux} if self.options.has_aux else {}
    if self.options.model_state == "local":
      model_state = jax.tree.map(lambda x: x[None], model_state)
    if self.options.model_state == "mean":
      model_state = self._mean(model_state)
    if self.options.compare_every is not None:
      metrics["replicas"] = self._replicas(given, self.options.compare_every)

    def value_fn(params: Any) -> jax.Array:
      own = LossForm(**form).value(loss_fn, together)(params, rows, before, given.extra)
      return own if alone else self._mean(own)

    # Where no optimizer asks for it, JAX drops the mean of the gradients.
    grad = grads if alone else self._mean(grads)
    more_args = extra_args(loss, grad, value_fn) | kept | dict(given.more_args or {})
    args = grads, given.opt_state, given.params
    if inspect:
      updates, opt_state, metrics["inspection"] = measured_update(
        self.optimizer, self.studied, *args, **more_args
      )
    else:
      updates, opt_state = self.optimizer.update(*args, **more_args)
    self._check_equal(updates, given.params)
    if self.options.report:
      own["gradient_norm"] = norms.squares(norms.norm(grads))
    if alone:
      own = jax.tree.map(lambda x: x[None], own | {"loss": metrics.pop("loss")})
    else:
      metrics, own = metrics | self._mean(own), {}
    if self.options.report:
      found = own if alone else metrics
      found["gradient_norm"] = norms.root(found["gradient_norm"])
      metrics["update_norm"] = norms.norm(updates)
    params = optax.apply_updates(given.params, updates)
    return Stepped(params, opt_state, model_state, metrics, own)

  def _grad_fn(
    self,
    loss_fn: Callable[..., Any],
    form: dict[str, Any],
    given: Given,
    *,
    alone: bool,
    inspect: bool,
  ) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """Returns a function with the value, gradients, and more arguments of update."""
    layers = None
    if self.axis_name is not None:
      trees = given.params, given.opt_state
      layers = scanned_layers(self.optimizer, *trees, takes=self.takes_scan)
    if layers is None:
      together = None if alone else self.axis_name
      grad_fn = value_and_grad(loss_fn, axis_name=together, **form)
      return lambda *args: (*grad_fn(*args), {})
    used = {"accumulate": form["accumulate"] > 1, "local_steps": alone}
    check_alone(given.opt_state, used | {"inspect": inspect})
    return layers.value_and_grad(loss_fn, LossForm(**form), given.opt_state)

  def _uniform(
    self, loss_fn: Callable[..., Any], averages_aux: bool
  ) -> Callable[..., Any]:
    """Returns a loss with the same arguments and results for all options."""

    def uniform(
      params: Any, rows: Any, model_state: Any, extra: Any, scan: Any = lax.scan
    ) -> Any:
      batch, keys = rows
      options: dict[str, Any] = {} if keys is None else {"rng": keys[0]}
      if self.takes_scan:
        options["scan"] = scan
      if self.options.model_state is not None:
        batch, extra = model_state, (batch, *extra)
      loss, (model_state, aux) = self._parts(loss_fn(params, batch, *extra, **options))
      if averages_aux:
        check_numbers(aux)
      return loss, (model_state, aux)

    return uniform

  def _parts(self, result: Any) -> tuple[Any, tuple[Any, Any]]:
    """Returns ``(loss, (model_state, aux))``; TypeError for other results."""
    model_state = aux = None
    # A pattern of two parts matches tuples and lists, where unpacking would take the
    # keys of a dict of two entries.
    match self.options.model_state is not None, self.options.has_aux, result:
      case False, False, loss:
        pass
      case False, True, (loss, aux):
        pass
      case True, False, (loss, model_state):
        pass
      case True, True, (loss, (model_state, aux)):
        pass
      case _:
        loss = {}
    match self.options.has_weight, loss:
      case (False, one) if jax.tree_util.all_leaves([one]):
        return loss, (model_state, aux)
      case True, (total, weight) if jax.tree_util.all_leaves([total, weight]):
        return loss, (model_state, aux)
    forms = "loss", "(loss, aux)", "(loss, model_state)", "(loss, (model_state, aux))"
    form = forms[2 * (self.options.model_state is not None) + self.options.has_aux]
    form = form.replace("loss", "(total, weight)") if self.options.has_weight else form
    raise TypeError(
      f"`loss_fn` must return {form} with has_aux={self.options.has_aux}, has_weight="
      f"{self.options.has_weight} and model_state={self.options.model_state!r}, got "
      f"{jax.tree.structure(result)}."
    )

  def _keys(self, rng: jax.Array | None) -> jax.Array | None:
    """Returns one key for each micro-batch, different on each worker."""
    if rng is None:
      return None
    worker = 0 if self.axis_name is None else lax.axis_index(self.axis_name)
    return jax.random.split(jax.random.fold_in(rng, worker), self.options.accumulate)

  def _replicas(self, given: Given, steps: int) -> Replicas:
    """Compares the parameters of all workers in one of ``steps`` steps; else zeros."""
    states = states_in(given.opt_state)
    if not states:
      raise ValueError(
        "`optimizer` must hold a gradcomp transformation, whose state counts the steps "
        f"for compare_every={steps}, got the state "
        f"{jax.tree.structure(given.opt_state)}."
      )

    def compare(params: Any) -> Replicas:
      assert self.axis_name is not None
      return compare_replicas(params, axis_name=self.axis_name)

    like = jax.eval_shape(compare, given.params)
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    # The count is equal on all workers, so that all of them are in the same branch.
    return lax.cond(states[0].count % steps == 0, compare, zeros, given.params)

  def _mean(self, tree: Any) -> Any:
    return tree if self.axis_name is None else pmean(tree, self.axis_name)

  def _check_equal(self, updates: Any, params: Any) -> None:
    """Raises ValueError for updates that still differ between the workers."""
    if self.axis_name is not None and (paths := unaveraged(updates, params)):
      raise ValueError(
        "`optimizer` must return updates that are equal on all workers, but that of "
        f"{paths[0]} differs between those of {self.axis_name!r}: no exchange has seen "
        "its gradient. Let a gradcomp transformation see this leaf too, or freeze it "
        "by optax.set_to_zero."
      )


def check_model_state(model_state: Any, options: TrainOptions, workers: int) -> None:
  """Raises an error for model state that cannot be averaged, or is not stacked."""
  kind = options.model_state
  for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
    name = f"`model_state`{jax.tree_util.keystr(path)}"
    averaged = kind == "mean" or options.accumulate > 1
    if averaged and not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"{name} must have a real float dtype to be averaged, got {leaf.dtype}; make "
        "it an argument of its own, behind the batch."
      )
    if kind == "local" and leaf.shape[:1] != (workers,):
      raise ValueError(
        f"{name} must have a first axis of {workers}, one row for each worker, got the "
        f"shape {leaf.shape}; begin with jax.tree.map(lambda x: jnp.broadcast_to(x, "
        f"({workers}, *x.shape)), model_state)."
      )
