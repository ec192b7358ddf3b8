"""`make mutants`: do the tests of the pure modules notice when a line is wrong?"""
