"""Runs studies: ``python -m benchmarks.study run ...`` or ``report DIR``."""

from benchmarks.study.command import main

if __name__ == "__main__":
  main()
