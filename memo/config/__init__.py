"""The keys of a run and their rules, and what follows: a layer's facts, formulas, the layout."""
