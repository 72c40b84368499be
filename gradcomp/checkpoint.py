"""Specs, shapes, records and resharding of optimizer states."""

from gradcomp._src import public as _public
from gradcomp._src.checkpoint.records import check_record, record
from gradcomp._src.checkpoint.reshard import reshard_state
from gradcomp._src.checkpoint.shapes import state_shapes
from gradcomp._src.checkpoint.specs import init_state, state_specs

__all__ = [
  "check_record",
  "init_state",
  "record",
  "reshard_state",
  "state_shapes",
  "state_specs",
]

_public.publish(globals())
