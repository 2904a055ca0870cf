"""Checkpoints: written while training goes on, read in any layout."""
