"""Selects the elements of largest magnitude of a row, without sorting them all."""

from gradcomp._src.kernels.selection.reference import COPIED as COPIED
from gradcomp._src.kernels.selection.reference import RowView as RowView
from gradcomp._src.kernels.selection.search import select as select
