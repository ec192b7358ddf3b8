"""Engines that span several machines: a worker is node 0, `tailrace serve ranks` runs the ranks of another.

vLLM's ranks find each other by `master_addr` and `master_port`, where rank 0 listens, and wait there for half
an hour without saying for whom. Before the worker loads its engine, it therefore listens on that very address
itself until every node has joined, hands them its engine's settings, and only then leaves the port to vLLM.
The connections stay open for as long as the engine runs. Each end learns from them that the other is gone:
vLLM's own watch covers a machine's own ranks only.
"""
