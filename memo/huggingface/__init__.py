"""Models of Hugging Face: families, config.json, weights."""
