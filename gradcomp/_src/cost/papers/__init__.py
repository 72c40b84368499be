"""Performance models of the papers, with their printed numbers."""

from gradcomp._src.cost.papers import dettmers, fang, grubic, han, wen

__all__ = ["dettmers", "fang", "grubic", "han", "wen"]
