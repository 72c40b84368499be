"""The command line, timing, tables, shapes and trainer that scripts share."""
