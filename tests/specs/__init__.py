"""Every payload in plain NumPy: each codec's module writes rows and reads them.

Written from docs/inside/wire-format.md and the papers, and from nothing in the library.
A codec's module has ``encode(x, *, ...)``, the rows of a leaf, and ``decode(rows, size,
*, ...)``, its values, float32[size]. Both take the codec's fields by name. A reader
refuses, with ``ValueError``, what no encoder that follows the page could send.

Arguments are the same everywhere:

* x: the leaf, of any shape. size: its elements. rows: the payload, uint32[rows, words].
* bits: those of a code. bucket_size: the elements that share a scale, or the words of a
  row; None is one scale a tensor, in rows of 512 words.
* key: two 32-bit words for stochastic rounding, and perhaps a mask behind them.
* scales: float32[tiles, P], or [tiles, 1] without buckets. A module that makes them has
  ``scales_of``. A caller may give those of the library, whose last bits depend on the
  order of additions, or those that all workers share.
* scale_per_row: without buckets one scale for each row, as in later stages.
* inline: whether the scales follow the words; not where workers share them.
* P is the codes of a word, B the words of a row. Where a scale is NaN the page leaves
  the codes open; here they are those of zero.
"""
