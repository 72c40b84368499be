"""The numbers of gradcomp.telemetry.inspect, in NumPy."""

import numpy as np

# Elements are below 8, so this is more than float32 rounds in a difference of two.
NOISE = 2e-6


def buckets(x, width):
  """The buckets of a leaf, of which zeros fill the last."""
  flat = np.ravel(x)
  return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def ratio(a, b):
  return 0.0 if b == 0 else a / b


def leaf(gradients, corrected, unsent, mean, width):
  """Sums over a leaf of N workers, ``[N, ...]``; ``mean`` is what all receive."""
  gradients, corrected, unsent, mean = (
    np.asarray(x, np.float64) for x in (gradients, corrected, unsent, mean)
  )
  workers = len(gradients)
  sent = corrected - unsent
  true = gradients.mean(axis=0)
  top = levels = spread = 0.0
  for i in range(workers):
    cut = buckets(sent[i], width)
    largest = np.abs(cut).max(axis=1, keepdims=True)
    top += np.sum((np.abs(cut) > largest - NOISE) & (largest > 0))
    whole = cut[: max(sent[i].size // width, 1)]
    whole = whole if sent[i].size >= width else whole[:, : sent[i].size]
    whole = whole[[len(whole) // 2]]
    levels += 1 + np.mean(np.sum(np.diff(np.sort(whole)) > NOISE, axis=1))
    spread += np.abs(gradients[i]).max() * np.abs(gradients[i]).sum()
  exponent = np.frexp(np.abs(gradients))[1] - 1 + 127
  exponent = np.where(gradients == 0, 0, exponent).ravel()
  return {
    "size": float(true.size),
    "gradient": np.sum(gradients**2) / workers,
    "corrected": np.sum(corrected**2) / workers,
    "unsent": np.sum(unsent**2) / workers,
    "mean": np.sum(mean**2),
    "true": np.sum(true**2),
    "product": np.sum(mean * true),
    "zeros": np.sum(sent == 0) / workers,
    "top": top / workers,
    "levels": levels / workers * true.size,
    "spread": spread / workers,
    "union": float(np.sum(mean != 0)),
    "exponents": np.bincount(exponent, minlength=256) / workers,
  }


def metrics(sums):
  """The metrics of a leaf from its sums, or of all from theirs."""
  total = {name: sum(one[name] for one in sums) for name in sums[0]}
  size = total["size"]
  return {
    "gradient_norm": np.sqrt(total["gradient"]),
    "relative_error": np.sqrt(ratio(total["unsent"], total["corrected"])),
    "cosine": ratio(total["product"], np.sqrt(total["mean"] * total["true"])),
    "zeros": total["zeros"] / size,
    "saturation": total["top"] / size,
    "levels": total["levels"] / size,
    "wen_bound": ratio(total["spread"], total["gradient"]),
    "union_density": total["union"] / size,
    "exponents": total["exponents"] / size,
  }
