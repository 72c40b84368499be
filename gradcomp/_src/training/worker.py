"""A train step on one worker, inside the map."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src import checks
from gradcomp._src.core import inputs, state
from gradcomp._src.floats import norms
from gradcomp._src.local_steps.transform import local_params
from gradcomp._src.mesh import axes, types
from gradcomp._src.mesh.place import unaveraged
from gradcomp._src.telemetry.inspect import measured_update
from gradcomp._src.telemetry.replicas import Replicas, compare_replicas
from gradcomp._src.training import loss_form, scanned
from gradcomp._src.training.loss_form import Function, LossForm, mean_of_workers

ModelState = Literal["mean", "local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(checks.Checked):
  """The options of :func:`gradcomp.make_train_step` that are seldom set.

  Attributes:
    has_aux: whether ``loss_fn`` returns ``aux``.
    has_weight: whether it returns ``(total, weight)`` in place of ``loss``, see
      :func:`gradcomp.value_and_grad`. Model state and ``aux`` are plain means. In local
      steps a worker's loss is the mean over its own tokens.
    model_state: the treatment of a model state that is not trained, like batch
      statistics. ``"mean"`` averages it over the workers in every step, in float32.
      ``"local"`` leaves each worker its own, on a first axis of N. None: there is none.
    accumulate: the number of micro-batches that a worker takes one after the other, 1
      or more. Gradients, model state and ``aux`` are means over them.
    report: whether ``metrics`` has ``"bytes_sent"`` (of a worker in a step: see
      :func:`gradcomp.explain`), ``"gradient_norm"`` (the root mean square over the
      workers of their own gradients' l2 norms, with the means of scanned layers) and
      ``"update_norm"`` (the l2 norm of the update).
    compare_every: n, to compare the workers' parameters at the start of one of n steps,
      from the first on, in ``metrics["replicas"]``: see
      :func:`gradcomp.telemetry.compare_replicas`. In other steps they count as equal.
      ``"bytes_sent"`` does not count this.

  Raises:
    ValueError: a field breaks its rule.
  """

  has_aux: bool = checks.field(False, checks.FLAG)
  has_weight: bool = checks.field(False, checks.FLAG)
  model_state: ModelState | None = checks.field(
    None, checks.choice(ModelState, none=True)
  )
  accumulate: int = checks.field(1, loss_form.ACCUMULATE)
  report: bool = checks.field(False, checks.FLAG)
  compare_every: int | None = checks.field(None, checks.optional(checks.STEPS))


class Given(NamedTuple):
  """The arguments of a step."""

  params: Any
  opt_state: Any
  model_state: Any
  batch: Any
  extra: Any  # a tuple
  rng: Any = None  # a key
  more_args: Any = None  # of the optimizer's update, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStep:
  """The step of one worker; :func:`gradcomp.make_train_step` documents the options."""

  optimizer: optax.GradientTransformationExtraArgs
  studied: optax.GradientTransformation  # the user's, which sends the same
  axis_name: axes.AxisName | None
  options: TrainOptions
  takes_scan: bool = False  # whether the loss does

  def __call__(
    self, loss_fn: Function, given: Given, *, inspect: bool
  ) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """Returns the new state of all, metrics, and a lone worker's own, ``[1, ...]``."""
    options, alone = self.options, state.steps_alone(given.opt_state)
    if alone and options.model_state == "mean":
      raise ValueError(
        '`model_state` must be "local" or None with local steps, because a mean would '
        'be sent in each step, got "mean".'
      )
    together = None if alone else self.axis_name
    found = self._gradients(loss_fn, given, together, inspect)
    loss, model_state, aux, grads, more_args = found
    metrics, own = {"loss": loss}, {"aux": aux} if options.has_aux else {}
    if options.compare_every is not None:
      metrics["replicas"] = self._replicas(given, options.compare_every)
    args = grads, given.opt_state, given.params
    if inspect:
      updates, opt_state, metrics["inspection"] = measured_update(
        self.optimizer, self.studied, *args, **more_args
      )
    else:
      updates, opt_state = self.optimizer.update(*args, **more_args)
    if self.axis_name is not None and (paths := unaveraged(updates, given.params)):
      raise ValueError(
        "`optimizer` must return updates that are equal on all workers, but that of "
        f"{paths[0]} differs between those of {self.axis_name!r}: no exchange has seen "
        "its gradient. Give it to a gradcomp transformation, or freeze it by "
        "optax.set_to_zero."
      )
    if options.report:
      own["gradient_norm"] = norms.squares(norms.norm(grads))
    own = mean_of_workers(own, together)
    if options.report:
      own["gradient_norm"] = norms.root(own["gradient_norm"])
      metrics["update_norm"] = norms.norm(updates)
    if alone:
      own = jax.tree.map(lambda x: x[None], own | {"loss": metrics.pop("loss")})
    else:
      metrics, own = metrics | own, {}
    params = optax.apply_updates(given.params, updates)
    return params, opt_state, model_state, metrics, own

  def _gradients(
    self, loss_fn: Function, given: Given, together: axes.AxisName | None, inspect: bool
  ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Returns loss, model state, aux, gradients, and more arguments of ``update``."""
    options, axis_name, count = self.options, self.axis_name, self.options.accumulate
    form = LossForm(has_aux=True, has_weight=options.has_weight, accumulate=count)
    averages_aux = together is not None or count > 1
    loss_fn = functools.partial(self._uniform, loss_fn, averages_aux)
    keys, before = given.rng, given.model_state
    if keys is not None:  # one for each micro-batch, different on each worker
      worker = 0 if axis_name is None else lax.axis_index(axis_name)
      keys = jax.random.split(jax.random.fold_in(keys, worker), count)
    if options.model_state == "local":
      before = jax.tree.map(lambda x: x[0], before)
    rest = (given.batch, keys), before, given.extra
    at, layers = local_params(given.params, given.opt_state), None
    if axis_name is not None:
      trees = given.params, given.opt_state
      layers = scanned.scanned_layers(self.optimizer, *trees, takes=self.takes_scan)
    found: Any
    if layers is not None:
      used = {"accumulate": count > 1, "local_steps": axis_name != together}
      scanned.check_alone(given.opt_state, used | {"inspect": inspect})
      found = scanned.value_and_grad(loss_fn, form, layers, given.opt_state, at, *rest)
    else:
      at = types.mark_varying(at, axis_name)
      found = *form.value_and_grad(loss_fn, together)(at, *rest), {}
    (loss, (model_state, aux)), grads, kept = found
    loss = mean_of_workers(loss, together)
    if options.model_state == "local":
      model_state = jax.tree.map(lambda x: x[None], model_state)
    if options.model_state == "mean":
      model_state = mean_of_workers(model_state, together)

    def value_fn(params: Any) -> jax.Array:
      return mean_of_workers(form.value(loss_fn, together, (params, *rest)), together)

    # Where no optimizer asks for it, JAX drops the mean of the gradients.
    more_args = inputs.extra_args(loss, mean_of_workers(grads, together), value_fn)
    more_args |= kept | dict(given.more_args or {})
    return loss, model_state, aux, grads, more_args

  def _uniform(
    self, loss_fn: Function, averages_aux: bool, *given: Any, scan: Any = lax.scan
  ) -> tuple[Any, tuple[Any, Any]]:
    """Calls a loss, with the same arguments and results for all options."""
    params, (batch, keys), model_state, extra = given
    options: dict[str, Any] = {} if keys is None else {"rng": keys[0]}
    if self.takes_scan:
      options["scan"] = scan
    if self.options.model_state is not None:
      batch, extra = model_state, (batch, *extra)
    loss, (model_state, aux) = self._parts(loss_fn(params, batch, *extra, **options))
    if averages_aux:
      loss_form.check_numbers(aux)
    return loss, (model_state, aux)

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
    match loss if self.options.has_weight else (loss, 1):
      case (total, weight) if jax.tree_util.all_leaves([total, weight]):
        return loss, (model_state, aux)
    forms = "loss", "(loss, aux)", "(loss, model_state)", "(loss, (model_state, aux))"
    form = forms[2 * (self.options.model_state is not None) + self.options.has_aux]
    form = form.replace("loss", "(total, weight)") if self.options.has_weight else form
    raise TypeError(
      f"`loss_fn` must return {form} with has_aux={self.options.has_aux}, has_weight="
      f"{self.options.has_weight} and model_state={self.options.model_state!r}, got "
      f"{jax.tree.structure(result)}."
    )

  def _replicas(self, given: Given, steps: int) -> Replicas:
    """Compares the parameters of all workers in one of ``steps`` steps; else zeros."""
    states = state.states_in(given.opt_state)
    if not states:
      raise ValueError(
        "`optimizer` must hold a gradcomp transformation, whose state counts the steps "
        f"for compare_every={steps}, got the state "
        f"{jax.tree.structure(given.opt_state)}."
      )

    axis_name: Any = self.axis_name
    compare = lambda params: compare_replicas(params, axis_name=axis_name)
    like = jax.eval_shape(compare, given.params)
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    # The count is equal on all workers, so that all of them are in the same branch.
    return lax.cond(states[0].count % steps == 0, compare, zeros, given.params)


def check_model_state(model_state: Any, options: TrainOptions, workers: int) -> None:
  """Raises an error for model state that cannot be averaged, or is not stacked."""
  kind = options.model_state
  for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
    name = f"`model_state`{jax.tree_util.keystr(path)}"
    averaged = kind == "mean" or options.accumulate > 1
    if averaged and not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"{name} must have a real float dtype to be averaged, got {leaf.dtype}; make "
        "it an argument of its own, after the batch."
      )
    if kind == "local" and leaf.shape[:1] != (workers,):
      raise ValueError(
        f"{name} must have a first axis of {workers}, one row for each worker, got the "
        f"shape {leaf.shape}; begin with jax.tree.map(lambda x: jnp.broadcast_to(x, "
        f"({workers}, *x.shape)), model_state)."
      )
