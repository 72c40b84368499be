"""The exchanges, as docs/inside/wire-format.md defines them."""

import numpy as np


def all_gather(values, count=None):
  """The mean that every worker computes, float32: workers in order, then times 1 / N.

  Args:
    values: float32[N, ...], what the payload of each worker decodes to.
    count: divide by this number instead of N.
  """
  values = np.asarray(values, np.float32)
  total = values[0]
  with np.errstate(over="ignore", invalid="ignore"):
    for value in values[1:]:
      total = total + value
    return total * (np.float32(1) / np.float32(count or len(values)))


def two_shot(values, recode=None):
  """What every worker ends with after `two_shot`, float32[R, tile].

  Args:
    values: float32[N, R, tile], the first-stage rows of each worker, decoded.
    recode: called as `recode(mean, owner)` with the mean of the share of a worker,
      float32[ceil(R / N), tile], and that worker's index; returns what its
      second-stage rows decode to. None sends the mean as it is (Dense, float32).
  """
  parts = _shares(values)
  means = [all_gather(parts[:, owner]) for owner in range(len(parts))]
  if recode is not None:
    means = [recode(mean, owner) for owner, mean in enumerate(means)]
  return np.concatenate(means)[: values[0].shape[0]]


def with_feedback(recode, residuals):
  """`recode` of the mean plus what the owner's last encoding lost.

  Args:
    recode: as in :func:`two_shot`.
    residuals: float32[N, ceil(R / N), tile]; each call replaces its owner's in place.
  """

  def corrected(mean, owner):
    total = mean + residuals[owner]
    sent = recode(total, owner)
    lost = total - sent
    residuals[owner] = np.where(np.isfinite(lost), lost, residuals[owner])
    return sent

  return corrected


def ring(values, recode):
  """What every worker ends with after `ring`, and what its encodings lost.

  Args:
    values: float32[N, R, tile], the rows of each worker, not encoded.
    recode: called as `recode(rows, worker, hop)`; returns what the rows that the worker
      sends in that hop decode to. Hop N - 1 is the one to all.

  Returns:
    float32[R, tile] and float32[N, R, tile].
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
  """What every worker ends with after `hierarchical`, and what its encodings lost.

  Args:
    values: float32[N, R, tile], the rows of each worker, not encoded.
    group_size: the workers of a group, which follow each other.
    encode_sum: called as `encode_sum(rows, worker)` with the sums of its group, of all
      shares that lie at its place in their groups; returns what it sends, decoded.
    encode_mean: as `recode` in :func:`two_shot`.

  Returns:
    float32[R, tile] and float32[N, R, tile].
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
  share = -(-rows // workers)
  padded = np.zeros((workers, share * workers, tile), np.float32)
  padded[:, :rows] = values
  return padded.reshape(workers, workers, share, tile)


def _rows(shares):
  """The shares of each worker one after the other: [N, rows, tile]."""
  return shares.reshape(len(shares), -1, shares.shape[-1])
