"""A training step: the program, what its steps touch, the waits. Begin with program.py."""
