"""Generate tailrace/v1/*_pb2*.py and their type stubs from protos/tailrace/v1/*.proto."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Write the modules beside the library; a stale output folder is replaced whole."""
    out = ROOT / "tailrace" / "v1"
    shutil.rmtree(out, ignore_errors=True)
    protos = sorted(str(p) for p in (ROOT / "protos").rglob("*.proto"))
    plugins = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={ROOT}",
            f"--grpc_python_out={ROOT}",
            f"--mypy_out=quiet:{ROOT}",
            f"--mypy_grpc_out=quiet:{ROOT}",
            *protos,
        ],
        check=True,
    )
    (out / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')


if __name__ == "__main__":
    main()
