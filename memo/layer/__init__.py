"""One layer by hand, forward and backward: rows, attention, MLP, METP, embedding and head. See block.py."""
