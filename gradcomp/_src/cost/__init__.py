"""Performance models: seconds of links, collectives, codecs and steps."""
