"""The version of the library, and the version of its wire format."""

from importlib import metadata

# The version of the wire format. It grows with every change after which two processes
# would not read each other's words: whenever a hash of tests/table/rows.txt changes,
# or the form of a line. An editable install keeps the version of its day; this number
# is the code's.
WIRE = 1

try:
  __version__ = metadata.version("gradcomp")
except metadata.PackageNotFoundError:  # imported from a folder, and not installed
  __version__ = "0+unknown"
