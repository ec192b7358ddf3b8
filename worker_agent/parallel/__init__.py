"""Engines of several ranks, on one machine or several, and data-parallel ranks of one deployment.

Ranks (`rank_*.py`) are the processes of one engine; each transfers its own part of the KV. vLLM's executor
starts them. In each, beside vLLM's own loop, an agent thread owns a UCX endpoint, a map of the exported
blocks, and the checksums of its own part (`rank_agent.py`). The worker's process, whose engine knows the
blocks, tells the ranks over a Unix socket what to send and to fetch (`rank_links.py`), and is the only one
that talks to other workers: rank r fetches from rank r of the source, all at the same time, and a round
completes when every rank has its part (`rank_transfers.py`).

Nodes (`node_*.py`) are the machines of one engine: a worker is node 0, `tailrace serve ranks` runs the ranks
of another. vLLM's ranks find each other by `master_addr` and `master_port`, where rank 0 listens, and wait
there for half an hour without saying for whom. Before the worker loads its engine, it therefore listens on
that very address itself until every node has joined, hands them its engine's settings, and only then leaves
the port to vLLM. The connections stay open for as long as the engine runs. Each end learns from them that the
other is gone: vLLM's own watch covers a machine's own ranks only.

Data-parallel ranks (`data_parallel_*.py`) are workers of their own, each with an engine, which step together.
"""
