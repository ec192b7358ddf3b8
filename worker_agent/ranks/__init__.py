"""An engine on several devices: each rank is a process that transfers its own part of the KV.

vLLM's executor starts the ranks. In each, beside vLLM's own loop, an agent thread owns a UCX endpoint, a map
of the exported blocks, and the checksums of its own part (`agent.py`). The worker's process, whose engine
knows the blocks, tells the ranks over a Unix socket what to send and to fetch (`links.py`), and is the only
one that talks to other workers: rank r fetches from rank r of the source, all at the same time, and a round
completes when every rank has its part (`transfers.py`).
"""
