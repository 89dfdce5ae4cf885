import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints.small import same, through
from veomni_hook import checkpoints
from veomni_hook.checkpoints import CheckpointError, ExpertSizes, TensorConverter
from veomni_hook.checkpoints.saver import ExpertSaver

SIZES = ExpertSizes(3, 8, 6)
MODULES = ("model.layers.0.mlp.experts", "model.layers.11.mlp.experts")
FACTORIES = (checkpoints.from_per_expert, checkpoints.from_fused, checkpoints.from_fused_transposed)
BACK = {
    checkpoints.from_per_expert: checkpoints.to_per_expert,
    checkpoints.from_fused: checkpoints.to_fused,
    checkpoints.from_fused_transposed: checkpoints.to_fused_transposed,
}


def own(sizes=SIZES, dtype=torch.float32, device="cpu"):
    shapes = {"gate_up_proj": sizes.gate_up, "down_proj": sizes.down}
    return {
        f"{module}.{role}": torch.randn(shape).to(dtype).to(device)
        for module in MODULES
        for role, shape in shapes.items()
    }


def singles(sizes=SIZES):
    return through(checkpoints.to_per_expert(sizes), own(sizes))


def test_the_layout_of_single_experts_by_hand():
    tensors = singles()
    module = MODULES[0]
    loaded = through(checkpoints.from_per_expert(SIZES), tensors)
    for expert in range(3):
        gate, up, down = (tensors[f"{module}.{expert}.{role}_proj.weight"] for role in ("gate", "up", "down"))
        assert (gate.shape, up.shape, down.shape) == ((6, 8), (6, 8), (8, 6))
        assert torch.equal(loaded[f"{module}.gate_up_proj"][expert, :6], gate)
        assert torch.equal(loaded[f"{module}.gate_up_proj"][expert, 6:], up)
        assert torch.equal(loaded[f"{module}.down_proj"][expert], down)


def test_the_transposed_layout_by_hand():
    name = f"{MODULES[0]}.gate_up_proj"
    stored = torch.randn(3, 8, 12)
    ((target, made),) = checkpoints.from_fused_transposed(SIZES).convert(name, stored)
    assert target == name and made.shape == (3, 12, 8) and made.is_contiguous()
    assert all(torch.equal(made[e], stored[e].T) for e in range(3))


def test_they_are_what_the_protocol_says():
    for factory, back in BACK.items():
        assert isinstance(factory(SIZES), TensorConverter)
        assert isinstance(back(SIZES), TensorConverter)


@settings(max_examples=60)
@given(st.data())
def test_the_order_of_arrival_makes_no_difference(data):
    sizes = ExpertSizes(*(data.draw(st.integers(1, 5)) for _ in range(3)))
    factory = data.draw(st.sampled_from(FACTORIES))
    square = {"square": "fused_transposed"} if factory is checkpoints.from_fused_transposed else {}
    wanted = own(sizes)
    disk = through(BACK[factory](sizes), wanted)
    order = data.draw(st.permutations(sorted(disk)))
    assert same(through(factory(sizes, **square), {name: disk[name] for name in order}), wanted)


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_missing_is_named_and_nothing_else(data):
    disk = singles()
    gone = data.draw(st.sets(st.sampled_from(sorted(disk)), min_size=1, max_size=6))
    left = data.draw(st.permutations(sorted(disk.keys() - gone)))
    converter = checkpoints.from_per_expert(SIZES, expected=own())
    with pytest.raises(CheckpointError) as caught:
        through(converter, {name: disk[name] for name in left})
    # Where every expert's part of a parameter is gone, the parameter is what is missing.
    whole = {f"{m}.down_proj": {f"{m}.{e}.down_proj.weight" for e in range(3)} for m in MODULES}
    whole |= {
        f"{m}.gate_up_proj": {f"{m}.{e}.{r}_proj.weight" for e in range(3) for r in ("gate", "up")}
        for m in MODULES
    }
    named = set(gone)
    for target, parts in whole.items():
        if parts <= gone:
            named = (named - parts) | {target}
    assert set(caught.value.tensors) == named


def test_a_parameter_is_handed_out_once_it_is_complete():
    converter = checkpoints.from_per_expert(SIZES)
    made = [name for key, tensor in singles().items() for name, _ in converter.convert(key, tensor)]
    assert sorted(made) == sorted(own())
    assert converter._open == {}


def test_nothing_is_held_when_the_model_has_memory():
    target = {name: torch.empty_like(tensor) for name, tensor in own().items()}
    converter = checkpoints.from_per_expert(SIZES, into=target)
    for name, tensor in singles().items():
        converter.convert(name, tensor)
        owned = {tensor.data_ptr() for tensor in target.values()}
        assert all(part.tensor.data_ptr() in owned for part in converter._open.values())


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes_are_kept_and_meta_tensors_stay_meta(factory, dtype):
    for wanted in (own(dtype=dtype), own(dtype=dtype, device="meta")):
        loaded = through(factory(SIZES), through(BACK[factory](SIZES), wanted))
        for name, tensor in wanted.items():
            found = loaded[name]
            assert (found.dtype, found.shape, found.device) == (dtype, tensor.shape, tensor.device)
            assert tensor.is_meta or torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_parameters_that_need_gradients_come_and_go():
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in own().items()}
    disk = through(checkpoints.to_per_expert(SIZES), parameters)
    target = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in parameters.items()}
    through(checkpoints.from_per_expert(SIZES, into=target), disk)
    assert all(torch.equal(target[name], parameters[name]) and target[name].is_leaf for name in target)


@pytest.mark.parametrize(
    ("name", "handled"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv", True),
        ("experts.down_proj", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.gate_up_proj.weight", False),
        ("model.layers.0.mlp.shared_experts.down_proj.weight", False),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_what_is_handled(name, handled):
    assert checkpoints.from_any(SIZES).can_handle(name) is handled


def refused(converter, name, tensor, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        converter.convert(name, tensor)
    assert caught.value.tensors == (name,)
    assert name in str(caught.value) and str(list(tensor.shape)) in str(caught.value)


@pytest.mark.parametrize(
    "rest",
    [
        "gate_up_proj_bias", "gate_up_proj.weight", "down_proj_scale_inv", "0.gate_proj.bias",
        "0.gate_proj.weight_scale_inv", "0.gate_up_proj.weight", "00.gate_proj.weight", "-1.gate_proj.weight",
        "first.gate_proj.weight", "0.w4.weight", "0.lora_A.weight",
    ],
)  # fmt: skip
def test_names_that_are_not_understood(rest):
    name = f"{MODULES[0]}.{rest}"
    refused(checkpoints.from_any(SIZES), name, torch.zeros(6, 8), "is not the name of an expert tensor")


@pytest.mark.parametrize("factory", [*FACTORIES, checkpoints.from_any])
@pytest.mark.parametrize(
    ("rest", "shape"),
    [
        ("gate_up_proj", (3, 12, 9)), ("gate_up_proj", (4, 12, 8)), ("gate_up_proj", (36, 8)),
        ("gate_up_proj", (3, 6, 8)), ("down_proj", (3, 12, 8)), ("down_proj", (2, 8, 6)),
    ],
)  # fmt: skip
def test_fused_shapes_that_are_not_understood(factory, rest, shape):
    tensor = torch.zeros(shape)
    refused(factory(SIZES), f"{MODULES[0]}.{rest}", tensor, "has an unknown shape")


def test_a_wrong_shape_says_which_are_right():
    with pytest.raises(CheckpointError) as caught:
        checkpoints.from_any(SIZES).convert("m.experts.gate_up_proj", torch.zeros(1))
    assert (
        "understood are one expert's gate and up [6, 8], down [8, 6]; gate_up_proj [3, 12, 8], "
        "down_proj [3, 8, 6]; gate_up_proj [3, 8, 12], down_proj [3, 6, 8] (transposed)"
    ) in str(caught.value)


@pytest.mark.parametrize("role", ["gate_proj", "up_proj", "down_proj"])
def test_a_single_expert_of_the_wrong_shape(role):
    wrong = (6, 8) if role == "down_proj" else (8, 6)
    name = f"{MODULES[0]}.1.{role}.weight"
    refused(checkpoints.from_per_expert(SIZES), name, torch.zeros(wrong), "does not have the shape")


def test_a_factory_takes_its_layout_and_the_one_in_memory_alone():
    single, turned = torch.zeros(6, 8), torch.zeros(3, 8, 12)
    name = f"{MODULES[0]}.0.up_proj.weight"
    for factory in (checkpoints.from_fused, checkpoints.from_fused_transposed):
        refused(factory(SIZES), name, single, "belongs to a single expert")
    for factory in (checkpoints.from_fused, checkpoints.from_per_expert):
        refused(factory(SIZES), f"{MODULES[0]}.gate_up_proj", turned, "has an unknown shape")


@pytest.mark.parametrize(
    ("sizes", "role"), [(ExpertSizes(2, 8, 4), "gate_up_proj"), (ExpertSizes(2, 8, 8), "down_proj")]
)
def test_a_square_is_never_guessed(sizes, role):
    name, tensor = f"{MODULES[0]}.{role}", torch.randn(2, 8, 8)
    for factory in (checkpoints.from_fused_transposed, checkpoints.from_any):
        refused(factory(sizes), name, tensor, "one shape in both fused layouts")
        ((_, as_it_is),) = factory(sizes, square="fused").convert(name, tensor)
        assert as_it_is is tensor
        ((_, turned),) = factory(sizes, square="fused_transposed").convert(name, tensor)
        assert torch.equal(turned, tensor.transpose(1, 2))
    # These know one fused layout only.
    for factory in (checkpoints.from_fused, checkpoints.from_per_expert):
        assert factory(sizes).convert(name, tensor)[0][1] is tensor
    with pytest.raises(CheckpointError, match="is no fused layout"):
        checkpoints.from_any(sizes, square="per_expert")


def test_a_square_argument_decides_squares_only():
    converter = checkpoints.from_any(SIZES, square="fused_transposed")
    tensor = torch.zeros(SIZES.gate_up)
    assert converter.convert(f"{MODULES[0]}.gate_up_proj", tensor)[0][1] is tensor


def test_duplicates():
    disk, fused = singles(), own()
    name, target = f"{MODULES[0]}.0.gate_proj.weight", f"{MODULES[0]}.gate_up_proj"
    converter = checkpoints.from_any(SIZES)
    converter.convert(name, disk[name])
    refused(converter, name, disk[name], "came before: a duplicate")
    refused(converter, target, fused[target], "came in parts before: a duplicate")
    other = name.replace("gate_proj", "w1")
    refused(converter, other, disk[name], "came before: a duplicate")

    converter = checkpoints.from_any(SIZES)
    converter.convert(target, fused[target])
    refused(converter, target, fused[target], "was complete: a duplicate")
    refused(converter, name, disk[name], "was complete: a duplicate")


def test_experts_of_one_parameter_are_of_one_dtype_and_device():
    disk = singles()
    first, second = (f"{MODULES[0]}.{e}.gate_proj.weight" for e in (0, 1))
    converter = checkpoints.from_per_expert(SIZES)
    converter.convert(first, disk[first])
    refused(converter, second, disk[second].half(), "joins others of torch.float32 on cpu")
    refused(converter, second, disk[second].to("meta"), "joins others of torch.float32 on cpu")


@pytest.mark.parametrize(
    "held",
    [torch.empty(3, 12, 8, device="meta"), torch.empty(3, 12, 8, dtype=torch.float16), torch.empty(3, 8, 12)],
)  # fmt: skip
def test_memory_that_does_not_fit(held):
    name = f"{MODULES[0]}.gate_up_proj"
    converter = checkpoints.from_any(SIZES, into={name: held})
    refused(converter, name, own()[name], "cannot be copied into")
    single = f"{MODULES[0]}.0.up_proj.weight"
    converter = checkpoints.from_any(SIZES, into={name: held})
    refused(converter, single, singles()[single], "cannot be copied into")


def test_layers_that_the_model_does_not_have_and_other_tensors():
    refused(
        checkpoints.from_any(SIZES), "lm_head.weight", torch.zeros(2, 2), "does not belong to routed experts"
    )
    name = "model.layers.99.mlp.experts.down_proj"
    converter = checkpoints.from_any(SIZES, expected=[*own(), "lm_head.weight"])
    refused(converter, name, torch.zeros(SIZES.down), "which the model does not have")


def test_half_a_module_is_incomplete_without_being_expected():
    converter = checkpoints.from_fused(SIZES)
    name = f"{MODULES[0]}.gate_up_proj"
    converter.convert(name, own()[name])
    with pytest.raises(CheckpointError, match="down_proj: no part of it") as caught:
        converter.finalize()
    assert caught.value.tensors == (f"{MODULES[0]}.down_proj",)


def test_a_checkpoint_without_experts():
    with pytest.raises(CheckpointError, match="no expert tensor was found"):
        checkpoints.from_any(SIZES).finalize()
    checkpoints.from_any(SIZES, expected=["lm_head.weight"]).finalize()


def test_a_long_list_is_cut_in_the_text_alone():
    names = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(50)]
    with pytest.raises(CheckpointError, match="and 30 more tensors") as caught:
        checkpoints.from_any(SIZES, expected=names).finalize()
    assert sorted(caught.value.tensors) == sorted(names)


def test_parts_of_a_model_with_other_sizes():
    talker = ExpertSizes(2, 4, 3)
    disk = {f"thinker.{n}": t for n, t in singles().items()}
    disk |= {f"talker.{n}": t for n, t in singles(talker).items()}
    converters = [
        checkpoints.from_any(sizes, under=under)
        for sizes, under in ((SIZES, "thinker."), (talker, "talker."))
    ]
    for name, tensor in disk.items():
        (mine,) = [each for each in converters if each.can_handle(name)]
        mine.convert(name, tensor)
    for each in converters:
        each.finalize()


def test_a_block_with_another_name_in_memory():
    block = ("block_sparse_moe", "mlp")
    converter = checkpoints.from_per_expert(SIZES, block=block)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    router = torch.randn(3, 8)
    assert converter.can_handle(name)
    ((renamed, same_router),) = converter.convert(name, router)
    assert renamed == "model.layers.0.mlp.gate.weight" and same_router is router
    refused(converter, name, router, "came before: a duplicate")
    saver = checkpoints.to_per_expert(SIZES, block=block, projections=("w1", "w3", "w2"))
    assert saver.convert(renamed, router) == [(name, router)]


def test_the_way_back_is_checked_too():
    tensors = own()
    name = f"{MODULES[0]}.gate_up_proj"
    saver = checkpoints.to_per_expert(SIZES)
    refused(saver, "lm_head.weight", torch.zeros(2, 2), "does not belong to routed experts")
    refused(saver, name, tensors[name].transpose(1, 2), "is not in the layout in memory")
    refused(saver, f"{MODULES[0]}.0.up_proj.weight", torch.zeros(6, 8), "is not in the layout in memory")
    refused(saver, f"{MODULES[0]}.gate_up_proj_bias", torch.zeros(3, 12), "is not in the layout in memory")
    saver.convert(name, tensors[name])
    refused(saver, name, tensors[name], "came before: a duplicate")
    with pytest.raises(CheckpointError) as caught:
        saver.finalize()
    assert caught.value.tensors == (f"{MODULES[0]}.down_proj",)
    with pytest.raises(CheckpointError, match="does not read"):
        checkpoints.to_per_expert(SIZES, projections=("gate", "up", "down"))


def test_single_experts_are_views_and_can_be_written(tmp_path):
    from safetensors.torch import load_file, save_file

    wanted = own()
    disk = through(checkpoints.to_per_expert(SIZES), wanted)
    assert isinstance(checkpoints.to_per_expert(SIZES), ExpertSaver)
    storages = {tensor.untyped_storage().data_ptr() for tensor in wanted.values()}
    assert all(tensor.untyped_storage().data_ptr() in storages for tensor in disk.values())
    save_file(disk, tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), disk)


@pytest.mark.parametrize("strided", [False, True])
def test_what_is_written_is_contiguous(strided):
    wanted = own()
    if strided:
        wanted = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in wanted.items()}
    for back in BACK.values():
        disk = through(back(SIZES), wanted)
        assert all(tensor.is_contiguous() for tensor in disk.values())
