import pytest
import torch
import torch._dynamo.testing

from tests.kernels.dispatched import compiled, targets
from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.selection.process_choice import set_choice

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("anywhere")

KERNELS = {
    "rms_norm": "rms_norm=triton",
    "add_rms_norm": "add_rms_norm=triton",
    "rotary": "rotary=triton",
    "gated_mlp": "gated_mlp=triton",
    "qk_norm_rotary": "qk_norm_rotary=triton",
}


def operators(counter):
    """The names of our operators in graphs and what they call."""
    return {target.split(".")[1] for target in targets(counter) if target.startswith("veomni_hook.")}


def train(model, inputs, steps=2):
    """Losses and gradients of some steps of one batch."""
    found = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
    return found, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("rms_norm=triton,rotary=triton", marks=pytest.mark.slow),
        ",".join(KERNELS.values()),
    ],
)
def test_a_model_is_one_graph_with_the_kernels_that_were_named(patched, choice):
    upstream, model = (each.to(DEVICE) for each in pair(patched, num_hidden_layers=1))
    inputs = {name: each.to(DEVICE) for name, each in batch(1, 6).items()}
    set_choice(choice)
    run, counter = compiled(model)
    losses, gradients = train(run, inputs, steps=2)
    assert counter.frame_count == 1
    named = {op for op in KERNELS if KERNELS[op] in choice}
    # Inside the fused op there is no rotation of its own.
    wanted = named - {"rotary"} if "qk_norm_rotary" in named else named
    assert wanted <= operators(counter)
    expected, upstream_gradients = train(upstream, inputs, steps=1)
    for loss in losses:
        close(loss, expected[0], 1e-5)
    close(gradients, upstream_gradients, 1e-4)


def test_a_model_is_one_graph_with_torch_kernels(patched, caplog):
    upstream, model = (each.to(DEVICE) for each in pair(patched, num_hidden_layers=1))
    inputs = {name: each.to(DEVICE) for name, each in batch(1, 6).items()}
    set_choice(",".join(f"{op}=torch" for op in KERNELS))
    run, counter = compiled(model)
    losses, gradients = train(run, inputs, steps=2)
    assert counter.frame_count == 1 and "not traceable" not in caplog.text
    expected, upstream_gradients = train(upstream, inputs, steps=1)
    for loss in losses:
        close(loss, expected[0], 1e-5)
    close(gradients, upstream_gradients, 1e-4)


@pytest.mark.slow
def test_bindings_of_two_models_do_not_compile_each_other_anew(patched):
    (_, teacher), (_, student) = (pair(patched, num_hidden_layers=1) for _ in range(2))
    teacher, student = teacher.to(DEVICE), student.to(DEVICE)
    bind(student, rms_norm="triton")
    bind(teacher, "eager")
    inputs = {name: each.to(DEVICE) for name, each in batch(1, 6).items()}
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    runs = [torch.compile(model, fullgraph=True, backend=backend) for model in (teacher, student)]
    for run in runs * 3:
        run(**inputs, use_cache=False)
    assert backend.frame_count == 2
    assert "rms_norm" in operators(backend)
