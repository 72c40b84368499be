"""Figures of `gradcomp.telemetry.inspect`; they need ``gradcomp[plots]``.

Each function returns a ``matplotlib.figure.Figure``, which ``savefig`` writes and a
notebook shows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gradcomp._src.telemetry.inspect import Inspection

if TYPE_CHECKING:
  from matplotlib.figure import Figure

__all__ = ["curves", "errors", "exponents"]


def exponents(inspection: Inspection) -> "Figure":
  """Draws the distribution of the gradient's exponents, of all leaves and of each.

  The upper part is figure 1 of Han et al., and the lower one figure 2. Zeros, infinity
  and NaN are in the text only.

  Args:
    inspection: one step, with one value for each number.

  Returns:
    A figure of matplotlib.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: the inspection holds those of several workers or steps.

  Example:
    >>> tx = gradcomp.qsgd(bits=4)
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
    >>> figure = exponents(gradcomp.telemetry.inspect(tx, grads, tx.init(grads)))
    >>> [ax.get_xlabel() for ax in figure.axes[1:2]]
    ['exponent']

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, figures 1 and 2
  """
  total = _host([inspection])[0]
  table = np.stack([x.exponents for x in total.leaves.values()] or [np.zeros(256)])
  drawn = np.r_[table, total.total.exponents[None]][:, 1:-1]
  seen = np.flatnonzero(np.nan_to_num(drawn).sum(axis=0))
  first, last = (seen[0], seen[-1]) if seen.size else (0, 0)
  x = np.arange(first, last + 1) + 1 - 127  # the bias of float32's exponents
  rows = _height(len(table))
  figure = _figure(8, 3.2 + rows)
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, rows])
  above.bar(x, 100 * drawn[-1, first : last + 1], width=0.9, color="#4878a8")
  zeros, bad = (float(total.total.exponents[i]) for i in (0, -1))
  above.set_title(f"all leaves; zeros: {zeros:.2%}, not finite: {bad:.2%}")
  above.set_ylabel("% of elements")
  above.grid(axis="y", alpha=0.3)
  shown = 100 * drawn[:-1, first : last + 1]
  shown = np.where(shown > 0, shown, np.nan)
  extent = (x[0] - 0.5, x[-1] + 0.5, len(table) - 0.5, -0.5)
  drawing = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
  image = below.imshow(shown, extent=extent, **drawing)
  below.set_yticks(range(len(total.leaves)), list(total.leaves), fontsize="small")
  below.set_xlabel("exponent")
  figure.colorbar(image, ax=below, label="% of the leaf's")
  return figure


def errors(inspection: Inspection) -> "Figure":
  """Draws the relative error and the cosine of each leaf.

  Args:
    inspection: as for :func:`exponents`.

  Returns:
    A figure of matplotlib.

  Raises:
    ImportError, ValueError: as for :func:`exponents`.

  Example:
    >>> tx = gradcomp.qsgd(bits=4)
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
    >>> figure = errors(gradcomp.telemetry.inspect(tx, grads, tx.init(grads)))
    >>> [ax.get_xlabel() for ax in figure.axes]
    ['relative error of what was sent', 'cosine to the true mean']
  """
  (found,) = _host([inspection])
  names = list(found.leaves)
  places = np.arange(len(names))
  figure = _figure(9, 1.2 + _height(len(names)))
  columns = (
    ("relative_error", "relative error of what was sent", "#c06050"),
    ("cosine", "cosine to the true mean", "#4878a8"),
  )
  axes = figure.subplots(1, 2, sharey=True)
  for ax, (field, label, color) in zip(axes, columns, strict=True):
    values = [getattr(metrics, field) for metrics in found.leaves.values()]
    ax.barh(places, values, color=color, height=0.8)
    whole = float(getattr(found.total, field))
    ax.axvline(whole, color="black", linewidth=1, linestyle="--")
    ax.set_title(f"all leaves: {whole:.4g}", fontsize="medium")
    ax.set_xlabel(label)
    ax.grid(axis="x", alpha=0.3)
  figure.axes[0].set_yticks(places, names, fontsize="small")
  figure.axes[0].set_ylim(len(names) - 0.5, -0.5)
  return figure


def curves(inspections: Sequence[Inspection], steps: Sequence[int]) -> "Figure":
  """Draws errors, norms and shares of all leaves together over the steps.

  Args:
    inspections: one for each step.
    steps: the numbers of the steps.

  Returns:
    A figure of matplotlib.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: as :func:`exponents`; or there are no inspections, or not as many as
      steps.

  Example:
    >>> tx = gradcomp.qsgd(bits=4)
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
    >>> found = gradcomp.telemetry.inspect(tx, grads, tx.init(grads))
    >>> [ax.get_title() for ax in curves([found, found], steps=[0, 50]).axes]
    ['error', 'norms', 'shares', 'levels in a bucket']
  """
  if not inspections or len(inspections) != len(steps):
    raise ValueError(
      "`steps` must have a number for each inspection, of which there is one or more, "
      f"got {len(steps)} steps and {len(inspections)} inspections."
    )
  totals = [x.total for x in _host(inspections)]
  figure = _figure(10, 6.5)
  panels = (
    ("error", ("relative_error", "cosine"), "linear"),
    ("norms", ("gradient_norm", "residual_norm", "owner_residual_norm"), "log"),
    ("shares", ("zeros", "saturation", "union_density"), "linear"),
    ("levels in a bucket", ("levels",), "linear"),
  )
  axes = figure.subplots(2, 2, sharex=True).flat
  for ax, (title, fields, scale) in zip(axes, panels, strict=True):
    for field in fields:
      values = np.array([getattr(x, field) for x in totals])
      if scale == "log" and not np.any(values > 0):
        continue  # nothing is kept
      ax.plot(steps, values, marker=".", label=field.replace("_", " "))
    ax.set(title=title, yscale=scale)
    ax.grid(alpha=0.3)
    if len(fields) > 1:
      ax.legend()
  for ax in figure.axes[2:]:
    ax.set_xlabel("step")
  return figure


def _host(inspections: Sequence[Inspection]) -> list[Any]:
  """Returns inspections as NumPy arrays; ValueError for one of several workers."""
  found: list[Any] = jax.device_get(list(inspections))
  for one in found:
    if np.ndim(one.total.cosine):
      raise ValueError(
        "`inspection` must hold one value for each number, got arrays of "
        f"{np.shape(one.total.cosine)}; take those of one worker, by "
        "jax.tree.map(lambda x: x[0], inspection)."
      )
  return found


def _figure(width: float, height: float) -> "Figure":
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      "`gradcomp.telemetry.plots` needs matplotlib, which is not installed; "
      "pip install 'gradcomp[plots]'."
    ) from error
  return Figure(figsize=(width, height), layout="constrained")


def _height(leaves: int) -> float:
  """Returns the inches of the rows of some leaves."""
  return min(max(0.2 * leaves, 1.0), 30.0)
