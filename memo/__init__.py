"""memo: training GPT models with ultra-long contexts."""
