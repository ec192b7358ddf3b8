"""vLLM behind the Engine interface: CPU and GPU by one code path, no patch to vLLM.

vLLM's EngineCore lives in this process and is touched by one thread only (core.EngineThread). What vLLM
offers for extension is used as it is: `scheduler_cls`, `worker_extension_cls` and a KV connector.
"""
