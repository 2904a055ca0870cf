"""What tests and benches share: neither imports the other."""
