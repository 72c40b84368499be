"""Lists the positions of set bits, one bit for each element."""

from gradcomp._src.kernels.compaction.reference import positions as positions
