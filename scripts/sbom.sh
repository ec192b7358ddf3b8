#!/usr/bin/env bash
# Write dist/sbom-*.json (CycloneDX) for the packages of the lock files. Needs `make install`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p dist
for name in control simulated gpu; do
	.venv/bin/python -m cyclonedx_py requirements "deploy/locks/$name.txt" --pyproject pyproject.toml -o "dist/sbom-$name.json"
done
ls -l dist/sbom-*.json
