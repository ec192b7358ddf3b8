"""Published ideas as contestants.

They follow what is known of the papers without their full text. Each says which rule is the paper's and which
is ours.
"""
