"""Records and shapes of optimizer states, and their way onto a mesh."""

from gradcomp._src.checkpoint.placement import put_on_mesh
from gradcomp._src.checkpoint.records import check_record, make_record
from gradcomp._src.checkpoint.shapes import state_shapes

__all__ = ["check_record", "make_record", "put_on_mesh", "state_shapes"]
