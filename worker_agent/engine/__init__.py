"""The engines that a worker can run, behind one interface (base.py)."""
