"""Inner loops of the codecs, a file an operation: jnp references and kernels."""
