import importlib
import sys
from typing import Any

import pytest

from veomni_hook.errors import ConfigError, PatchTargetError
from veomni_hook.patches.adopt import adopt, is_patch_config
from veomni_hook.patches.engine import Origin, applicable, patch_source
from veomni_hook.patches.spec import PatchConfig

MODULE = "patchgen_double.modeling_tiny"
pytestmark = pytest.mark.usefixtures("patchgen")


def double(name=""):
    return importlib.import_module("patchgen_double" + (f".{name}" if name else ""))


def origin():
    path = double("modeling_tiny").__file__
    with open(path, encoding="utf-8") as file:
        return file.read(), Origin(MODULE, path, "patchgen_double", "1")


def patch(*configs, device="gpu"):
    source, where = origin()
    return patch_source(source, applicable(configs, MODULE, device), where, device=device)


def execute(text):
    namespace: dict[str, Any] = {"__name__": MODULE}
    exec(compile(text, "tiny.py", "exec", dont_inherit=True), namespace)
    return namespace


def pair():
    return double("tiny_gpu_patch_gen_config").config, double("tiny_npu_patch_gen_config").config


def test_gpu_config_works_unchanged():
    gpu, _ = pair()
    result = patch(gpu)
    module = execute(result.text)
    attention = module["TinyAttention"]("config", layer_idx=3)
    assert attention.forward(21) == ("traced", 42)  # upstream's decorator stays
    assert (attention.config, attention.layer_idx, attention.bound) == ("config", 3, "gpu")
    assert module["rotate"](1, 2) == ("traced", (2, 1))
    assert module["TinyModel"]("config").dummy_forward() == "dummy"
    assert module["TinyNorm"] is __import__("decimal").Decimal
    assert module["TinyOutputWithLoss"](5).value == 5
    assert "TinyForTokenClassification" not in module
    assert module["__all__"] == ["TinyModel", "TinyAttention"]
    assert result.text.count("# --- Patch.1 ---") == 2
    assert "# Helper block.\n# 1. doubles\n" in result.text
    assert "# Patch: TinyAttention.forward\n" in result.text
    assert "@config" not in result.text


def test_gpu_and_npu_pair():
    gpu, npu = pair()
    assert [c.device for c in applicable([gpu, npu], MODULE, "gpu")] == ["gpu"]
    assert [c.device for c in applicable([gpu, npu], MODULE, "npu")] == ["npu"]
    module = execute(patch(gpu, npu, device="npu").text)
    assert module["rotate"](1, 2) == ("traced", ("npu", 1, 2))
    attention = module["TinyAttention"]("config")
    assert attention.forward(21) == ("traced", 42)
    assert attention.bound == "gpu"  # the one modify_init, adopted
    assert module["TinyModel"]("config").dummy_forward() == "dummy"
    assert module["TinyNorm"](4).size == 4


def test_near_miss_of_a_method_is_an_error():
    config = double().PatchConfig(MODULE)
    config.override_method("TinyNorm.forwrad", replacement=pair()[0].patches[1].replacement)
    with pytest.raises(PatchTargetError) as caught:
        patch(config)
    assert caught.value.nearest == ("TinyNorm.forward",)


def test_dropped_parameter_matters_only_where_a_call_gives_it(load):
    source, where = origin()
    code = """
        from patchgen_double import PatchConfig
        config = PatchConfig("patchgen_double.modeling_tiny")
        @config.replace_function("rotate")
        def rotate(q):
            return q
        """
    config = adopt(load(code, head="").config)
    (remark,) = patch_source(source, [config], where).report.remarks
    assert remark.what == "the replacement of rotate drops k" and remark.target == "rotate"
    quiet = source.replace("rotate(hidden_states, hidden_states)", "rotate(hidden_states)")
    patched = patch_source(quiet, [config], where)
    assert "def rotate(q):" in patched.text and not patched.report.remarks


def test_adopting_leaves_the_original_alone():
    gpu, _ = pair()
    before = len(gpu.patches), set(gpu.drop_imported_names)
    adopted = adopt(gpu)
    adopted.patches.clear()
    adopted.drop_imported_names.clear()
    assert (len(gpu.patches), gpu.drop_imported_names) == before


def test_own_config_inherits_from_patchgen_config():
    gpu, _ = pair()
    config = PatchConfig(MODULE, device="gpu")
    config.inherit(gpu, init_modifications=True)
    module = execute(patch(config).text)
    assert module["doubled"](2) == 4
    assert module["TinyOutputWithLoss"].loss == 1.0
    assert module["TinyAttention"]("config").bound == "gpu"


@pytest.mark.parametrize("found", [None, 3, object(), type("PatchConfig", (), {})()])
def test_other_objects_are_refused(found):
    assert not is_patch_config(found)
    with pytest.raises(ConfigError) as caught:
        adopt(found)
    assert caught.value.fix


def test_unknown_patch_type_is_refused():
    config = double().PatchConfig(MODULE)
    config.patches.append(double().Patch("teleport", "TinyNorm", None))
    with pytest.raises(ConfigError, match="teleport"):
        adopt(config)


def test_a_config_without_code_is_named_after_where_it_is_called_config(load):
    made = load("from patchgen_double import PatchConfig\nconfig = PatchConfig('m')\n", head="")
    # Sorts before its maker, which calls it `config`.
    importer = load("gpu_config = None\n", head="")
    importer.gpu_config = made.config
    sys.modules["a_importer_of_test"] = importer
    try:
        assert adopt(made.config).name == f"{made.__name__}:config"
    finally:
        del sys.modules["a_importer_of_test"]


def test_configs_that_extend_each_other_are_an_error():
    one, other = PatchConfig(MODULE, label="a:one"), PatchConfig(MODULE, label="a:other")
    one.base, other.base = other, one
    last = PatchConfig(MODULE, base=one, label="a:last")
    for given in (one, last):
        with pytest.raises(ConfigError, match=r"in a circle: .*a:one -> a:other -> a:one"):
            applicable([given], MODULE, "gpu")
