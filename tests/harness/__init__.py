"""Fleets of real processes, for tests, checks, benchmarks and experiments.

- `fleet.py`: a fleet whose processes are started, frozen and killed one by one (`processes.py`, `forked.py`).
- `working_folder.py`: `tailrace` as a user runs it in a folder.
- `servers.py`: `tailrace up` in a run folder of its own, and plain `vllm serve`; on it `vllm_fleet.py`, real
  workers that are observed and controlled (`controlled.py`).
- `plans.py`: a plan of `tailrace up`, changed and then started; `loaded_fleet.py`: services and simulated
  workers without an API server, under an open-loop load.
- `etcd_members.py`: three etcd members that fail, in the namespaces of `namespaces.py`.
- Clients, from the OpenAI package down to vLLM's messages: `chats.py`, `rollouts.py`, `loadgen.py`,
  `engine_core_load.py`.
- `usage.py`: CPU time and memory of processes; `report.py`: saved figures.
"""
