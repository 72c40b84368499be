"""Bits, scales, dithers and formats that the operations share."""
