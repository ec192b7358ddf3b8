"""XDP programs that drop packets as they arrive at a device: all, some, or those from one address.

They have a few instructions each and are assembled here, without a compiler (instruction set: the kernel's
Documentation/bpf/standardization/instruction-set.rst).
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import struct
from pathlib import Path
from typing import Final

from tests.harness.namespaces import run

_BPF: Final = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD: Final = 5
_OBJ_PIN: Final = 6
_XDP: Final = 6
_ATTRIBUTES: Final = 128
_DROP: Final = 1
_PASS: Final = 2
_RANDOM: Final = 7
_ETHERTYPE_AT: Final = 12
_SOURCE_AT: Final = 26
_HEADERS: Final = 34
_IPV4: Final = int.from_bytes(b"\x08\x00", "little")


class XdpUnavailable(RuntimeError):
    """The kernel does not accept the programs; the message says why."""


class XdpPrograms:
    """Loads programs and pins them in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Mount a BPF file system. Raise XdpUnavailable if that fails."""
        if platform.machine() not in _BPF:
            raise XdpUnavailable(f"unknown system call on {platform.machine()}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run("mount", "-t", "bpf", "bpf", str(folder))
        except RuntimeError as error:
            raise XdpUnavailable(str(error)) from error
        self._folder = folder
        self._pinned: dict[str, Path] = {}

    def drop_all(self) -> Path:
        """Return the program that drops every packet. Raise XdpUnavailable if it does not load."""
        return self._pin("all", _set_result(_DROP) + _exit())

    def drop_some(self, share: float) -> Path:
        """Return the program that drops this share of packets, 0 to 1, at random."""
        code = _instruction(0x85, immediate=_RANDOM)
        # r0 >>= 1: the share must fit a signed immediate.
        code += _instruction(0x77, immediate=1)
        code += _instruction(0xA5, offset=2, immediate=int(share * (1 << 31)))
        code += _set_result(_PASS) + _exit() + _set_result(_DROP) + _exit()
        return self._pin(f"some-{share}", code)

    def drop_from(self, address: str) -> Path:
        """Return the program that drops packets from one IPv4 address."""
        source = int.from_bytes(ipaddress.IPv4Address(address).packed, "little", signed=True)
        # r2: start of the packet, r3: its end, r4: end of the headers, which must not be beyond r3.
        code = _instruction(0x61, 2, 1, 0) + _instruction(0x61, 3, 1, 4)
        code += _instruction(0xBF, 4, 2) + _instruction(0x07, 4, immediate=_HEADERS)
        code += _instruction(0x2D, 4, 3, offset=6)
        code += _instruction(0x69, 5, 2, _ETHERTYPE_AT) + _instruction(0x55, 5, offset=4, immediate=_IPV4)
        code += _instruction(0x61, 5, 2, _SOURCE_AT) + _instruction(0x56, 5, offset=2, immediate=source)
        code += _set_result(_DROP) + _exit() + _set_result(_PASS) + _exit()
        return self._pin(f"from-{address}", code)

    def _pin(self, name: str, code: bytes) -> Path:
        if (known := self._pinned.get(name)) is not None:
            return known
        program = ctypes.create_string_buffer(code, len(code))
        licence = ctypes.create_string_buffer(b"GPL")
        load = struct.pack(
            "=IIQQ", _XDP, len(code) // 8, ctypes.addressof(program), ctypes.addressof(licence)
        )
        descriptor = _call(_PROG_LOAD, load, f"load {name}")
        path = self._folder / name.replace(".", "_")
        at = ctypes.create_string_buffer(os.fsencode(path))
        try:
            _call(_OBJ_PIN, struct.pack("=QII", ctypes.addressof(at), descriptor, 0), f"pin {path}")
        finally:
            os.close(descriptor)
        self._pinned[name] = path
        return path


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, offset, immediate)


def _set_result(value: int) -> bytes:
    return _instruction(0xB7, immediate=value)


def _exit() -> bytes:
    return _instruction(0x95)


def _call(command: int, attributes: bytes, action: str) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes.ljust(_ATTRIBUTES, b"\0"), _ATTRIBUTES)
    result: int = library.syscall(_BPF[platform.machine()], command, buffer, _ATTRIBUTES)
    if result < 0:
        raise XdpUnavailable(f"{action}: {os.strerror(ctypes.get_errno())}")
    return result
