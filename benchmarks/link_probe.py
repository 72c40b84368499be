"""Measures on one host what the links carry, with nothing but sockets.

python link_probe.py '{"rank": 0, ...}'    link_speed.py starts it
"""

import json
import pathlib
import sys

import links

if __name__ == "__main__":
  job = json.loads(sys.argv[1])
  ends = [tuple(end) for end in job["ends"]]
  received = links.probe(job["rank"], ends, job["nbytes"])
  pathlib.Path(job["output"]).write_text(json.dumps(received))
