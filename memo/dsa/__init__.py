"""The storage allocation problem: buffers with lifetimes get addresses."""
