"""Bid-ask between workers (CascadeInfer, section 4.4): the rules are tailrace.bid_ask's."""
