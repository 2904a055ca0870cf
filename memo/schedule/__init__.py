"""What a step does, and when: the program, what its steps touch, the waits. Begin with program.py."""
