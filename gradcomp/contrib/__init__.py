"""Methods that are not proven yet.

A method enters with one file in this folder, one test that calls
``gradcomp.testing.check_codec`` or ``check_transformation``, and a docstring that names
its paper.
"""

__all__: list[str] = []
