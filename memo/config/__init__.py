"""What is asked of a run, and what follows from that alone: keys, rules, a layer's facts, formulas, the layout."""
