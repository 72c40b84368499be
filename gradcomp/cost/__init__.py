"""Predicts what an exchange costs, in seconds and bytes. It needs no JAX."""

from gradcomp.cost._link import Link as Link
from gradcomp.cost._link import all_gather_seconds as all_gather_seconds
from gradcomp.cost._link import all_reduce_seconds as all_reduce_seconds
from gradcomp.cost._link import all_to_all_seconds as all_to_all_seconds
from gradcomp.cost._link import ppermute_seconds as ppermute_seconds
from gradcomp.cost._link import reduce_scatter_seconds as reduce_scatter_seconds
from gradcomp.cost._link import tree_seconds as tree_seconds
