"""The numbers of gradcomp.telemetry.inspect_update, in NumPy."""

import numpy as np


def ratio(a, b):
  return 0.0 if b == 0 else a / b


def leaf(gradients, corrected, unsent, mean):
  """Sums over a leaf of N workers, ``[N, ...]``; ``mean`` is what all receive."""
  gradients, corrected, unsent, mean = map(
    np.float64, (gradients, corrected, unsent, mean)
  )
  workers, true = len(gradients), gradients.mean(axis=0)
  sums = {"gradient": gradients**2, "corrected": corrected**2, "unsent": unsent**2}
  sums |= {"zeros": corrected == unsent}
  own = {name: np.sum(x) / workers for name, x in sums.items()}
  of_all = {"mean": mean**2, "true": true**2, "product": mean * true}
  return own | {name: np.sum(x) for name, x in of_all.items()} | {"size": true.size}


def metrics(sums):
  """The metrics of a leaf from its sums, or of all from theirs."""
  total = {name: sum(one[name] for one in sums) for name in sums[0]}
  return {
    "gradient_norm": np.sqrt(total["gradient"]),
    "relative_error": np.sqrt(ratio(total["unsent"], total["corrected"])),
    "cosine": ratio(total["product"], np.sqrt(total["mean"] * total["true"])),
    "zeros": total["zeros"] / total["size"],
  }
