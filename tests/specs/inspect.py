"""The numbers of gradcomp.telemetry.inspect, in NumPy."""

import numpy as np


def ratio(a, b):
  return 0.0 if b == 0 else a / b


def leaf(gradients, corrected, unsent, mean):
  """Sums over a leaf of N workers, ``[N, ...]``; ``mean`` is what all receive."""
  gradients, corrected, unsent, mean = (
    np.asarray(x, np.float64) for x in (gradients, corrected, unsent, mean)
  )
  workers, true = len(gradients), gradients.mean(axis=0)
  return {
    "size": float(true.size),
    "gradient": np.sum(gradients**2) / workers,
    "corrected": np.sum(corrected**2) / workers,
    "unsent": np.sum(unsent**2) / workers,
    "mean": np.sum(mean**2),
    "true": np.sum(true**2),
    "product": np.sum(mean * true),
    "zeros": np.sum(corrected == unsent) / workers,
  }


def metrics(sums):
  """The metrics of a leaf from its sums, or of all from theirs."""
  total = {name: sum(one[name] for one in sums) for name in sums[0]}
  return {
    "gradient_norm": np.sqrt(total["gradient"]),
    "relative_error": np.sqrt(ratio(total["unsent"], total["corrected"])),
    "cosine": ratio(total["product"], np.sqrt(total["mean"] * total["true"])),
    "zeros": total["zeros"] / total["size"],
  }
