"""What tests, benches and research share: none of them imports another, but a bench research."""
