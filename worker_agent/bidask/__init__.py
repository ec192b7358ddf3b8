"""Bid-ask between workers (CascadeInfer, section 4.4): the rules are tailrace.policy.cascade.bid_ask's."""
