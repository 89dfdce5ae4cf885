"""Every routed site of the installed transformers, run through its guard and through upstream's body."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "modules", "prove", "prove_module", "routed"]


@dataclass(frozen=True)
class Verdict:
    """What the proof found at one site.

    ``outcome`` is ``equal`` (bit for bit), ``rounding`` (within that of the dtype), ``differs`` or
    ``unbuildable``; the last two are failures.
    """

    module: str
    target: str
    op: str
    variant: str
    outcome: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this is no proof."""
        return self.outcome not in ("equal", "rounding")

    def to_dict(self) -> dict[str, str]:
        """The verdict as JSON can hold it."""
        return asdict(self)


def modules(families: Sequence[str] = ()) -> list[str]:
    """The modeling modules of the installed transformers, of all families or of those given."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed")
    root = Path(spec.origin).parent
    files = sorted(root.glob("models/*/modeling_*.py"))
    found = [
        f"transformers.models.{file.parent.name}.{file.stem}"
        for file in files
        if not families or file.parent.name in families
    ]
    return found if families else [*found, "transformers.modeling_layers"]


def routed(module: str, ops: Iterable[str] = ()) -> list[Any]:
    """The routed sites of a module, read from its source without importing it."""
    from veomni_hook.patches.idioms.recognise import recognise
    from veomni_hook.patches.routes.site import Status
    from veomni_hook.patches.text.document import Document

    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    wanted = set(ops)
    sites = recognise(Document(path.read_text(encoding="utf-8"), module))
    return [site for site in sites if site.status is Status.ROUTED and (not wanted or site.op in wanted)]


def _provers() -> dict[str, Callable[[Any, Any], str]]:
    from tests.proof import losses, provers, rotary

    return {
        "rms_norm": provers.class_prover(provers.norm_calls),
        "rotary": rotary.prove_rotary,
        "gated_mlp": provers.class_prover(provers.layer_calls),
        "moe_experts": provers.class_prover(provers.expert_calls),
        "moe_router": provers.class_prover(provers.layer_calls),
        "load_balancing_loss": losses.prove_load_balancing_loss,
        "linear_cross_entropy": losses.prove_linear_cross_entropy,
    }


def prove_module(module: str, ops: Sequence[str] = ()) -> list[Verdict]:
    """Prove every routed site of one module, in this process."""
    from tests.proof.build import Unbuildable
    from tests.proof.compare import Differs

    sites = routed(module, ops)
    if not sites:
        return []
    imported = importlib.import_module(module)
    verdicts = []
    for site in sites:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome, detail = _provers()[site.op](site, imported), ""
        except Differs as error:
            outcome, detail = "differs", str(error)
        except Unbuildable as error:
            outcome, detail = "unbuildable", str(error)
        except Exception as error:  # every failure is a verdict, with its place
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = "unbuildable"
            detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        verdicts.append(Verdict(module, site.target, site.op, site.variant, outcome, detail))
    gc.collect()
    return verdicts


def _start() -> None:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    import veomni_hook

    veomni_hook.activate(kernels="reference")
    import torch

    torch.set_num_threads(1)


def prove(
    names: Sequence[str], ops: Sequence[str] = (), workers: int = 2
) -> Iterator[tuple[str, list[Verdict]]]:
    """Prove many modules in parallel; yields each module with its verdicts as it is done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        running = {pool.submit(prove_module, name, tuple(ops)): name for name in names}
        for done in as_completed(running):
            name = running[done]
            try:
                yield name, done.result()
            except Exception as error:  # an import that fails is a verdict too
                yield name, [Verdict(name, "", "", "", "unbuildable", f"{type(error).__name__}: {error}")]
