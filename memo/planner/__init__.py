"""Addresses of temporary tensors: from a step's requests to a plan that torch's allocator replays."""
