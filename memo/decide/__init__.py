"""Decisions left to auto: alpha, stages, subsequences, help between stages. Begin with alpha.py."""
