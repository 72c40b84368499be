"""The exchanges, as docs/inside/wire-format.md defines them."""

import numpy as np


def all_gather(values, count=None):
  """The mean of decoded payloads [N, ...]: in order, then times 1 / N, or 1 / count."""
  values = np.asarray(values, np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    return sum(values[1:], values[0]) * (
      np.float32(1) / np.float32(count or len(values))
    )


def two_shot(values, recode=None):
  """What every worker ends with after `two_shot`, float32[R, tile].

  Values are the decoded rows of workers, float32[N, R, tile]. `recode(mean, owner)`
  is what an owner's share of the mean decodes to, float32[ceil(R / N), tile].
  """
  parts = _shares(values)
  means = [all_gather(parts[:, owner]) for owner in range(len(parts))]
  if recode is not None:
    means = [recode(mean, owner) for owner, mean in enumerate(means)]
  return np.concatenate(means)[: values[0].shape[0]]


def with_feedback(recode, residuals):
  """`recode` of the mean plus what the owner's last encoding lost: it is replaced."""

  def corrected(mean, owner):
    total = mean + residuals[owner]
    sent = recode(total, owner)
    lost = total - sent
    residuals[owner] = np.where(np.isfinite(lost), lost, residuals[owner])
    return sent

  return corrected


def ring(values, recode):
  """What all have after `ring`, [R, tile], and what each lost, [N, R, tile].

  Values are rows that are not encoded. `recode(rows, worker, hop)` is what those that a
  worker sends in a hop decode to; hop N - 1 is the one to all.
  """
  parts = _shares(values)
  workers, rows = len(parts), values[0].shape[0]
  lost, result = np.zeros_like(parts), np.zeros_like(parts[0])
  for share in range(workers):
    sent = np.float32(-0.0)  # which changes nothing that it is added to, not even zeros
    for hop in range(workers):
      worker = (share + 1 + hop) % workers
      total = sent + parts[worker, share]
      sent = recode(total, worker, hop)
      lost[worker, share] = total - sent
    result[share] = sent * (np.float32(1) / np.float32(workers))
  return _rows(result[None])[0, :rows], _rows(lost)[:, :rows]


def hierarchical(values, group_size, encode_sum, encode_mean):
  """As :func:`ring`, of groups of workers that follow each other.

  `encode_sum(rows, worker)` is given the sums of its group, of all shares that lie at
  its place in their groups; `encode_mean` is `recode` of :func:`two_shot`.
  """
  parts = _shares(values)
  workers, rows = len(parts), values[0].shape[0]
  lost, result = np.zeros_like(parts), np.zeros_like(parts[0])
  for place in range(group_size):
    column, sent = slice(place, None, group_size), []
    for first in range(0, workers, group_size):
      group = parts[first : first + group_size, column]
      total = all_gather(group, count=1)
      flat = encode_sum(total.reshape(-1, total.shape[2]), first + place)
      sent.append(flat.reshape(total.shape))
      lost[first + place, column] = total - sent[-1]
    for number, owner in enumerate(range(place, workers, group_size)):
      mean = all_gather([x[number] for x in sent], workers)
      result[owner] = encode_mean(mean, owner)
  return _rows(result[None])[0, :rows], _rows(lost)[:, :rows]


def _shares(values):
  """float32[N, R, tile] as [N, N, ceil(R / N), tile], filled with zeros."""
  workers, rows, tile = np.shape(values)
  padded = np.pad(np.float32(values), ((0, 0), (0, -rows % workers), (0, 0)))
  return padded.reshape(workers, workers, -(-rows // workers), tile)


def _rows(shares):
  """The shares of each worker one after the other: [N, rows, tile]."""
  return shares.reshape(len(shares), -1, shares.shape[-1])
