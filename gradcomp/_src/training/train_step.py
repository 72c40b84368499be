"""``make_train_step``: a data-parallel train step without plumbing."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp._src.checkpoint.specs import check_stacked, state_specs
from gradcomp._src.checks import flag, instance_of
from gradcomp._src.core import agreement
from gradcomp._src.core.state import steps_alone
from gradcomp._src.local_steps.displacement import numbers_of_all
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.closures import (
  arrays_of,
  loss_with_note,
  optimizer_with_note,
)
from gradcomp._src.mesh.specs import restrict_spec
from gradcomp._src.mesh.types import is_explicit, typed_spec
from gradcomp._src.mesh.unsharded_params import check_whole_arrays
from gradcomp._src.report.explain import explain
from gradcomp._src.training.protocol import Params, TrainStep
from gradcomp._src.training.worker import (
  Given,
  Stepped,
  TrainOptions,
  WorkerStep,
  check_model_state,
)
from gradcomp._src.transforms.freeze import allow_frozen


class Donating:
  """A jitted train step that donates parameters and optimizer state, each buffer once.

  Some optimizers keep the arrays that they were given: ``optax.contrib.prodigy`` has
  the first parameters in its state. JAX cannot donate one buffer twice. It raises an
  error on one device, and ends the process on several. So the second occurrence is
  copied. All other attributes, like ``lower``, are those of the jitted function.
  """

  def __init__(self, step: Any):
    self._step = step

  def __call__(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, treedef = jax.tree.flatten(((params, opt_state), args, kwargs))
    donated = len(jax.tree.leaves((params, opt_state)))
    seen: set[int] = set()
    for i, x in enumerate(leaves):
      if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        if id(x) in seen:
          leaves[i] = jnp.copy(x)
        elif i < donated:
          seen.add(id(x))
    given, args, kwargs = jax.tree.unflatten(treedef, leaves)
    return self._step(*given, *args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._step, name)


P = ParamSpec("P")
_DEFAULTS = TrainOptions()


def make_train_step(
  # With `...` in place of P, mypy refuses a lambda.
  loss_fn: Callable[Concatenate[Params, P], Any],
  optimizer: optax.GradientTransformation,
  *,
  axis_name: AxisName | None,
  mesh: Mesh | None = None,
  donate: bool = True,
  options: TrainOptions = _DEFAULTS,
) -> TrainStep[Params]:
  """Makes a jitted data-parallel train step: gradients, exchange and update.

  Args:
    loss_fn: ``loss_fn(params, batch, *extra)`` returns the mean loss over ``batch``, or
      ``(loss, aux)``. With ``model_state`` it is ``loss_fn(params, model_state, batch,
      *extra)``, and returns ``(loss, model_state)`` or ``(loss, (model_state, aux))``.
      Under Explicit axes it must not close over arrays of the mesh, see
      :func:`value_and_grad`.
    optimizer: an optax transformation with gradcomp's in it, over the same axis. It may
      freeze parameters by ``optax.set_to_zero``, see
      :func:`gradcomp.wrappers.allow_frozen`.
    axis_name: the mesh axis that shards batches, or a tuple of axes; None for one
      device.
    mesh: the devices; by default the mesh of ``jax.set_mesh``. Its other axes stay as
      they are: parameters may be sharded over them.
    donate: whether parameters and optimizer state are updated in place. The arrays that
      were passed in are then gone. What is in both is copied first.
    options: the form of the loss, the model state, micro-batches, and what ``metrics``
      has: see :class:`TrainOptions`.

  Returns:
    A jitted :class:`TrainStep`, ``step(params, opt_state, batch, *extra) -> (params,
    opt_state, metrics)``, with the model state behind the optimizer's if there is one.
    :class:`TrainStep` says what it takes, and what ``metrics`` has.

  Raises:
    ValueError: the mesh does not have an axis, or an option is bad; when called, a
      batch cannot be split into equal parts, a state was made outside the mesh or for
      another number of workers, parameters are sharded over an Explicit axis of the
      batch, no exchange has averaged a parameter's gradient, or another process of the
      run traces another step, or none.
    TypeError: when called, a parameter, or something in a model state that is averaged,
      is no float; or the loss returns another form than the options say.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> step = make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
    >>> params = {"w": jnp.ones((4, 1))}
    >>> with jax.set_mesh(mesh):
    ...   opt_state = optimizer.init(params)
    >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((2, 4)))
    >>> metrics["loss"]
    Array(16., dtype=float32)
  """
  options = instance_of("options", TrainOptions, options)
  frozen = optimizer_with_note(allow_frozen(optimizer))
  one_worker = WorkerStep(
    optimizer=frozen, studied=optimizer, axis_name=axis_name, options=options
  )
  workers: Any = 1
  if axis_name is not None:
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    workers = _sizes(mesh, axis_name)
  elif options.compare_every is not None:
    raise ValueError(
      "`compare_every` must be None with axis_name=None, where one device has nothing "
      f"to compare itself with, got {options.compare_every}."
    )

  def whole_step(given: Given, inspect: bool) -> tuple[Any, ...]:
    flag("inspect", inspect)
    if axis_name is None:
      check_model_state(given.model_state, options.model_state, options.accumulate, 1)
      *result, metrics, own = one_worker(loss_fn, given, inspect=inspect)
    else:
      *result, metrics, own = _on_mesh(
        one_worker, loss_fn, mesh, given, inspect=inspect
      )
    metrics |= own
    if options.report:
      like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
      shapes = jax.tree.map(like, given.params)
      sent = explain(optimizer, shapes, workers=workers).bytes_per_step
      metrics["bytes_sent"] = jnp.float32(sent)
    return *result, metrics

  # Both name the keywords, for signatures and for errors about others.
  def step(
    params: Any,
    opt_state: Any,
    batch: Any,
    *extra: Any,
    rng: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    inspect: bool = False,
  ) -> Any:
    more = dict(extra_args or {})
    given = Given(params, opt_state, None, batch, extra, rng, more)
    params, opt_state, _, metrics = whole_step(given, inspect)
    return params, opt_state, metrics

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
    more = dict(extra_args or {})
    return whole_step(Given(params, opt_state, state, batch, extra, rng, more), inspect)

  chosen: Any = step if options.model_state is None else step_with_state
  if not donate:
    return jax.jit(chosen, static_argnames="inspect")
  jitted = jax.jit(chosen, donate_argnums=(0, 1), static_argnames="inspect")
  donating: Any = Donating(jitted)  # which has the attributes of ``jitted``, too
  return donating


def _sizes(mesh: Mesh, axis_name: AxisName) -> dict[str, int]:
  """Returns the sizes of the axes by name; ValueError if the mesh lacks one."""
  names = axis_names(axis_name)
  if not set(names).issubset(mesh.shape):
    raise ValueError(
      f"`axis_name` must be an axis of the mesh, got {axis_name!r} and a mesh with the "
      f"axes {mesh.axis_names}; pass mesh=, or call this under jax.set_mesh(mesh)."
    )
  return {name: mesh.shape[name] for name in names}


def _on_mesh(
  one_worker: WorkerStep, loss_fn: Any, mesh: Any, given: Given, *, inspect: bool
) -> Stepped:
  """Takes a step on all workers, in a map over the mesh."""
  axis_name, options = one_worker.axis_name, one_worker.options
  assert axis_name is not None
  names = axis_names(axis_name)
  workers = math.prod(_sizes(mesh, axis_name).values())
  cut, whole = PartitionSpec(axis_name), PartitionSpec()
  kept = cut if options.model_state == "local" else whole
  for path, leaf in jax.tree_util.tree_leaves_with_path(given.batch):
    if not leaf.shape or leaf.shape[0] % workers:
      raise ValueError(
        f"`batch`{jax.tree_util.keystr(path)} must have a first axis that {workers} "
        f"workers can share equally, got the shape {leaf.shape}."
      )
  check_model_state(given.model_state, options.model_state, options.accumulate, workers)
  check_whole_arrays("params", given.params, axis_name)
  if is_explicit(mesh, axis_name):
    given = given._replace(
      batch=jax.reshard(given.batch, NamedSharding(mesh, cut)),
      model_state=jax.reshard(given.model_state, NamedSharding(mesh, kept)),
    )
  given = given._replace(opt_state=numbers_of_all(given.opt_state, mesh))
  specs = state_specs(given.opt_state, axis_name=axis_name)
  check_stacked(given.opt_state, specs, given.params, workers)
  arrays, with_arrays = arrays_of(loss_fn)

  def local(arrays: list[Any], given: Given) -> Stepped:
    own_loss = loss_with_note(with_arrays(arrays), mesh, names)
    return one_worker(own_loss, given, inspect=inspect)

  def mapped(check_vma: bool) -> Stepped:
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(
        [restrict_spec(typed_spec(x), names) for x in arrays],
        Given(whole, specs, kept, cut, whole, whole, whole),  # type: ignore[arg-type]
      ),
      out_specs=Stepped(whole, specs, kept, whole, cut),  # type: ignore[arg-type]
      axis_names=set(names),
      check_vma=check_vma,
    )(arrays, given)

  # What decides what is sent; how many micro-batches there are does not.
  names_sent = ("has_aux", "model_state", "report", "compare_every")
  told = {name: getattr(options, name) for name in names_sent}
  with agreement.one_record(
    mesh,
    "gradcomp.make_train_step",
    {"axis_name": axis_name} | told | {"inspect": inspect},
    params=given.params,
    opt_state=given.opt_state,
    model_state=given.model_state,
  ) as parts:
    try:
      return mapped(True)
    except TypeError as error:
      # An optimizer of a worker's own may have branches of which one returns a
      # constant, as optax's reduce_on_plateau has. JAX takes them only unchecked.
      if not steps_alone(given.opt_state):
        raise
      first = error
    parts.clear()  # the second trace adds them again
    # An error of the loss is one of both traces, and is raised once.
    with contextlib.suppress(TypeError):
      return mapped(False)
    raise first
