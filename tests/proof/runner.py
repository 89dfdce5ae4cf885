"""Every routed site of the installed transformers, run through its guard and through upstream's body."""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.proof.provers import Proof

#: How many times the rounding of the reference other runs may be off.
SLACK = 500.0
#: Equal bit for bit, or within the rounding of the dtype.
PROVED = ("equal", "rounding")
#: What a site can come to. Failures: guard and body differ; they were compared where they could not; no call
#: reached the guard's kernel; the site could not be run at all.
OUTCOMES = (*PROVED, "differs", "degenerate", "unreached", "unbuildable")


@dataclass(frozen=True)
class Verdict:
    """What the proof found at one site.

    ``outcome`` is one of `OUTCOMES`; ``detail`` says why there is no proof, or how large the rounding is;
    ``gradients`` is how many gradients were compared, 0 for a bound call, which is compared by its text.
    ``operands`` is how many operands of inserted calls are proven, ``unproven`` says which are not, and why.
    """

    module: str
    target: str
    op: str
    variant: str
    outcome: str
    detail: str = ""
    gradients: int = 0
    operands: int = 0
    unproven: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this is no proof."""
        return self.outcome not in PROVED

    def __str__(self) -> str:
        return f"{self.outcome}: {self.module} {self.target} {self.op}/{self.variant}: {self.detail}"

    def to_dict(self) -> dict[str, Any]:
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


@lru_cache(maxsize=4)
def _routed(module: str) -> tuple[Any, ...]:
    from tests.proof.recogniser import routed_in

    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    return tuple(routed_in(path.read_text(encoding="utf-8"), module))


def routed(module: str, ops: Iterable[str] = ()) -> list[Any]:
    """The routed sites of a module, read from its source without importing it."""
    wanted = set(ops)
    return [site for site in _routed(module) if not wanted or site.op in wanted]


def prover(site: Any) -> Callable[[Any, Any], Proof]:
    """What proves a site in a module: ``prove`` in ``tests/kernels/<op>/proof.py``, or what is named here.

    Of any other op, calls of the class that the site is in.
    """
    from tests.proof import additions, attention, eager_attention, inputs, losses, provers, rotary
    from tests.proof.call_sites import prove_call_site
    from tests.proof.hyper_connections import prove_hyper_connection
    from tests.proof.index_scores import prove_index_scores
    from tests.proof.linear_attention import prove_linear_attention
    from tests.proof.restored import prove_inserted_code
    from tests.proof.row_merges import prove_added_rows

    if site.op == "host_metadata":
        return prove_inserted_code
    if site.op == "layer_loop":
        return lambda *_: provers.Proof(gradients=0)  # its calls are compared as all inserted ones
    if not site.counted:
        return lambda site, module: prove_call_site(
            site, module, {s.target: s.variant for s in routed(module.__name__, (site.op,)) if s.counted}
        )
    if site.op == "row_merge" and site.part == "addition":
        return prove_added_rows
    by_op: dict[str, Callable[[Any, Any], Proof]] = {
        **dict.fromkeys(("rms_norm", "layer_norm"), provers.class_prover(inputs.norm_calls)),
        **dict.fromkeys(("add_rms_norm", "add_layer_norm"), additions.prove_addition),
        **dict.fromkeys(
            (
                "nn_layer_norm", "patch_projection", "row_merge", "count_check", "absent_modality", "row_join",
                "varlen_attention", "sample_boundaries", "pooled_windows", "head_parts",
            ),
            prove_inserted_code,
        ),
        **dict.fromkeys(("gated_delta_rule", "causal_conv"), prove_linear_attention),
        "hyper_connection": prove_hyper_connection,
        "index_scores": prove_index_scores,
        "rotary": rotary.prove_rotary,
        "qk_norm_rotary": attention.prove_attention,
        "attention": eager_attention.prove_eager_attention,
        "moe_experts": provers.class_prover(inputs.expert_calls),
        "load_balancing_loss": losses.prove_load_balancing_loss,
        "linear_cross_entropy": losses.prove_linear_cross_entropy,
    }  # fmt: skip
    if (Path(__file__).parents[1] / "kernels" / site.op / "proof.py").exists():
        own: Callable[[Any, Any], Proof] = importlib.import_module(f"tests.kernels.{site.op}.proof").prove
        return own
    return by_op.get(site.op, provers.class_prover(inputs.layer_calls))


def judge(site: Any, module: Any) -> Verdict:
    """Prove one site of an imported module; whatever goes wrong is its verdict."""
    from tests.proof import inserted_calls
    from tests.proof.build import Unbuildable
    from tests.proof.compare import Degenerate, Differs
    from tests.proof.provers import Unreached

    failures = {
        Differs: "differs",
        Degenerate: "degenerate",
        Unreached: "unreached",
        Unbuildable: "unbuildable",
    }
    where = (module.__name__, site.target, site.op, site.variant)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proof = prover(site)(site, module)
            calls = inserted_calls.Checked()
            if site.op in inserted_calls.OPS:
                upstream = Path(getattr(module.__spec__.loader, "upstream", module.__file__))
                calls = inserted_calls.checked(site, module.__name__, upstream.read_text(encoding="utf-8"))
    except tuple(failures) as error:
        return Verdict(*where, failures[type(error)], str(error))
    except Exception as error:  # every failure is a verdict, with its place
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return Verdict(*where, "unbuildable", detail)
    detail = ", ".join(f"{tensor}: {error:.1e}" for tensor, error in sorted(proof.errors.items()))
    unproven = tuple(f"{operand}: {why}" for operand, why in calls.unproven.items())
    outcome = "rounding" if proof.errors else "equal"
    return Verdict(*where, outcome, detail, proof.gradients, len(calls.proven), unproven)


def _has_kernel(site: Any) -> bool:
    """Whether the kernels that guards run include one for a site; others prove nothing there."""
    from tests.proof.compare import MODE
    from veomni_hook.kernels.selection.registry import registry

    if MODE.kernels == "reference" or site.op not in registry.ops():
        return MODE.run is None or site.op in registry.ops()
    declared = {kernel.variant for kernel in registry.kernels(site.op) if kernel.backend == MODE.kernels}
    return declared >= {*site.variant.split("|")}


def prove_module(module: str, ops: Sequence[str] = ()) -> list[Verdict]:
    """Prove every routed site of one module, in this process."""
    sites = [site for site in routed(module, ops) if _has_kernel(site)]
    if not sites:
        return []
    imported = importlib.import_module(module)
    verdicts = [judge(site, imported) for site in sites]
    gc.collect()
    return verdicts


def _start(kernels: str = "reference", derived: bool = False, device: str = "cpu") -> None:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    if kernels == "triton" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import veomni_hook

    veomni_hook.activate(kernels=kernels)
    import torch

    torch.set_num_threads(1)
    set_up(kernels, derived=derived, device=device)


def set_up(kernels: str, *, derived: bool, device: str = "cpu") -> None:
    """Let guards run ``kernels`` in this process, and runs compute all derivatives if ``derived``."""
    from tests.proof.compare import MODE
    from tests.proof.derivatives import derivatives

    MODE.kernels, MODE.run, MODE.device = kernels, derivatives if derived else None, device
    # Second derivatives add up more roundings, and other backends than the reference add in another order.
    MODE.slack = 1.0 if kernels == "reference" and not derived else SLACK if device == "cpu" else 10 * SLACK
    if derived:
        # A refusal in a transform is what is wanted.
        logging.getLogger("veomni_hook").setLevel(logging.ERROR)
        MODE.dtypes = MODE.dtypes[:1]
    if kernels == "triton" and device == "cpu":
        _interpret()


def _interpret() -> None:
    """Let kernels run on a CPU that ask for a GPU."""
    from tests.kernels.interpreter import hasten
    from veomni_hook.kernels.selection.declaration import Requirement
    from veomni_hook.kernels.selection.registry import registry

    hasten(look_for_overflows=False)
    for kernel in registry.kernels():
        if kernel.backend == "triton":
            registry.replace(replace(kernel, requires=Requirement(triton=True)))


def in_processes(
    work: Callable[..., Any], items: Mapping[Any, tuple[Any, ...]], workers: int, *start: Any
) -> Iterator[tuple[Any, Any]]:
    """Do some work with the arguments of each item, where the hook is active; yields items with results, or errors."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=start) as pool:
        running = {pool.submit(work, *arguments): item for item, arguments in items.items()}
        for done in as_completed(running):
            yield running[done], done.exception() or done.result()


def prove(
    names: Sequence[str],
    ops: Sequence[str] = (),
    workers: int = 2,
    kernels: str = "reference",
    *,
    derived: bool = False,
    device: str = "cpu",
) -> Iterator[tuple[str, list[Verdict]]]:
    """Prove many modules in parallel; yields each module with its verdicts as it is done."""
    items = {name: (name, tuple(ops)) for name in names}
    for name, result in in_processes(prove_module, items, workers, kernels, derived, device):
        if isinstance(result, BaseException):  # an import that fails is a verdict too
            result = [Verdict(name, "", "", "", "unbuildable", f"{type(result).__name__}: {result}")]
        yield name, result
