"""The rooms of the library; what is public stands in the modules of gradcomp."""
