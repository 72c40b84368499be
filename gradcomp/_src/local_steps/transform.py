"""``local_steps``: several steps of each worker between two exchanges."""

from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp
import optax

from gradcomp._src import checks, public
from gradcomp._src.codecs import dense, protocol
from gradcomp._src.core import border, transform
from gradcomp._src.core import state as states
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.exchange.auto import Auto, as_exchange
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.schedules import AllGather, Merge
from gradcomp._src.local_steps import rounds
from gradcomp._src.mesh import agreement, shard_maps, trees
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh.types import Place
from gradcomp._src.transforms.options import MessageOptions, recipe

Params = TypeVar("Params")


def local_params(params: Params, opt_state: Any) -> Params:
  """Returns this worker's local parameters: the shared ones plus its displacement.

  Compute gradients at these if :func:`gradcomp.local.local_steps` is in the optimizer.
  They differ between workers, and are typed so. Without it they are ``params``.

  Args:
    params: the parameters that all workers share.
    opt_state: the state of the optimizer on one worker, inside the map.

  Raises:
    ValueError: the state belongs to all workers together, or to
      ``optax.contrib.schedule_free`` around local steps.

  Example:
    >>> local_params(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)))
    Array([1., 1.], dtype=float32)
  """
  averages = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)
  for node in filter(averages, jax.tree.leaves(opt_state, is_leaf=averages)):
    if states.steps_alone(node):
      raise ValueError(
        "`opt_state` must have no optax.contrib.schedule_free around local steps, "
        "because it averages parameters in each step, and they move once a round, got "
        "a ScheduleFreeState with such steps inside; give schedule_free to "
        "gradcomp.local.local_steps as `outer` or `inner`."
      )
  is_hole = lambda x: isinstance(x, optax.MaskedNode)
  add = lambda moved, x: x if is_hole(moved) else rounds.own_params(x, moved)
  arrays, others = trees.split(params)
  own = trees.unboxed(arrays)
  for node in jax.tree.leaves(opt_state, is_leaf=states.is_own_steps):
    if states.is_own_steps(node):
      own = jax.tree.map(add, trees.unboxed(node.moved), own, is_leaf=is_hole)
      own = local_params(own, node.inner_state)
  return trees.combine(trees.boxed_like(arrays, own), others)


@recipe()
def local_steps(  # noqa: PLR0913 - options of users, by keyword
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  axis_name: mesh_axes.AxisName,
  every: int,
  codec: protocol.LeafCodec,
  fragments: int = 1,
  delay: int = 0,
  mixing: float = 1.0,
  merge: Merge = "mean",
  start: int = 0,
  feedback: FeedbackName | Feedback | None = "error",
  **options: Unpack[MessageOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Runs ``inner`` on each worker, and exchanges displacements in every H-th step.

  It is for links that are a hundred times too slow for an exchange in each step, and
  replaces an optimizer. All workers share the parameters :math:`p`. Worker :math:`i`
  trains its own, :math:`p + d_i`, at which its gradients are computed: see
  :func:`local_params`, which :func:`gradcomp.make_train_step` calls. In each step

  .. math:: d_i \leftarrow d_i + \mathrm{inner}(g_i, p + d_i)

  and in every H-th, with its residual :math:`e_i`,

  .. math::
     D = \tfrac{1}{N} \sum_i Q(e_i - d_i), \qquad e_i \leftarrow \beta (e_i - d_i -
     Q(e_i - d_i)), \qquad p \leftarrow p + \mathrm{outer}(D, p), \qquad d_i
     \leftarrow 0

  Updates are zeros, except those of ``outer``, which are equal on all workers. So all
  workers have bit-identical parameters after every step: evaluate and save these. Only
  :math:`d_i`, the state of ``inner`` and the residual differ between workers.

  docs/methods/local-steps.md has the settings of DiLoCo, SparseLoCo, MuLoCo, post-local
  SGD and Streaming DiLoCo. With ``start=T`` the first T steps are data-parallel: in
  each the parameters move to the workers' mean, dense and without ``outer``. With
  ``fragments`` and ``delay``, fragment k of P is exchanged in step :math:`kH/P` of a
  round, and applied :math:`\tau` steps later. With :math:`p'` after that,
  :math:`d_i \leftarrow (1 - m)(p + d_i - p')`: workers keep a part of their steps
  meanwhile.

  A NaN or an infinity in a gradient makes an element of :math:`d_i` NaN, and the next
  exchange its bucket of the parameters on all workers, and a momentum of ``outer``.
  ``inner=optax.apply_if_finite(inner, 5)`` drops such a step on its worker, without the
  byte of :func:`gradcomp.skip_nonfinite` in every step.

  Further arguments of ``update`` go to ``inner``: pass the worker's own, like its loss
  as ``value``. ``outer``, if it takes such arguments, gets the mean of the workers'
  ``value`` in float32, and :math:`D` as ``grad``. ``inner`` may itself hold an exchange
  over another axis, which then joins the workers of an island in every step.

  Args:
    inner: the optimizer of each worker, with its state.
    outer: the optimizer of the parameters, which takes D in float32 as their gradient.
      Each fragment has its own state.
    axis_name: the axis of the workers, or a tuple of axes.
    every: H, the number of steps in a round.
    codec: the codec of the differences.
    fragments: P, from 1 to ``every``, the number of parts of about equal size, each of
      consecutive leaves, that are exchanged in different steps.
    delay: :math:`\tau`, the steps after which an exchange is applied, below ``every``.
    mixing: m, above 0 and at most 1. With 1, workers go on from the parameters, and
      drop their displacement of the ``delay``.
    merge: ``"mean"``, or ``"senders"``, which divides the sum of an element by the
      number of workers that sent it. Only sparse codecs allow that.
    start: T, the number of the first steps that are data-parallel.
    feedback: see :class:`gradcomp.CompressOptions`. ``"error"`` keeps no residual for
      an exact codec. ``gradcomp.ErrorFeedback(residual_decay=0.95)`` is
      :math:`\beta = 0.95`.

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
    section 2; Lin et al., `Don't Use Large Mini-Batches, Use Local SGD
    <https://arxiv.org/abs/1808.07217>`_, 2018, section 3; Sarfi et al., `SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_, 2025; Therien et al., `MuLoCo
    <https://arxiv.org/abs/2505.23725>`_, 2025
  """
  told = public.arguments(local_steps, locals())
  every = checks.step_count("every", every)
  fragments = _up_to("fragments", 1, every, fragments)
  delay = _up_to("delay", 0, every - 1, delay)
  mixing = checks.ABOVE_0.check("mixing", mixing)
  checks.one_of("merge", Merge, merge)
  start = checks.step_count("start", start, least=0)
  names = mesh_axes.axis_names(axis_name)
  axes = mesh_axes.as_axis_name(names)
  options["exchange"] = _exchange_of_rounds(told["exchange"], merge, codec)
  kept = rounds.feedback_of(feedback, codec)
  compressed = transform.compress(codec, axis_name=axes, feedback=kept, **options)
  plain = transform.compress(dense.Dense(), axis_name=axes)
  takes_value = isinstance(outer, optax.GradientTransformationExtraArgs)
  for name, tx in {"inner": inner, "outer": outer}.items():
    if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
      raise TypeError(
        f"`{name}` must be an optax.GradientTransformation, like optax.sgd(0.1), got "
        f"{tx!r}."
      )
  inner, outer = map(shard_maps.optimizer_with_note, (inner, outer))
  exchanges, lengths = (compressed, plain, axes), (every, start, fragments, delay)
  round_ = rounds.LocalRound(inner, outer, *exchanges, *lengths, mixing)

  def init_fn(params: Any) -> states.LocalStepsState:
    checks.one_tree("local_steps", params)
    _check_floats("params", params)

    def first(fragment: range) -> states.FragmentState:
      leaves = rounds.select_fragment(params, fragment)
      wide = jax.tree.map(rounds.wide, leaves)
      arriving = jax.tree.map(jnp.zeros_like, wide) if delay else None
      return states.FragmentState(compressed.init(leaves), outer.init(wide), arriving)

    own = rounds.first_own(params, names, inner.init)
    parts = map(first, rounds.split_fragments(params, fragments))
    return states.LocalStepsState(jnp.zeros([], jnp.int32), own, tuple(parts))

  streams = ("douillard2025streaming",) if fragments > 1 or delay else ()
  means = ("lin2018local",) if start else ()

  @public.cites("douillard2023diloco", *streams, *means)
  def core(
    across: Place, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
  ) -> tuple[Any, states.LocalStepsState]:
    states.check_type(state, states.LocalStepsState)
    if len(state.fragments) != fragments:
      raise ValueError(
        f"`state` must be made for {fragments} fragments, got {len(state.fragments)}; "
        "make it by this transformation."
      )
    if params is None:
      raise ValueError(
        "`params` must be given to update, because workers move from them, got None; "
        "call optimizer.update(grads, state, params)."
      )
    _check_floats("updates", updates)
    updates = border.not_differentiated(updates)
    agreement.require_agreement(
      "gradcomp.local.local_steps",
      told,
      updates,
      axes,
      inner_state=state.own,
      outer_state=[fragment.outer_state for fragment in state.fragments],
    )
    value = extra_args.get("value") if takes_value else None
    grads = across.own(updates)
    moved, inner_state = round_.own_step(grads, state.own, params, extra_args)
    count: Any = optax.safe_increment(state.count)
    number = count - start  # of the local step
    new, moved, kept = round_.all_share(number, state.fragments, moved, params, value)
    stored = rounds.stored((moved, inner_state))
    return new, states.LocalStepsState(count, states.OwnSteps({names: stored}), kept)

  filled = rounds.numbers_of_all
  return border.on_workers(init_fn, core, axes, reads=True, whole=True, filled=filled)


def _up_to(name: str, least: int, most: int, value: Any) -> int:
  """Returns an integer in a range; ValueError otherwise."""
  rule = f"a number, from {least} to {most}, which depends on `every`"
  return checks.static_integer(name, rule, value, least=least, most=most)


def _exchange_of_rounds(exchange: Any, merge: Any, codec: Any) -> Any:
  """Returns the exchange of displacements, which divides by the rule of ``merge``."""
  given = as_exchange(exchange)
  if isinstance(given, Exchange) and not given.sends:
    raise ValueError(
      "`exchange` must send, so that all workers have the same parameters, got "
      f'{exchange!r}; use exchange="auto", or `inner` alone to train without one.'
    )
  if merge == "mean":
    return exchange
  if protocol.is_codec(codec) and not codec.facts.drops:
    raise ValueError(
      f'`merge` must be "mean" for a codec that sends all elements, got "senders" and '
      f"{codec}; use a sparse one like gradcomp.codecs.TopK()."
    )
  if given not in (Auto(), AllGather(), AllGather(merge=merge)):
    raise ValueError(
      '`exchange` must be "auto" or "all_gather" with merge="senders", because others '
      f"do not count senders, got {exchange!r}."
    )
  return AllGather(merge=merge)


def _check_floats(name: str, tree: Any) -> None:
  """Raises TypeError for leaves that are not real floats."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"`{name}`{jax.tree_util.keystr(path)} must have a real float dtype, got "
        f"{dtype or leaf!r}; freeze what is not trained by "
        "optax.partition and optax.set_to_zero, and keep complex numbers as pairs."
      )
