"""A run from its command line to its end: what is read, measured, reserved, said and saved. Begin with prepare.py."""
