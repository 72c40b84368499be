"""Code that the examples share."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "datasets"  # of data that is prepared
