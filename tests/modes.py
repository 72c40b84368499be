"""Runs N workers wherever a transformation runs: see `gradcomp._src.testing.modes`.

The tests look at residuals, and name the exchanges of groups.
"""

import gradcomp
from gradcomp._src.testing.modes import EXPLICIT as EXPLICIT
from gradcomp._src.testing.modes import MODES as MODES
from gradcomp._src.testing.modes import mapped as mapped
from gradcomp._src.testing.modes import mesh as mesh
from gradcomp._src.testing.modes import modes_for as modes_for
from gradcomp._src.testing.modes import run as run_with_state


def grouped(exchange, group_size=2):
  """The exchange by its short form; of groups of one axis, if it needs some."""
  if exchange == "hierarchical":
    return gradcomp.exchange.Hierarchical(group_size=group_size)
  return exchange


def run(mode, transformation, gradients):
  """The outputs, leaves ``[N, ...]``, and the residuals, ``[N, ...]`` or None."""
  outputs, residual, _ = run_all(mode, transformation, gradients)
  return outputs, residual


def run_all(mode, transformation, gradients):
  """Like :func:`run`, and the residuals of the second stage ``[N, share, tile]``."""
  outputs, state = run_with_state(mode, transformation, gradients)
  return outputs, state.residual, state.server_residual
