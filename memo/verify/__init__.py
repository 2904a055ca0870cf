"""What memo is compared with."""
