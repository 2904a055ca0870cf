"""What is asked of a run, and what follows: keys, rules, a layer's facts, formulas, the layout."""
