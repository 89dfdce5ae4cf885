"""Uniform registers that a kernel for Hopper reads before it writes them: an error of the assembler.

ptxas 12.8 does so for descriptors of products with 16 or 32 columns. Such a kernel computes with what an earlier
one has left there, and sometimes ends with an illegal memory access.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?([\w.]+)\s+(.*)")
_REGISTER = re.compile(r"(gdesc\[)?UR(\d+)")


def unwritten(cubin: bytes) -> list[str]:
    """Return the instructions of a compiled kernel that read an unwritten uniform register."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_DISASSEMBLER), "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return unwritten_in(text)


def unwritten_in(text: str) -> list[str]:
    """Return what `unwritten` does, for the text of a kernel, whose instructions are in order."""
    written: set[int] = set()
    found = []
    for line in text.splitlines():
        instruction = _COMMENT.sub("", line).strip().rstrip("; ")
        if (matched := _INSTRUCTION.fullmatch(instruction)) is None:
            continue
        operation, operands = matched.groups()
        first, _, rest = operands.partition(",")
        target = re.fullmatch(r"UR(\d+)", first.strip())
        pair = operation.startswith("U") and ".64" in operation
        read: set[int] = set()
        for descriptor, digits in _REGISTER.findall(operands if target is None else rest):
            number = int(digits)
            # Of four registers the last two describe the second factor; the first factor may be in others.
            read |= {number + 2, number + 3} if descriptor else {number, number + pair}
        if not read <= written:
            found.append(instruction)
        if target is not None:
            number = int(target[1])
            written |= {number, number + (pair or ".WIDE" in operation)}
    return found
