"""Where weights and activations lie, on the device and on the host. Begin with placement.py."""
