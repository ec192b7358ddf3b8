"""Published ideas as contestants.

Their papers' texts were not at hand. Each says which rule is the paper's, as far as it is known, and which is
ours.
"""
