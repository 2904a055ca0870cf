"""Whose kernel computes an operation: torch's, memo's own, or another package's."""
