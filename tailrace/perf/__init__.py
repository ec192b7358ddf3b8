"""Performance models that are not one step's time: pure, given as data."""
