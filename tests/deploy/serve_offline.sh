#!/usr/bin/env bash
# In a network namespace of its own: start a cluster from an environment, ask it one thing, stop it.
set -euo pipefail
environment=$1
ip link set lo up
[[ $(ip -o link | wc -l) == 1 ]] || { echo "there is a network here" >&2; exit 1; }
trap '"$environment/bin/tailrace" down' EXIT
"$environment/bin/tailrace" up --workers 2 --port 8000 --no-traces
"$environment/bin/python" - <<'PYTHON'
import json, urllib.request
body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}).encode()
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"}
)
print(urllib.request.urlopen(request, timeout=120).read().decode())
PYTHON
