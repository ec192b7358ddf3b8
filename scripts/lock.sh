#!/usr/bin/env bash
# Writes deploy/locks/*.txt: every package that an installation takes, with hashes. Run it after changing dependencies
# in pyproject.toml, with `uv` on PATH (or named by UV). vLLM's CPU build has no lock: it pins a build of torch that is not
# on PyPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=${UV:-uv}
mkdir -p deploy/locks
lock() { # NAME OPTION...
  "$uv" pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
    --output-file "deploy/locks/$1.txt" "${@:2}"
}
lock control --extra edge
lock simulated --extra simulated --extra edge
lock gpu --extra gpu --extra edge
# What a bundle carries beside (scripts/bundle): the extra `etcd` and an installer, without what the locks above have.
python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); print(*(
  project["project"]["optional-dependencies"]["etcd"] + project["tool"]["tailrace"]["bundle"]), sep="\n")' |
  "$uv" pip compile - --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --no-deps \
    --output-file deploy/locks/bundle.txt
# What builds Tailrace's own wheel: [build-system] of pyproject.toml, for `pip wheel --no-build-isolation`.
python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "wheel", sep="\n")' |
  "$uv" pip compile - --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
    --output-file deploy/locks/build.txt
# vLLM's Rust API server comes out of a wheel that no lock names.
version=$(python3 -c 'from scripts.vllm_pin import pinned_version; print(pinned_version("gpu"))')
grep -q "\"$version\": {" tailrace/service/vllm_rs.py ||
  echo "vLLM $version: add the SHA-256 of its vllm-rs for each machine to SHA256 in tailrace/service/vllm_rs.py" >&2
