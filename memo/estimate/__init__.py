"""The dry run: bytes, seconds and MFU of a config on a machine. Begin with budget.py."""
