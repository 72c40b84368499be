"""``make_train_step``: a data-parallel train step without plumbing."""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Literal, Protocol, overload

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp._src import checks
from gradcomp._src.core import border
from gradcomp._src.core import state as states
from gradcomp._src.core.specs import check_stacked, state_specs
from gradcomp._src.floats import dtypes
from gradcomp._src.local_steps.rounds import numbers_of_all
from gradcomp._src.local_steps.transform import local_params
from gradcomp._src.mesh import agreement, axes, shard_maps, types
from gradcomp._src.mesh.trees import combine, is_array, split
from gradcomp._src.report.explain import explain
from gradcomp._src.telemetry.inspect import measured_update
from gradcomp._src.telemetry.replicas import compare_replicas
from gradcomp._src.training import batches, gradients, scanned
from gradcomp._src.training.gradients import LossForm, P, Params, mean_of_workers
from gradcomp._src.transforms.freeze import allow_frozen

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
  accumulate: int = checks.field(1, gradients.ACCUMULATE)
  report: bool = checks.field(False, checks.FLAG)
  compare_every: int | None = checks.field(None, checks.optional(checks.STEPS))


class TrainStep(jax.stages.Wrapped, Protocol[Params]):
  """The jitted train step that :func:`make_train_step` returns.

  It is ``step(params, opt_state, batch, *extra) -> (params, opt_state, metrics)``; with
  a model state ``step(params, opt_state, model_state, batch, *extra) -> (params,
  opt_state, model_state, metrics)``. ``step.lower`` and ``step.trace`` take the same.

  Parameters and ``extra`` arguments are replicated over the axis; every array of
  ``batch`` is sharded on its first axis. Put the parameters on the mesh first, by
  ``jax.device_put``, or the second step compiles again.

  ``metrics["loss"]``, and ``metrics["aux"]`` with ``has_aux``, are means over the
  workers. With local steps, gradients are those at a worker's own parameters, the step
  returns shared ones, and loss, ``aux`` and ``"gradient_norm"`` have a first axis of N.

  The optimizer's ``update`` also gets ``value``, ``value_fn`` or ``obj_fn``, and
  ``grad``, as ``optax.polyak_sgd`` or ``optax.lbfgs`` need: means over the workers,
  sent uncompressed if used; with local steps the worker's own.

  Args:
    params: a tree like the one that the loss takes, for example an ``equinox.Module``.
      Leaves that are not trained, see :func:`value_and_grad`, are returned as they were
      given; ``step.lower`` leaves them out.
    opt_state: ``optimizer.init(params)`` under ``jax.set_mesh(mesh)``.
    batch: the batch of all workers; after the model state, if there is one.
    rng: a key, another one in every step. The loss gets ``rng=`` a key made from it,
      another one for each worker and micro-batch.
    extra_args: further arguments of the optimizer's ``update``, by name.
    inspect: whether ``metrics["inspection"]`` is the inspection of the step, see
      :func:`gradcomp.telemetry.inspect_update`, by a program of its own.
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


class JittedStep:
  """A train step in ``jax.jit`` that keeps untrained leaves, and shardings."""

  def __init__(
    self, step: Callable[..., Any], *, donate: bool, mesh: Any, axes: Sequence[str]
  ):
    def trained(
      params: Any, *args: Any, kept: Any, others: Any = None, **kwargs: Any
    ) -> Any:
      whole, (rest, specs) = params, kept
      if rest is not None:
        leaves, treedef = rest
        rest = jax.tree.unflatten(treedef, leaves)
        whole = combine(params, combine(others, rest))
      if specs is None:
        return step(whole, *args, **kwargs)
      with shard_maps.PLACED(shard_maps.by_leaf(params, specs)):
        after, *rest = step(whole, *args, **kwargs)
      leaves, treedef = jax.tree.flatten(split(after)[0])
      places = [NamedSharding(mesh, spec) for spec in specs]
      leaves = lax.with_sharding_constraint(leaves, places)
      return jax.tree.unflatten(treedef, leaves), *rest

    trained.__name__ = step.__name__
    numbers, names = (0, 1) if donate else (), ("inspect", "kept")
    self._jitted = jax.jit(trained, donate_argnums=numbers, static_argnames=names)
    self._donate, self._axes = donate, axes
    functools.update_wrapper(self, step)
    self.__signature__ = inspect.signature(step)

  def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
    others, args, kwargs = self._given(params, *args, **kwargs)
    if self._donate:
      args, kwargs = _donated_once(args, kwargs)
    params, *rest = self._jitted(*args, **kwargs)
    return combine(params, others), *rest

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    _, args, kwargs = self._given(*args, **kwargs)
    return self._jitted.lower(*args, **kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    _, args, kwargs = self._given(*args, **kwargs)
    return self._jitted.trace(*args, **kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    others, args, kwargs = self._given(*args, **kwargs)
    params, *rest = self._jitted.eval_shape(*args, **kwargs)
    return combine(params, others), *rest

  def _given(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Returns the leaves that are not trained, and the arguments of ``jax.jit``."""
    params, others = split(params)
    static = None
    if jax.tree.leaves(others):
      # Functions, numbers and strings are static, as in equinox.filter_jit.
      arrays, rest = split(others, is_array)
      leaves, treedef = jax.tree_util.tree_flatten_with_path(rest)
      for path, leaf in leaves:
        if not isinstance(leaf, Hashable):
          raise TypeError(
            f"`params`{jax.tree_util.keystr(path)} must be an array, or a leaf that "
            f"can be hashed, like a function or a number, got {leaf!r}; make it a "
            "static field of its module."
          )
      static = tuple(leaf for _, leaf in leaves), treedef
      kwargs["others"] = arrays  # if there are none, a compiled step takes no such name
    specs = shard_maps.specs_over(params, self._axes) if self._axes else None
    return others, (params, *args), kwargs | {"kept": (static, specs)}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._jitted, name)


def _donated_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
  """Copies arrays of a step's arguments that share a buffer donated before."""
  # JAX ends the process where one buffer is donated twice, and optax.contrib.prodigy
  # has the first parameters in its state.
  leaves, treedef = jax.tree.flatten((args, kwargs))
  donated = len(jax.tree.leaves(args[:2]))
  seen: set[tuple[Any, int]] = set()
  for i, x in enumerate(leaves):
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
      # By devices of this process and addresses: JAX's device_put to an equal sharding
      # returns another object of the same buffers.
      count = len(x.sharding.addressable_devices)
      parts: list[Any] = [x.addressable_data(k) for k in range(count)]
      buffers = [(part.device, part.unsafe_buffer_pointer()) for part in parts]
      if not seen.isdisjoint(buffers):
        leaves[i] = jnp.copy(x)
      elif i < donated:
        seen.update(buffers)
  return jax.tree.unflatten(treedef, leaves)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Steps:
  """The steps of a trainer; :func:`make_train_step` documents the fields."""

  loss_fn: gradients.Function
  optimizer: optax.GradientTransformationExtraArgs
  studied: optax.GradientTransformation  # the user's, which sends the same
  axis_name: Any
  mesh: Any
  sizes: dict[str, int]  # of the axes; empty on one device
  options: TrainOptions
  takes_scan: bool  # whether the loss does

  def step(
    self,
    params: Any,
    opt_state: Any,
    batch: Any,
    *extra: Any,
    rng: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> Any:
    """Takes a step, see :class:`gradcomp.TrainStep`."""
    named: Any = {"rng": rng, "extra_args": extra_args, "inspect": inspect}
    given = params, opt_state, None, batch, *extra
    params, opt_state, _, metrics = self.step_with_state(*given, **named)
    return params, opt_state, metrics

  def step_with_state(  # noqa: PLR0913 - options of users, by keyword
    self,
    params: Any,
    opt_state: Any,
    state: Any,
    batch: Any,
    *extra: Any,
    rng: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> Any:
    """Takes a step with a model state, see :class:`gradcomp.TrainStep`."""
    checks.flag("inspect", inspect)
    loss, (params,) = gradients.of_trainable(self.loss_fn, [params], {0: "`params`"})
    workers, kind = math.prod(self.sizes.values()), self.options.model_state
    averaged = kind == "mean" or self.options.accumulate > 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      name = f"`model_state`{jax.tree_util.keystr(path)}"
      if averaged and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
          f"{name} must have a real float dtype to be averaged, got {leaf.dtype}; make "
          "it an argument of its own, after the batch."
        )
      if kind == "local" and leaf.shape[:1] != (workers,):
        raise ValueError(
          f"{name} must have a first axis of {workers}, one row for each worker, got "
          f"the shape {leaf.shape}; begin with jax.tree.map(lambda x: "
          f"jnp.broadcast_to(x, ({workers}, *x.shape)), model_state)."
        )
    run = self._on_mesh if self.sizes else self._on_worker
    *result, metrics, own = run(
      loss, inspect, params, opt_state, state, batch, extra, rng, extra_args
    )
    metrics |= own
    if self.options.report:
      shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
      sent = explain(self.studied, shapes, workers=self.sizes or 1).bytes_per_step
      metrics["bytes_sent"] = jnp.float32(sent)
    return *result, metrics

  def _on_mesh(self, loss_fn: Any, inspect: bool, *given: Any) -> tuple[Any, ...]:
    """Takes a step on all workers, in a map over the mesh."""
    axis_name, mesh, workers = self.axis_name, self.mesh, math.prod(self.sizes.values())
    params, opt_state, state, batch, *rest = given
    cut, whole = PartitionSpec(axis_name), PartitionSpec()
    kept = cut if self.options.model_state == "local" else whole
    batches.check_shared("`batch`", batch, workers)
    types.check_whole("params", params, axis_name)
    batch = types.put(batch, mesh, axis_name, cut)
    state = types.put(state, mesh, axis_name, kept)
    opt_state = numbers_of_all(opt_state, mesh)
    specs = state_specs(opt_state, axis_name=axis_name)
    check_stacked(opt_state, specs, params, workers)
    arrays, with_arrays = shard_maps.arrays_of(loss_fn)
    # How many micro-batches there are decides nothing that is sent.
    told = vars(self.options) | {"accumulate": None}
    told |= {"axis_name": axis_name, "inspect": inspect}
    trees = {"params": params, "opt_state": opt_state, "model_state": state}

    def local(arrays: list[Any], *given: Any) -> tuple[Any, ...]:
      own = with_arrays(arrays)
      own = shard_maps.with_note(own, shard_maps.OF_LOSS, mesh, self.sizes)
      return self._on_worker(own, inspect, *given)

    def stepped(check_vma: bool) -> tuple[Any, ...]:
      of_loss = types.typed_specs(arrays, axis_name)
      found = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_loss, whole, specs, kept, cut, *[whole] * len(rest)),
        out_specs=(whole, specs, kept, whole, cut),
        axis_names=set(self.sizes),
        check_vma=check_vma,
      )(arrays, params, opt_state, state, batch, *rest)
      # The loss has decided the form of these, which are averaged.
      trees["new_model_state"], trees["metrics"] = found[2], found[3] | found[4]
      return found

    with agreement.one_record(mesh, "gradcomp.make_train_step", told, trees) as parts:
      try:
        return stepped(True)
      except TypeError as error:
        # An optimizer of a worker's own may have branches of which one returns a
        # constant, as optax's reduce_on_plateau has. JAX takes them only unchecked.
        if not states.steps_alone(opt_state):
          raise
        first = error
      parts.clear()  # the second trace adds them again
      # An error of the loss is one of both traces, and is raised once.
      with contextlib.suppress(TypeError):
        return stepped(False)
      raise first

  def _on_worker(  # noqa: PLR0912, PLR0915 - a case for each option
    self, loss_fn: Any, inspect: bool, *given: Any
  ) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """Returns the new state of all, metrics, and a lone worker's own, ``[1, ...]``."""
    params, opt_state, state, batch, extra, rng, more = given
    options, axis_name, count = self.options, self.axis_name, self.options.accumulate
    alone = states.steps_alone(opt_state)
    together = None if alone else axis_name
    if alone and options.model_state == "mean":
      raise ValueError(
        '`model_state` must be "local" or None with local steps, because a mean would '
        'be sent in each step, got "mean".'
      )
    form = LossForm(has_aux=True, has_weight=options.has_weight, accumulate=count)
    averages_aux = together is not None or count > 1
    loss_fn = functools.partial(self._uniform, loss_fn, averages_aux)
    if rng is not None:  # one for each micro-batch, different on each worker
      worker = 0 if axis_name is None else lax.axis_index(axis_name)
      rng = jax.random.split(jax.random.fold_in(rng, worker), count)
    if options.model_state == "local":
      state = jax.tree.map(lambda x: x[0], state)
    rest = (batch, rng), state, extra
    at, layers = local_params(params, opt_state), None
    if axis_name is not None:
      used = {"accumulate": count > 1, "local_steps": alone, "inspect": inspect}
      held = params, opt_state
      layers = scanned.scanned_layers(self.optimizer, *held, used, self.takes_scan)
    found: Any
    if layers is not None:
      found = scanned.value_and_grad(loss_fn, form, layers, at, *rest)
    else:
      at = types.mark_varying(at, axis_name)
      found = *form.value_and_grad(loss_fn, together)(at, *rest), {}
    (loss, (state, aux)), grads, kept = found
    loss = mean_of_workers(loss, together)
    if options.model_state == "local":
      state = jax.tree.map(lambda x: x[None], state)
    else:
      state = mean_of_workers(state, together)

    def value_fn(params: Any) -> jax.Array:
      return mean_of_workers(form.value(loss_fn, together, (params, *rest)), together)

    # Where no optimizer asks for it, JAX drops the mean of the gradients.
    more_args = border.extra_args(loss, mean_of_workers(grads, together), value_fn)
    more_args |= kept | dict(more or {})
    metrics, own = {"loss": loss}, {"aux": aux} if options.has_aux else {}
    if options.compare_every is not None:
      metrics["replicas"] = self._replicas(params, opt_state, options.compare_every)
    args = grads, opt_state, params
    if inspect:
      updates, opt_state, metrics["inspection"] = measured_update(
        self.optimizer, self.studied, *args, **more_args
      )
    else:
      updates, opt_state = self.optimizer.update(*args, **more_args)
    if axis_name is not None and (paths := types.unaveraged(updates, params)):
      raise ValueError(
        "`optimizer` must return updates that are equal on all workers, but that of "
        f"{paths[0]} differs between those of {axis_name!r}: no exchange has seen "
        "its gradient. Give it to a gradcomp transformation, or freeze it by "
        "optax.set_to_zero."
      )
    if options.report:
      own["gradient_norm"] = dtypes.squares(dtypes.norm(grads))
    own = mean_of_workers(own, together)
    if options.report:
      own["gradient_norm"] = dtypes.root(own["gradient_norm"])
      metrics["update_norm"] = dtypes.norm(updates)
    if alone:
      own = jax.tree.map(lambda x: x[None], own | {"loss": metrics.pop("loss")})
    else:
      metrics, own = metrics | own, {}
    return optax.apply_updates(params, updates), opt_state, state, metrics, own

  def _uniform(
    self, loss_fn: Any, averages_aux: bool, *given: Any, scan: Any = lax.scan
  ) -> tuple[Any, tuple[Any, Any]]:
    """Calls a loss, with the same arguments and results for all options."""
    params, (batch, keys), model_state, extra = given
    has_aux, has_weight = self.options.has_aux, self.options.has_weight
    kind, named = self.options.model_state, {} if keys is None else {"rng": keys[0]}
    if self.takes_scan:
      named["scan"] = scan
    if kind is not None:
      batch, extra = model_state, (batch, *extra)
    result = loss_fn(params, batch, *extra, **named)
    model_state = aux = None
    # A pattern of two parts matches tuples and lists, where unpacking would take the
    # keys of a dict of two entries.
    match kind is not None, has_aux, result:
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
    match loss if has_weight else (loss, 1):
      case (total, weight) if jax.tree_util.all_leaves([total, weight]):
        if averages_aux:
          gradients.check_numbers(aux)
        return loss, (model_state, aux)
    forms = "loss", "(loss, aux)", "(loss, model_state)", "(loss, (model_state, aux))"
    form = forms[2 * (kind is not None) + has_aux]
    form = form.replace("loss", "(total, weight)") if has_weight else form
    raise TypeError(
      f"`loss_fn` must return {form} with has_aux={has_aux}, has_weight={has_weight} "
      f"and model_state={kind!r}, got {jax.tree.structure(result)}."
    )

  def _replicas(self, params: Any, opt_state: Any, steps: int) -> Any:
    """Compares the parameters of all workers in one of ``steps`` steps; else zeros."""
    counted = states.states_in(opt_state)
    if not counted:
      raise ValueError(
        "`optimizer` must hold a gradcomp transformation, whose state counts the steps "
        f"for compare_every={steps}, got the state {jax.tree.structure(opt_state)}."
      )
    compare = functools.partial(compare_replicas, axis_name=self.axis_name)
    zeros = lambda x: jax.tree.map(jnp.zeros_like, jax.eval_shape(compare, x))
    # The count is equal on all workers, so that all of them are in the same branch.
    return lax.cond(counted[0].count % steps == 0, compare, zeros, params)


def make_train_step(
  # With `...` in place of P, mypy refuses a lambda.
  loss_fn: Callable[Concatenate[Params, P], Any],
  optimizer: optax.GradientTransformation,
  *,
  axis_name: axes.AxisName | None,
  mesh: Mesh | None = None,
  donate: bool = True,
  options: TrainOptions = TrainOptions(),
) -> TrainStep[Params]:
  """Returns a jitted data-parallel train step: gradients, exchange and update.

  Args:
    loss_fn: ``loss_fn(params, batch, *extra)`` returns the mean loss over ``batch``, or
      ``(loss, aux)``. With ``model_state`` it is ``loss_fn(params, model_state, batch,
      *extra)``, and returns ``(loss, model_state)`` or ``(loss, (model_state, aux))``.
      Under Explicit axes it must not close over arrays of the mesh, see
      :func:`value_and_grad`. A parameter ``scan`` gets a function like ``jax.lax.scan``
      for its layers, see :func:`gradcomp.parallel.compress_in_scan`.
    optimizer: an optax transformation with gradcomp's in it, over the same axis. It may
      freeze parameters by ``optax.set_to_zero``, see
      :func:`gradcomp.wrappers.allow_frozen`.
    axis_name: the mesh axis that shards batches, or a tuple of axes; None for one
      device.
    mesh: the devices; by default the mesh of ``jax.set_mesh``. Its other axes may shard
      the parameters; over Auto ones make the state by :func:`gradcomp.init_state`, so
      that no words are sent over them.
    donate: whether parameters and optimizer state are updated in place. The arrays that
      were passed in are then gone.
    options: the form of the loss, the model state, micro-batches, and the ``metrics``:
      see :class:`TrainOptions`.

  Raises:
    ValueError: the mesh does not have an axis, or an option is bad; when called, a
      batch cannot be split into equal parts, a state is of another mesh, parameters are
      sharded over an Explicit axis of the batch, a gradient reaches no exchange, layers
      reach the loss beside its ``scan``, or another process traces another step.
    TypeError: when called, no parameter is an array of floats, an averaged model state
      or ``aux`` is no number, or the loss returns another form than ``options``.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> step = make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
    >>> params = {"w": jnp.ones((4, 1))}
    >>> *_, metrics = step(params, optimizer.init(params), jnp.ones((2, 4)))
    >>> metrics["loss"]
    Array(16., dtype=float32)
  """
  options = checks.instance_of("options", TrainOptions, options)
  sizes: dict[str, int] = {}
  others: tuple[str, ...] = ()
  if axis_name is not None:
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    names = axes.axis_names(axis_name)
    if not set(names).issubset(mesh.shape):
      raise ValueError(
        f"`axis_name` must be an axis of the mesh, got {axis_name!r} and a mesh with "
        f"the axes {mesh.axis_names}; pass mesh=, or call this under "
        "jax.set_mesh(mesh)."
      )
    sizes = {name: mesh.shape[name] for name in names}
    others = tuple(x for x in mesh.auto_axes if x not in sizes)
  elif options.compare_every is not None:
    raise ValueError(
      "`compare_every` must be None with axis_name=None, because one device has no "
      f"copies to compare, got {options.compare_every}."
    )
  steps = _Steps(
    loss_fn=loss_fn,
    optimizer=shard_maps.optimizer_with_note(allow_frozen(optimizer)),
    studied=optimizer,
    axis_name=axis_name,
    mesh=mesh,
    sizes=sizes,
    options=options,
    takes_scan=scanned.takes_scan(loss_fn),
  )
  chosen = steps.step if options.model_state is None else steps.step_with_state
  # It has the attributes of jax.jit's.
  made: Any = JittedStep(chosen, donate=donate, mesh=mesh, axes=others)
  return made
