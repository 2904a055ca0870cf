"""One layer, forward and backward by hand: rows, attention, MLP, METP, embedding and head. Begin with block.py."""
