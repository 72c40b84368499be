"""Cases that tests are parametrized with."""
