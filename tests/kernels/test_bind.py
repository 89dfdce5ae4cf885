import copy
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.kernels.patched_qwen3 import UPSTREAM, batch, pair, tiny_config
from veomni_hook.errors import KernelError
from veomni_hook.finders import state as finders
from veomni_hook.finders.finder import PatchFinder
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.selection.binding import BINDING, binding_of, use_kernels
from veomni_hook.kernels.selection.declaration import Op, Variant
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.tools.report.explanation import explain


def backends(model, op="rms_norm"):
    """What the slots of one op were last answered by in a model."""
    return {row.backend for row in explain(model).rows if row.op == op}


def run(model):
    """One training step's forward; says what computed the norms."""
    model(**batch()).loss.backward()
    return backends(model)


@pytest.fixture
def models(patched):
    """Two models of one class."""
    return pair(patched)[1], pair(patched)[1]


from veomni_hook.kernels.slot import Slot  # noqa: E402

ODD = Slot("rms_norm", "inverse_rms", __name__)


class TestBind:
    def test_two_models_of_one_class_run_different_kernels(self, models):
        teacher, student = models
        set_choice("torch")
        bind(teacher, "eager")
        assert (run(teacher), run(student)) == ({"eager"}, {"torch"})
        bind(teacher, "reference")
        bind(student, rms_norm="eager")
        assert (run(teacher), run(student)) == ({"reference"}, {"eager"})
        assert backends(student, "rotary") == {"torch"}

    def test_wins_over_contexts_and_settings_and_can_be_taken_back(self, models):
        model, _ = models
        set_choice("eager")
        bind(model, rms_norm="torch")
        with use_kernels(rms_norm="reference"):
            assert run(model) == {"torch"}
        bind(model, rms_norm=None)
        assert run(model) == {"eager"}
        assert binding_of(model) is None and BINDING not in vars(model)

    def test_what_is_not_named_stays_bound(self, models):
        model, _ = models
        bind(model, rms_norm="reference")
        bind(model, rotary="eager")
        assert binding_of(model.model.norm) == {"rms_norm": "reference", "rotary": "eager"}

    def test_a_preset_says_something_of_every_op(self, models):
        model, _ = models
        with registry.restored():
            registry.add_op(Op("toy", {"only": Variant("x", f"{__name__}:run")}))
            bind(model, "torch", rotary="eager")
        bound = binding_of(model)
        assert bound["rms_norm"] == "torch" and bound["rotary"] == "eager"
        assert bound["toy"] == "eager"  # torch has no kernel for it

    @pytest.mark.parametrize(
        ("preset", "ops", "listed"),
        [
            (None, {"norm": "torch"}, "ops: activation, add_layer_norm"),
            (None, {"norm": None}, "ops: activation, add_layer_norm"),
            (None, {"rms_norm": "fast"}, "for rms_norm: auto, eager"),
            ("fast", {}, "for every op: auto, eager"),
        ],
    )
    def test_unknown_names_list_what_is_valid(self, models, preset, ops, listed):
        with pytest.raises(KernelError) as caught:
            bind(models[0], preset, **ops)
        assert listed in caught.value.fix
        assert binding_of(models[0]) is None

    def test_sites_without_a_kernel_are_named_and_nothing_is_bound(self, patched):
        class Odd(nn.Module):
            def forward(self, x):
                return ODD.kernel(self, x)

        model = nn.Sequential(patched.Qwen3RMSNorm(8), Odd())
        with pytest.raises(KernelError) as caught:
            bind(model, rms_norm="liger")
        assert "rms_norm/inverse_rms has no 'liger' kernel: 1 (Odd)" in caught.value.what
        assert binding_of(model) is None

    def test_a_model_that_is_no_transformers_model(self):
        with pytest.raises(KernelError, match="no class in it is from a modeling file of transformers"):
            bind(nn.Linear(2, 2), "eager")

    @pytest.mark.parametrize(
        ("switch", "active", "asked", "why", "fix"),
        [
            ("0", False, False, "the hook is off, VEOMNI_HOOK=0", "unset VEOMNI_HOOK"),
            (
                None,
                False,
                False,
                f"the hook is not active, so {UPSTREAM} was not patched",
                "import veomni_hook.install",
            ),
            ("1", True, False, f"too late: {UPSTREAM} was imported before it was active", "import veomni_hook.install"),
            (None, True, True, f"the hook found nothing to route in {UPSTREAM}", "VEOMNI_IDIOMS=0"),
        ],
    )  # fmt: skip
    def test_a_model_that_is_not_patched_says_why(
        self, patched, monkeypatch, switch, active, asked, why, fix
    ):
        upstream, _ = pair(patched)
        if switch is None:
            monkeypatch.delenv("VEOMNI_HOOK", raising=False)
        else:
            monkeypatch.setenv("VEOMNI_HOOK", switch)
        monkeypatch.setattr(sys, "meta_path", [*[PatchFinder()] * active, *sys.meta_path])
        monkeypatch.setattr(finders.STATE, "asked", {UPSTREAM} if asked else set())
        with pytest.raises(KernelError) as caught:
            bind(upstream, "eager")
        assert why in caught.value.what and fix in caught.value.fix
        assert "_veomni_kernels" not in vars(upstream)

    def test_anything_else_is_an_error(self):
        with pytest.raises(KernelError, match="int"):
            bind(3, "eager")


class TestUseKernels:
    def test_is_for_calls_of_what_is_not_bound(self, models):
        model, other = models
        set_choice("eager")
        bind(other, "reference")
        with use_kernels(rms_norm="torch"):
            assert (run(model), run(other)) == ({"torch"}, {"reference"})
            assert {row.choice for row in explain(model).rows if row.op == "rms_norm"} == {
                "torch (use_kernels)"
            }
        assert run(model) == {"eager"}

    def test_binds_what_is_constructed_meanwhile(self, patched, models):
        old, _ = models
        # The fused norms, which were chosen by name too, would take what the norms were to compute.
        with (
            use_kernels("torch", add_rms_norm="eager", qk_norm_rotary="eager"),
            use_kernels(rms_norm="reference"),
        ):
            new = patched.Qwen3ForCausalLM(tiny_config())
            old.extra = nn.Linear(2, 2)
        assert run(new) == {"reference"} and backends(new, "rotary") == {"torch"}
        assert all(binding_of(module) for module in new.modules() if list(module.children()))
        assert binding_of(old) is None
        assert binding_of(old.extra) is not None
        assert binding_of(patched.Qwen3RMSNorm(8)) is None

    def test_a_module_whose_first_parameter_is_none(self):
        class Lazy(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_parameter("bias", None)
                self.weight = nn.Parameter(torch.ones(2))

        with use_kernels(rms_norm="eager"):
            assert binding_of(Lazy()) == {"rms_norm": "eager"}

    def test_closes_in_any_order_and_leaves_no_hooks(self):
        outer, inner, last = (
            use_kernels(rms_norm="eager"),
            use_kernels("torch"),
            use_kernels(rms_norm="eager"),
        )
        for context in (outer, inner, last):
            context.__enter__()
        assert STATE.wanted["rms_norm"] == "eager"
        last.__exit__(None, None, None)
        assert STATE.wanted["rms_norm"] == "torch"
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        assert not STATE.contexts and STATE.wanted["rms_norm"] == "auto"
        assert binding_of(nn.Linear(2, 2)) is None

    def test_is_left_on_an_error_and_is_a_decorator_too(self):
        @use_kernels(rms_norm="eager")
        def failing():
            assert STATE.wanted["rms_norm"] == "eager"
            raise ZeroDivisionError

        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                failing()
            assert not STATE.contexts

    def test_holds_in_other_threads(self, models):
        found = []
        with use_kernels(rms_norm="reference"):
            thread = threading.Thread(target=lambda: found.append(run(models[0])))
            thread.start()
            thread.join()
        assert found == [{"reference"}]

    def test_unknown_names_change_nothing(self):
        with pytest.raises(KernelError, match="norm"), use_kernels(norm="eager"):
            raise AssertionError
        assert not STATE.contexts


class TestTravels:
    """What a model is bound to stays with it."""

    @pytest.fixture
    def bound(self, models):
        set_choice("torch")
        bind(models[0], "reference")
        return models[0]

    def test_deep_copies(self, bound):
        other = copy.deepcopy(bound)
        assert run(other) == {"reference"}
        bind(other, rms_norm="eager")
        assert (run(other), run(bound)) == ({"eager"}, {"reference"})

    def test_pickles(self, bound):
        assert run(pickle.loads(pickle.dumps(bound))) == {"reference"}
        buffer = io.BytesIO()
        torch.save(bound, buffer)
        buffer.seek(0)
        assert run(torch.load(buffer, weights_only=False)) == {"reference"}

    def test_pickles_hold_nothing_of_this_package(self, bound):
        norm = copy.deepcopy(bound.model.norm)
        norm.__class__ = nn.Identity
        code = "import sys, pickle; m = pickle.load(sys.stdin.buffer); print(m._veomni_kernels['rms_norm'])"
        code += "; assert not any(name.startswith('veomni_hook') for name in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(norm), capture_output=True, check=True
        )
        assert done.stdout == b"reference\n"

    def test_state_dicts_and_saved_models_do_not_know(self, bound, patched, tmp_path):
        assert not any("veomni" in name for name in bound.state_dict())
        bound.save_pretrained(tmp_path)
        assert "veomni" not in (tmp_path / "config.json").read_text()
        assert binding_of(patched.Qwen3ForCausalLM.from_pretrained(tmp_path)) is None
        with use_kernels(rms_norm="eager"):
            loaded = patched.Qwen3ForCausalLM.from_pretrained(tmp_path).train()
        assert run(loaded) == {"eager"}
        loaded.load_state_dict(bound.state_dict())
        assert run(loaded) == {"eager"}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing(self, bound, reentrant):
        bound.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert run(bound) == {"reference"}
        gradients = [parameter.grad.clone() for parameter in bound.parameters()]
        bound.zero_grad()
        bound.gradient_checkpointing_disable()
        torch.manual_seed(0)
        assert all(gradient.isfinite().all() for gradient in gradients)

    def test_a_checkpoint_inside_a_context(self, models):
        norm = models[0].model.norm
        x = torch.randn(2, 32, requires_grad=True)
        with use_kernels(rms_norm="reference"):
            checkpoint(norm, x, use_reentrant=False).sum().backward()
        assert x.grad.isfinite().all()

    def test_data_parallel(self, bound, tmp_path):
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'rendezvous'}"
        )
        try:
            wrapped = DistributedDataParallel(bound)
            wrapped(**batch()).loss.backward()
            assert backends(wrapped) == {"reference"}
        finally:
            torch.distributed.destroy_process_group()

    def test_lora(self, bound):
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(bound, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        adapted.train()
        assert run(adapted) == {"reference"}

    def test_generation_with_a_cache(self, bound):
        bound.eval()
        ids = batch()["input_ids"]
        found = bound.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)
        assert backends(bound) == {"reference"}
        bind(bound, "eager")
        assert torch.equal(
            found, bound.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)
        )

    def test_autocast(self, bound):
        with torch.autocast("cpu", torch.bfloat16):
            assert run(bound) == {"reference"}


def test_explain_of_teacher_and_student(models):
    teacher, student = models
    set_choice("torch")
    bind(teacher.eval().requires_grad_(requires_grad=False), "eager")
    with torch.no_grad():
        teacher(**batch())
    run(student)
    text = str(explain(teacher))
    assert (
        "Qwen3RMSNorm x9: rms_norm/cast_before_weight: eager (rms_norm=eager is chosen, eager (bound))"
        in text
    )
    text = str(explain(student))
    assert "Qwen3Attention x2: qk_norm_rotary/cast_before_weight_half_split: torch (chosen)" in text
    assert "Qwen3RMSNorm x3: rms_norm/cast_before_weight: torch (chosen)" in text
