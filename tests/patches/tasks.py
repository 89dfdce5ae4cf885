"""One patch as a task of a plan, for tests of what verbs share."""

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.plan import Origin, Plan, Step, Task
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType


def task_of(document: Document, patch: Patch, *, lenient: bool = False) -> Task:
    """The task of the only step of a plan; its config is `conf:c`."""
    config = PatchConfig("m", label="conf:c", lenient=lenient)
    step = Step(patch.patch_type.value, patch.target, patch.description or "", config, patch)
    return Plan(document, Origin("m", "m.py", "d", "1"), [step]).tasks[0]


def task_for(source: str, target: str) -> Task:
    """A task of which only the target matters."""
    return task_of(Document(source), Patch(PatchType.REWRITE, target, None))
