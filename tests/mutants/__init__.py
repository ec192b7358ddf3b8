"""`make mutants`: mutation testing of the pure modules."""
