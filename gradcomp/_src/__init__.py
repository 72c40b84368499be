"""The rooms of the library; the modules of gradcomp itself hold the public names."""
