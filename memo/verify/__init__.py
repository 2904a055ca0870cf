"""The reference that memo is compared with."""
