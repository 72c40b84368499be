"""Rounds elements under scales to codes, by QSGD, TernGrad or 8-bit types."""
