"""An engine on several devices: each rank is a process that moves its own part of the KV.

vLLM's executor starts the ranks. In each, beside vLLM's own loop, a thread has a UCX endpoint, a map of the
blocks that are exported, and the checksums of its own part (`agent.py`). The worker's process, whose engine
knows which block is which, tells them what to send and to fetch over a Unix socket (`links.py`), and is the
only one that speaks to other workers: rank r fetches from rank r of the source, all of them at once, and a
round is done when every rank has its part (`transfers.py`).
"""
