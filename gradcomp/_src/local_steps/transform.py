"""``local_steps``: several steps of each worker between two exchanges."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradcomp._src.bibliography import DOUILLARD_2023, DOUILLARD_2025, Citation, cites
from gradcomp._src.checks import instance_of, one_tree, step_count
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import agreement
from gradcomp._src.core.inputs import not_differentiated
from gradcomp._src.core.state import (
  FragmentState,
  LocalStepsState,
  OwnSteps,
  check_type,
  is_own_steps,
)
from gradcomp._src.core.transform import compress
from gradcomp._src.local_steps.displacement import (
  first_own,
  numbers_of_all,
  own_params,
  stored,
  wide,
)
from gradcomp._src.local_steps.options import (
  LocalOptions,
  check_floats,
  checked_optimizer,
  exchange_of_rounds,
  feedback_of,
  up_to,
)
from gradcomp._src.local_steps.rounds import (
  Fragment,
  LocalRound,
  fragment_sizes,
  join_fragments,
  select_fragment,
  split_fragments,
)
from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size, require_size
from gradcomp._src.mesh.reduction import reduction
from gradcomp._src.mesh.shard_maps import per_device
from gradcomp._src.mesh.types import mesh_of, unreduced_axes
from gradcomp._src.mesh.unsharded_params import check_whole_params

Params = TypeVar("Params")
_DEFAULTS = LocalOptions()


def local_params(params: Params, opt_state: Any) -> Params:
  """Returns this worker's local parameters: the shared ones plus its displacement.

  Compute gradients at these if :func:`gradcomp.local.local_steps` is in the optimizer.
  They differ between workers, and are typed so. Without it they are ``params``. With
  local steps inside of others, both displacements are added.

  Args:
    params: the parameters that all workers share.
    opt_state: the state of the optimizer, inside the map: of one worker.

  Returns:
    A tree like ``params``.

  Raises:
    ValueError: the state is that of all workers together.

  Example:
    >>> local_params(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)))
    Array([1., 1.], dtype=float32)
  """
  is_hole = lambda x: isinstance(x, optax.MaskedNode)
  for node in jax.tree.leaves(opt_state, is_leaf=is_own_steps):
    if is_own_steps(node):
      params = jax.tree.map(
        lambda moved, x: x if is_hole(moved) else own_params(x, moved),
        node.moved,
        params,
        is_leaf=is_hole,
      )
      params = local_params(params, node.inner_state)
  return params


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  axis_name: AxisName,
  every: int,
  codec: LeafCodec,
  options: LocalOptions = _DEFAULTS,
) -> optax.GradientTransformationExtraArgs:
  r"""Runs ``inner`` on each worker, and exchanges displacements in every H-th step.

  It is for links that are a hundred times too slow for an exchange in each step. It
  takes the place of an optimizer. All workers share the parameters :math:`p`, the
  anchor. Worker :math:`i` trains parameters of its own, :math:`p + d_i`, at which its
  gradients are computed: see :func:`local_params`, and
  :func:`gradcomp.make_train_step`, which calls it. In each step

  .. math:: d_i \leftarrow d_i + \mathrm{inner}(g_i, p + d_i)

  and in every H-th, with its residual :math:`e_i`,

  .. math::
     D = \tfrac{1}{N} \sum_i Q(e_i - d_i), \qquad e_i \leftarrow \beta (e_i - d_i -
     Q(e_i - d_i)), \qquad p \leftarrow p + \mathrm{outer}(D, p), \qquad d_i
     \leftarrow 0

  The updates are zeros, but for those of ``outer``, which are equal on all workers. So
  all workers have the same parameters after every step, to the bit: evaluate and save
  these. Only :math:`d_i`, the state of ``inner`` and the residual differ between
  workers; they are in the state. Nothing is sent in other steps. It is one program,
  with the exchange in a branch.

  - DiLoCo: ``inner=optax.adamw(...)``, ``codec=Dense()``,
    ``outer=optax.sgd(0.7, 0.9, nesterov=True)``.
  - SparseLoCo: a sparse codec, ``outer=optax.sgd(1.0)``, ``feedback=
    ErrorFeedback(residual_decay=0.95)``.
  - MuLoCo: ``inner=optax.contrib.muon(...)``, and 2 bits, rounded to the nearest level.
  - Streaming DiLoCo: ``fragments``, ``delay``, ``mixing=0.5`` and ``FloatCast`` of 3
    and 0 bits. Fragment k of P is exchanged in step :math:`kH/P` of a round, and the
    result is applied :math:`\tau` steps later. With :math:`p'` after that,
    :math:`d_i \leftarrow (1 - m)(p + d_i - p')`, so that workers keep a part of their
    steps meanwhile.

  A gradient that is not finite makes an element of :math:`d_i` NaN. The next exchange
  makes its bucket of the parameters NaN on all workers, and ``outer`` keeps it, too, if
  it has momentum; residuals do not. ``inner=optax.apply_if_finite(inner, 5)`` drops
  such a step on the worker that has it, which needs no message. Do not put
  :func:`gradcomp.skip_nonfinite` around this: it sends a byte in every step.

  ``inner`` and ``outer`` see whole leaves. Further arguments of ``update`` go to
  ``inner``; they should be the worker's own, like its loss as ``value``. ``outer`` gets
  the mean of the workers' ``value`` in float32, where it takes such arguments, and
  :math:`D` as ``grad``. ``inner`` may itself hold an exchange over
  another axis, which then joins the workers of an island in every step.

  Args:
    inner: the optimizer of each worker, with its state.
    outer: the optimizer of the parameters, which takes D in float32 as their gradient.
      Of fragments, each has a state of its own.
    axis_name: the axis of the workers, or a tuple of axes.
    every: H, the number of steps in a round.
    codec: of the differences.
    options: of the exchange, its feedback, fragments and delay.

  Returns:
    A gradient transformation; its state is a :class:`gradcomp.state.LocalStepsState`.
    Call ``init`` inside the map, or under ``jax.set_mesh(mesh)``, as for
    :func:`gradcomp.compress`.

  Raises:
    ValueError: an option is bad, or the codec does not allow it; in ``init``, the
      number of workers is unknown, or there are fewer leaves than fragments; in
      ``update``, there are no parameters, they or the state are not those of a worker,
      or gradients are already reduced.
    TypeError: ``inner``, ``outer``, ``codec`` or ``options`` is not one; or a parameter
      or a gradient is no real float.

  Example:
    >>> tx = local_steps(
    ...   optax.sgd(0.5), optax.sgd(1.0), axis_name="data", every=2,
    ...   codec=gradcomp.codecs.Dense())
    >>> def worker(target):
    ...   params = jnp.float32(0.0)
    ...   state = tx.init(params)
    ...   for _ in range(2):
    ...     grad = local_params(params, state) - target
    ...     update, state = tx.update(grad, state, params)
    ...     params = optax.apply_updates(params, update)
    ...   return params
    >>> jax.vmap(worker, axis_name="data")(jnp.array([0.0, 4.0]))
    Array([1.5, 1.5], dtype=float32)

  References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, algorithm 1;
    Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025,
    section 2; Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025;
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
  """
  every = step_count("every", every)
  options = instance_of("options", LocalOptions, options)
  fragments = up_to("fragments", 1, every, options.fragments)
  delay = up_to("delay", 0, every - 1, options.delay)
  mixing = float(options.mixing)
  names = axis_names(axis_name)
  axes = names if len(names) > 1 else names[0]
  compressed = compress(
    codec,
    axis_name=axes,
    exchange=exchange_of_rounds(options.exchange, options.merge, codec),
    feedback=feedback_of(options.feedback, codec),
    min_leaf_size=options.min_leaf_size,
    message_bytes=options.message_bytes,
    key=options.key,
    dither=options.dither,
  )
  takes_value = isinstance(outer, optax.GradientTransformationExtraArgs)
  inner = checked_optimizer("inner", inner)
  outer = checked_optimizer("outer", outer)
  papers = [Citation(DOUILLARD_2023, "Differences may be compressed, with feedback.")]
  if fragments > 1 or delay:
    why = "Fragments are consecutive leaves, of about as many elements each."
    papers.append(Citation(DOUILLARD_2025, why))

  def init_fn(params: Any) -> LocalStepsState:
    one_tree("local_steps", params)
    check_floats("params", params)

    def first(fragment: Fragment) -> FragmentState:
      leaves = select_fragment(params, fragment)
      zeros = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), leaves)
      exchange = compressed.init(leaves)
      outer_state = outer.init(jax.tree.map(wide, leaves))
      return FragmentState(exchange, outer_state, zeros if delay else None)

    return LocalStepsState(
      jnp.zeros([], jnp.int32),
      first_own(params, names, inner.init),
      tuple(map(first, split_fragments(fragment_sizes(params), fragments, every))),
    )

  @cites(*papers)
  def update_fn(
    updates: Any, state: LocalStepsState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, LocalStepsState]:
    _check_given(state, params, fragments)
    check_floats("updates", updates)
    updates = not_differentiated(updates)
    check_whole_params(params, axes)
    if bound_size(axes) is None:
      state = numbers_of_all(state, mesh_of(updates))
    across = reduction(updates, axes, local=False)
    told = dict(every=every, fragments=fragments, delay=delay, mixing=mixing)
    agreement.require_agreement(
      "gradcomp.local.local_steps",
      told,
      updates,
      axes,
      inner_state=state.own,
      outer_state=[fragment.outer_state for fragment in state.fragments],
    )
    addends = [
      name
      for name, x in extra_args.items()
      if any(map(unreduced_axes, jax.tree.leaves(x)))
    ]

    def step(grads: Any, state: Any, params: Any, extra_args: Any) -> Any:
      round_ = LocalRound(inner, outer, compressed, axes, every, delay, mixing)
      value = extra_args.get("value") if takes_value else None
      whole = lambda tree: jax.tree.map(
        lambda g: g * jnp.asarray(require_size(axes), g.dtype), tree
      )
      if across.is_sum:
        grads = whole(grads)
      own_args = extra_args | {name: whole(extra_args[name]) for name in addends}
      moved, inner_state = round_.own_step(grads, state.own, params, own_args)
      number = optax.safe_increment(state.count)
      found = []
      for fragment, kept in zip(
        split_fragments(fragment_sizes(params), fragments, every),
        state.fragments,
        strict=True,
      ):
        away, shared = (select_fragment(tree, fragment) for tree in (moved, params))
        found.append(round_.shared_step(fragment, number, kept, away, shared, value))
      new, moved, kept = zip(*found, strict=True)
      own = OwnSteps({names: stored((join_fragments(moved, params), inner_state))})
      return join_fragments(new, params), LocalStepsState(number, own, kept)

    given = params, extra_args
    return per_device(step, updates, state, axes, keeps_addends=False, given=given)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_given(state: Any, params: Any, fragments: int) -> None:
  """Raises an error for missing parameters, or another transformation's state."""
  check_type(state, LocalStepsState)
  if len(state.fragments) != fragments:
    raise ValueError(
      f"`state` must be made for {fragments} fragments, got {len(state.fragments)}; "
      "make it by this transformation."
    )
  if params is None:
    raise ValueError(
      "`params` must be given to update, because workers move away from them, got "
      "None; call optimizer.update(grads, state, params)."
    )
