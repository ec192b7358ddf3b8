"""`make check-gpu`: what only a GPU can show. Each part runs on a CPU too, small, for tests."""
