"""Tests of the methods of gradcomp.contrib."""
