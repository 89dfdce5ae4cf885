"""Why code is not routed, as data: a closed table of causes, and reasons that name one of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from re import search

__all__ = ["Code", "Reason", "remedies"]


class Code(Enum):
    """A class of causes: what it means, and what the author of the code or of the idiom can do about it."""

    # fmt: off
    OTHER_FORM = ("It computes another formula than those that are known.",
        "Nothing is wrong: upstream's code runs. For a kernel, add the formula to the op (CONTRIBUTING.md).")
    NOT_FOLLOWED = ("It contains code that is not followed, so what it does is not known.",
        "Write this code in a plainer way, or teach the reader of code to follow it.")
    NO_ROOM = ("The code around it has no place for a guard, which is a statement.",
        "Give the computation a statement of its own, outside branches, with nothing else in between.")
    IN_PLACE = ("It changes a tensor in place.",
        "Use the operation that returns a new tensor.")
    OTHER_ARGUMENTS = ("A function takes, or gets, other arguments than the known ones.",
        "Name and pass them as other models do, or add them to the idiom.")
    OTHER_SETTING = ("A module has sizes or options that no kernel computes.",
        "Nothing, unless a kernel for them is worth writing.")
    UNKNOWN_MODULE = ("The file does not say which module runs here.",
        "Create the module in `__init__` from one class, and call it in methods of the same class.")
    NO_OWNER = ("No call of it belongs to a module, and only a module has kernels.",
        "Call it in a method of a module.")
    OTHER_FILE = ("Its code is in another file, which the idiom does not read.",
        "Define it in the file of the model.")
    DECORATED = ("A decorator may change what it does.",
        "Remove the decorator, or let the idiom know it.")
    REPLACED = ("Its name may mean something else when the code runs.",
        "Define it once, and assign nothing else to its name.")
    NO_FUSED_FORM = ("Its parts may have kernels, but none computes them together.",
        "Nothing is lost but the fusion, unless a kernel for it is worth writing.")
    NO_BOUNDARIES = ("The boundaries of samples or segments do not reach the code.",
        "Hand them on to it, as other models do.")
    OTHER_LOSS = ("The loss is not that of a causal language model.",
        "Nothing: no kernel is for such a loss.")
    USED_OTHERWISE = ("Something that a kernel does not make is used elsewhere.",
        "Leave this use out, or compute it from the result.")
    READS_VALUES = ("It depends on values of tensors that the host does not know.",
        "Compute the numbers before they are tensors, and pass them as arguments.")
    MIXES_POSITIONS = ("What it computes at one position depends on others, or on their number.",
        "Train this model without sequence parallelism.")
    RANDOM = ("It draws random numbers, which differ between processes.",
        "Leave the random choice out, or train this model without sequence parallelism.")
    OTHER_LOOP = ("The layers are not called by one plain loop that passes hidden states alone.",
        "Call them in such a loop, or train this model without sequence parallelism.")
    UNCHOSEN = ("Only kernels that are chosen by name compute it.",
        "Name one before the module is imported, as in VEOMNI_KERNELS=op=backend, and measure.")
    # fmt: on

    def __init__(self, meaning: str, remedy: str) -> None:
        self.meaning, self.remedy = meaning, remedy

    def __str__(self) -> str:
        return self.name.lower()


class Reason(str):
    """Why code is not routed: the words with the line, as it is shown, and the cause; it never changes.

    Attributes:
        code: that of the words, if they are a reason; else the one that is passed, or `NOT_FOLLOWED`.
        line: the line that the text names, the first in brackets if there are several; 0 if there is none.
    """

    code: Code
    line: int

    def __new__(cls, words: str, code: Code = Code.NOT_FOLLOWED, line: int = 0) -> Reason:
        """Put the line behind the words, if there is one."""
        reason = super().__new__(cls, f"{words} (line {line})" if line else words)
        named = search(r"\(lines? (\d+)", reason) or search(r"\bline (\d+)", reason)
        reason.line = line or (int(named[1]) if named else 0)
        reason.code = words.code if isinstance(words, Reason) else code
        return reason

    def after(self, place: str) -> Reason:
        """The reason behind the place or the formula that it is about."""
        return Reason(f"{place}: {self}", self.code)

    @classmethod
    def joined(cls, reasons: Iterable[str]) -> Reason:
        """Several reasons as one, with the cause of the first; an empty reason if there is none."""
        every = [*map(cls, reasons)]
        return cls("; ".join(every), every[0].code if every else Code.NOT_FOLLOWED)


def remedies(codes: Iterable[str]) -> list[tuple[str, str]]:
    """The remedies by code, each once, in the order of the table."""
    told = {*codes}
    return [(str(code), code.remedy) for code in Code if str(code) in told]
