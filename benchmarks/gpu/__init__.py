"""`make check-gpu`: checks that need a GPU. For tests, each part also runs on a CPU, at a small scale."""
