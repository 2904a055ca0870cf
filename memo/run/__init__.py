"""A run: what is read, measured, reserved, said and saved. Begin with prepare.py."""
