"""Every payload in plain NumPy: each codec's module writes rows and reads them.

Written from docs/inside/wire-format.md and the papers, and from nothing in the library.
A codec's module has ``encode(x, *, ...)``, the rows of a leaf, and ``decode(rows, size,
*, ...)``, its values in the leaf's order. Both take the codec's fields by name. A
reader refuses, with ``ValueError``, what no encoder that follows the page could send.
"""
