"""The verdict on each patch of a config for one release, whether or not the whole config applies there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration.alone import lost_names, refused
from veomni_hook.tools.migration.answers import Coverage, coverage
from veomni_hook.tools.migration.served import APPLIES, GONE, MOVED, RENAMED, Served, served
from veomni_hook.tools.migration.together import needing

__all__ = ["APPLIES", "FAILS", "GONE", "MOVED", "RENAMED", "UNNECESSARY", "Judgement", "absent", "judge"]

UNNECESSARY = "unnecessary"
FAILS = "FAILS"


@dataclass(frozen=True)
class Judgement:
    """One patch of a config, or one thing that it says about a name, in one release.

    Attributes:
        kind: the verb; also `exclude`, `drop_import` or `helper`, and `config` for the config as a whole.
        target: what it patches.
        verdict: `applies`, `applies, renamed` (it is given the new names of parameters), `moved` (upstream's
            code of the target is another than the patch was written for, or it needs a patch that does not
            apply), `gone` (there is no such target), `unnecessary` (this package serves all that the patch
            is for) or `FAILS` (the engine refuses it for another reason).
        detail: what moved, the nearest names, what makes it unnecessary, why it fails, or a remark.
        fix: what to do about a failure.
        diff: the code that the patch was written for against that of the release.
        patch: the patch; None for the other kinds.
        ops: what idioms route inside the target.
        coverage: what the patch is for and what serves it; None if it is gone or not a patch.
        fits: whether the patch applies and works beside what else applies, necessary or not.
    """

    kind: str
    target: str
    verdict: str
    detail: str = ""
    fix: str = ""
    diff: str = ""
    patch: Patch | None = None
    ops: tuple[str, ...] = ()
    coverage: Coverage | None = None
    fits: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether nobody has to look at it."""
        return self.verdict in (APPLIES, RENAMED, UNNECESSARY)


def judge(
    config: PatchConfig,
    source: str,
    origin: Origin,
    *,
    base: str | None = None,
    base_version: str = "",
) -> list[Judgement]:
    """Judge every patch of a config on its own; the arguments are those of `served`.

    Returns:
        A judgement for each patch in the order of the config, and then one for each name that the config
        leaves out, drops or places a helper after, and that the source does not have.

    Raises:
        ConfigError, ReplacementError: a patch has an unknown type, or code that cannot be read.
        IdiomError: an idiom fails on the module.
        SyntaxError: one of the texts is not valid Python.
    """
    patches = served(config, source, origin, base=base, base_version=base_version)
    document = Document(source, origin.module)
    there = [one for one in patches if one.status != GONE]
    problems = refused(config, [one.patch for one in there], document, origin)
    errors = {id(there[index].patch): error for index, error in problems.patches.items()}
    if base is not None:
        patches = _together(config, patches, errors, document, Document(base, origin.module))
    said = {remark.target: remark.what for remark in problems.remarks}
    judged = [_judged(config, one, errors.get(id(one.patch)), base, said, origin.version) for one in patches]
    judged += [Judgement(lost.kind, lost.name, GONE, lost.detail) for lost in lost_names(config, document)]
    if problems.together is not None:
        error = problems.together
        judged.append(Judgement("config", error.target or "-", FAILS, _told(error), error.fix))
    return judged


def _together(
    config: PatchConfig,
    patches: Sequence[Served],
    errors: Mapping[int, PatchError],
    now: Document,
    base: Document,
) -> list[Served]:
    """The same, where a patch that cannot do without one that does not apply has moved too."""
    fitting = [one for one in patches if one.status in (APPLIES, RENAMED) and id(one.patch) not in errors]
    lost = [one.patch for one in patches if one not in fitting]
    why = needing(config, [one.patch for one in fitting], lost, now, base)
    moved = {id(fitting[index]): detail for index, detail in why.items()}
    return [replace(one, status=MOVED, detail=moved[id(one)]) if id(one) in moved else one for one in patches]


def absent(config: PatchConfig, module: str, release: str) -> list[Judgement]:
    """Return the judgements for a config whose module a release does not have."""
    detail = f"{release} has no module {module}"
    return [_gone(patch, detail) for patch in config.patches] or [Judgement("config", module, GONE, detail)]


def _gone(patch: Patch, detail: str) -> Judgement:
    return Judgement(patch.patch_type.value, patch.target, GONE, detail, patch=patch)


def _judged(
    config: PatchConfig,
    one: Served,
    error: PatchError | None,
    base: str | None,
    remarks: Mapping[str, str],
    release: str,
) -> Judgement:
    patch = one.patch
    if one.status == GONE:
        return _gone(patch, one.detail)
    covers = coverage(patch, config, one.ops, base, release)
    verdict, detail = one.status, one.detail
    fits = verdict != MOVED and error is None
    fix = "" if error is None else error.fix
    if covers.complete:
        verdict, detail, fix = UNNECESSARY, covers.by, ""
    elif error is None:
        detail = detail or remarks.get(patch.target, "")
    elif verdict == MOVED:
        detail += f"; does not apply: {error.what}"
    else:
        verdict, detail = FAILS, _told(error)
    kind = patch.patch_type.value
    return Judgement(kind, patch.target, verdict, detail, fix, one.diff, patch, one.ops, covers, fits)


def _told(error: PatchError) -> str:
    return f"{error.what} ({error.where})"
