"""Documents to tokens, tokens to batches."""
