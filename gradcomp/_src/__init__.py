"""The rooms of the library; public names stand in the modules of gradcomp."""
