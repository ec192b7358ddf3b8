"""One file for a whole fleet: what it says, and what each host runs for it."""
