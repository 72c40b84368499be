"""``make_train_step``: a data-parallel train step without plumbing."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Protocol, overload

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp._src.checks import flag, instance_of
from gradcomp._src.core.specs import check_stacked, state_specs
from gradcomp._src.core.state import steps_alone
from gradcomp._src.local_steps.rounds import numbers_of_all
from gradcomp._src.mesh import agreement, axes, closures, param_specs, place, types
from gradcomp._src.mesh.trees import combine, is_array, split
from gradcomp._src.report.explain import explain
from gradcomp._src.training import batches, loss_form, scanned, worker
from gradcomp._src.training.gradients import P, Params, check_trainable
from gradcomp._src.training.worker import Given, TrainOptions
from gradcomp._src.transforms.freeze import allow_frozen


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
      with param_specs.PLACED(param_specs.by_leaf(params, specs)):
        after, *rest = step(whole, *args, **kwargs)
      leaves, treedef = jax.tree.flatten(split(after)[0])
      places = [NamedSharding(mesh, spec) for spec in specs]
      leaves = lax.with_sharding_constraint(leaves, places)
      return jax.tree.unflatten(treedef, leaves), *rest

    trained.__name__ = step.__name__
    numbers, names = (0, 1) if donate else (), ("inspect", "kept")
    self._donate, self._axes = donate, axes
    self._jitted = jax.jit(trained, donate_argnums=numbers, static_argnames=names)
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
      leaves, treedef = jax.tree.flatten(rest)
      for path, leaf in jax.tree_util.tree_leaves_with_path(rest):
        if not isinstance(leaf, Hashable):
          raise TypeError(
            f"`params`{jax.tree_util.keystr(path)} must be an array, or a leaf that "
            f"can be hashed, like a function or a number, got {leaf!r}; make it a "
            "static field of its module."
          )
      static = tuple(leaves), treedef
      kwargs["others"] = arrays  # if there are none, a compiled step takes no such name
    specs = param_specs.specs_over(params, self._axes) if self._axes else None
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


def make_train_step(
  # With `...` in place of P, mypy refuses a lambda.
  loss_fn: Callable[Concatenate[Params, P], Any],
  optimizer: optax.GradientTransformation,
  *,
  axis_name: axes.AxisName | None,
  mesh: Mesh | None = None,
  donate: bool = True,
  options: TrainOptions = TrainOptions(),  # noqa: B008 - it is constant
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
  options = instance_of("options", TrainOptions, options)
  one_worker = worker.WorkerStep(
    optimizer=closures.optimizer_with_note(allow_frozen(optimizer)),
    studied=optimizer,
    axis_name=axis_name,
    options=options,
    takes_scan=scanned.takes_scan(loss_fn),
  )
  sizes: dict[str, int] = {}
  others: tuple[str, ...] = ()
  take_step: Callable[..., tuple[Any, ...]] = one_worker
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
    take_step = functools.partial(_on_mesh, one_worker, mesh)
  elif options.compare_every is not None:
    raise ValueError(
      "`compare_every` must be None with axis_name=None, because one device has no "
      f"copies to compare, got {options.compare_every}."
    )

  # Both name their arguments, for signatures and for errors about others.
  def step_with_state(  # noqa: PLR0913 - options of users, by keyword
    params: Any,
    opt_state: Any,
    state: Any,
    batch: Any,
    *extra: Any,
    rng: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> Any:
    flag("inspect", inspect)
    check_trainable("`params`", params)
    loss, (params,) = loss_form.of_trainable(loss_fn, [params], [0])
    worker.check_model_state(state, options, math.prod(sizes.values()))
    given = Given(params, opt_state, state, batch, extra, rng, extra_args)
    *result, metrics, own = take_step(loss, given, inspect=inspect)
    metrics |= own
    if options.report:
      shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
      sent = explain(optimizer, shapes, workers=sizes or 1).bytes_per_step
      metrics["bytes_sent"] = jnp.float32(sent)
    return *result, metrics

  def step(
    params: Any,
    opt_state: Any,
    batch: Any,
    *extra: Any,
    rng: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> Any:
    named: Any = {"rng": rng, "extra_args": extra_args, "inspect": inspect}
    found = step_with_state(params, opt_state, None, batch, *extra, **named)
    return *found[:2], found[3]

  chosen = step if options.model_state is None else step_with_state
  # It has the attributes of jax.jit's.
  made: Any = JittedStep(chosen, donate=donate, mesh=mesh, axes=others)
  return made


def _on_mesh(
  one_worker: worker.WorkerStep, mesh: Any, loss_fn: Any, given: Given, *, inspect: bool
) -> tuple[Any, ...]:
  """Takes a step on all workers, in a map over the mesh."""
  axis_name, options = one_worker.axis_name, one_worker.options
  assert axis_name is not None
  names = axes.axis_names(axis_name)
  workers = math.prod(mesh.shape[name] for name in names)
  cut, whole = PartitionSpec(axis_name), PartitionSpec()
  kept = cut if options.model_state == "local" else whole
  batches.check_shared(given.batch, workers)
  place.check_whole("params", given.params, axis_name)
  given = given._replace(
    batch=types.put(given.batch, mesh, axis_name, cut),
    model_state=types.put(given.model_state, mesh, axis_name, kept),
    opt_state=numbers_of_all(given.opt_state, mesh),
  )
  specs = state_specs(given.opt_state, axis_name=axis_name)
  check_stacked(given.opt_state, specs, given.params, workers)
  arrays, with_arrays = closures.arrays_of(loss_fn)
  # How many micro-batches there are decides nothing that is sent.
  told = vars(options) | {"axis_name": axis_name, "inspect": inspect}
  del told["accumulate"]
  trees = {x: getattr(given, x) for x in ("params", "opt_state", "model_state")}

  def local(arrays: list[Any], given: Given) -> tuple[Any, ...]:
    own_loss = closures.with_note(with_arrays(arrays), closures.OF_LOSS, mesh, names)
    return one_worker(own_loss, given, inspect=inspect)

  def stepped(check_vma: bool) -> tuple[Any, ...]:
    of_step = Given(whole, specs, kept, cut, whole, whole, whole)
    found = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(types.typed_specs(arrays, axis_name), of_step),
      out_specs=(whole, specs, kept, whole, cut),
      axis_names=set(names),
      check_vma=check_vma,
    )(arrays, given)
    # The loss has decided the form of these, which are averaged.
    trees["new_model_state"], trees["metrics"] = found[2], found[3] | found[4]
    return found

  with agreement.one_record(mesh, "gradcomp.make_train_step", told, trees) as parts:
    try:
      return stepped(True)
    except TypeError as error:
      # An optimizer of a worker's own may have branches of which one returns a
      # constant, as optax's reduce_on_plateau has. JAX takes them only unchecked.
      if not steps_alone(given.opt_state):
        raise
      first = error
    parts.clear()  # the second trace adds them again
    # An error of the loss is one of both traces, and is raised once.
    with contextlib.suppress(TypeError):
      return stepped(False)
    raise first
