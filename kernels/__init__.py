"""Inner loops of the codecs, a folder an operation: jnp references and kernels.

See docs/inside/wire-format.md for the rules.
"""
