"""Plans the exchange of a model over links: which codec, which exchange, or neither."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gradcomp._src.checks import share_below_1
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.cost.link import Link
from gradcomp._src.cost.planner.candidates import CANDIDATES, Candidate, as_candidate
from gradcomp._src.cost.planner.choice import choose, dense_plan
from gradcomp._src.cost.planner.errors import BudgetName, Errors, checked_budget
from gradcomp._src.cost.planner.links import cluster_of, shares_memory, sizes_of
from gradcomp._src.cost.planner.model import Model, model_of
from gradcomp._src.cost.planner.result import Plan
from gradcomp._src.cost.planner.rows import Refusal, Setting
from gradcomp._src.cost.planner.speeds import Given, speeds_of
from gradcomp._src.cost.rules import at_least_0, count


def plan(
  params: Any,
  *,
  workers: int | tuple[int, int],
  link: Link | tuple[Link, Link] | Mesh,
  forward: float | None = None,
  backward: float | None = None,
  speeds: Given = None,
  gradients: Any = None,
  steps: int | None = None,
  budget: BudgetName | float = "paper",
  candidates: Sequence[Candidate | LeafCodec] | None = None,
  margin: float = 0.05,
) -> Plan:
  r"""Chooses codec and exchange for a model and a link, or says not to compress.

  It predicts the seconds of a step for every candidate with every exchange that the
  codec allows: ``forward + backward + exchange``, without overlap. Collectives and
  bytes are those of :func:`gradcomp.explain`, seconds those of :mod:`gradcomp.cost`. It
  takes the fastest within the error budget. Of those within 2 % it takes the smallest
  error, and then the simplest exchange. Where that gains less than ``margin`` of a
  plain mean's step, it takes the plain mean. Nothing is trained, so that accuracy is
  not measured.

  A codec loses :math:`\omega = E \lVert Q(g) - g \rVert^2 / \lVert g \rVert^2` of a
  gradient. The error of the mean that workers receive also depends on the exchange and
  on N: see ``mean_error.mean_error``. It is relative to a mean of independent
  gradients. Over N, it is relative to one of equal gradients. A biased codec must keep
  residuals, and those need :math:`\omega < 1`. A sparse one lets an element wait for
  ``1 / density`` steps, which may be a tenth of ``steps``. Its means are never encoded
  by owners, who would drop elements. Of the others these are allowed, with N workers:

  ================  ==================================================================
  ``budget``        candidates
  ================  ==================================================================
  ``"none"``        float32 alone
  ``"tight"``       unbiased ones with error / N <= 0.01, and omega <= 0.01 with
                    residuals
  ``"paper"``       those that the study trained to the end, and never found more than
                    0.5 points below float32; with an error of at most 1.25 times that
                    of its ``two_shot`` with 8 workers, or 0.01
  ``"aggressive"``  all
  a float           those with error / N up to that
  ================  ==================================================================

  More than eight leaves are joined to fewer for the comparison. The choice is always
  predicted with the leaves as they are.

  Args:
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: N; ``(hosts, chips)`` for two axes.
    link: the link of each worker; for two axes a pair, between hosts and inside them.
      A mesh is measured, see :meth:`gradcomp.cost.Link.measure`, if its devices do not
      share one memory.
    forward, backward: the seconds of the passes of a step, both or neither. Without
      them exchanges alone are compared.
    speeds: the speeds of codecs: CodecSpeeds by the names of candidates, one for all,
      a function from the codec of a leaf to its speeds, or ``"measure"``. By default
      those that the package has for the backend.
    gradients: gradients like the parameters, to measure errors on, which compiles each
      codec; normal numbers by default.
    steps: the steps of the training; without them sparse codecs below 1 % are refused.
    budget: the error that is allowed.
    candidates: candidates, or codecs, in place of
      :data:`gradcomp.cost.CANDIDATES`.
    margin: the part of a step that compression must gain.

  Returns:
    A :class:`gradcomp.cost.Plan`. Chain its ``transformation(axis_name)``.

  Raises:
    ValueError: an argument breaks its rule.
    TypeError: a parameter or a gradient is no array of floats.

  Example:
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6)
    >>> codecs = [gradcomp.cost.CANDIDATES[2]]  # QSGD-4
    >>> found = plan(params, workers=4, link=link, candidates=codecs)
    >>> print(found.verdict)
    compress: QSGD-4 two_shot 116.9 ms, dense 805.6 ms: 6.89 x
    >>> tx = optax.chain(found.transformation("data"), optax.adam(1e-3))
    >>> fast = gradcomp.cost.Link(latency=5e-6, bytes_per_second=100e9)
    >>> print(plan(params, workers=4, link=fast, candidates=codecs).verdict)
    do not: compression loses here: dense 1.0 ms, best QSGD-4 all_gather 14.5 ms;
      QSGD-4 two_shot would win below 48.8 Gbit/s

  References:
    Agarwal et al., `On the Utility of Gradient Compression in Distributed Training
    Systems <https://arxiv.org/abs/2103.00543>`_, 2022
  """
  errors = Errors(
    budget=checked_budget(budget),
    sizes=sizes_of(workers),
    steps=None if steps is None else count("steps", steps),
  )
  share_below_1("margin", margin)
  if (forward is None) != (backward is None):
    raise ValueError(
      "`backward` must be given with `forward`, and only then, got "
      f"forward={forward!r} and backward={backward!r}."
    )
  model = model_of(params)
  if gradients is not None:
    errors = errors._replace(gradients=_leaves(gradients, model))
  setting = Setting(
    model=model,
    workers=workers,
    cluster=cluster_of(workers, link),
    forward=0.0 if forward is None else at_least_0("forward", forward),
    backward=0.0 if backward is None else at_least_0("backward", backward),
  )
  given = _candidates(CANDIDATES if candidates is None else candidates)
  notes = [
    "Times are of the exchange alone: the passes of a step are unknown."
    if forward is None
    else "A step is forward, backward and exchange, without overlap.",
    "Error: of the mean, squared, over its square, by a formula from the loss of "
    + ("normal numbers" if gradients is None else "the gradients")
    + ". Accuracy is not measured.",
  ]
  if errors.workers == 1:
    alone = "one worker sends nothing"
  elif shares_memory(link):
    alone = "emulated devices share one memory, and no link is between them"
  else:
    speed_of, says = speeds_of(speeds)
    return choose(setting, given, errors, speed_of, margin, [*notes, says])
  refused = [Refusal(x.name, "", alone) for x in given]
  return dense_plan(setting.dense(), [], refused, f"do not: {alone}", notes)


def _candidates(given: Any) -> list[Candidate]:
  """Returns candidates; ValueError where one is neither that nor a codec."""
  if isinstance(given, str) or not isinstance(given, Sequence):
    raise ValueError(f"`candidates` must be a sequence of codecs, got {given!r}.")
  return [as_candidate(x) for x in given]


def _leaves(gradients: Any, model: Model) -> list[np.ndarray]:
  """Returns the leaves of gradients; ValueError unless they are like the model's."""
  like = model_of(gradients, "gradients")
  if like.treedef != model.treedef:
    raise ValueError(
      f"`gradients` must have the tree of `params`, {model.treedef}, got "
      f"{like.treedef}."
    )
  for path, a, b in zip(model.paths, model.leaves, like.leaves, strict=True):
    if a.shape != b.shape:
      raise ValueError(
        f"`gradients` must have the shapes of `params`, of {path} {a.shape}, got "
        f"{b.shape}."
      )
  return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(gradients)]
